"""Exhibits measured by benchmarks: in the network lab, where workers have slow links, or without it on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from scripts import bench, netlab
from scripts.exhibits.base import Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.charts.sheets import Chart, Figures
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds.gpu import basis_of
from scripts.exhibits.kinds.predictions import Computed, sheet
from scripts.exhibits.passes import MeasuredPasses
from scripts.labs.first_process import LabError
from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters.profile import Profile

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT / "scripts" / "profiles"
# Columns of seconds in the sheets; pictures look them up by name.
MEDIAN, LEAST, MOST, PREDICTED = "median s", "least", "most", "predicted"
SECONDS = (MEDIAN, LEAST, MOST, PREDICTED, "predicted / median")
TURNS = "every turn"
NOT_COUNTED = "not counted"
# Recipe of the measurements. Raise it when the measured code becomes faster or slower, so that older records no longer
# count.
EDITION = 2
# Time limit of a benchmark outside of the lab in seconds.
TIMEOUT = 900.0
LINKS = "shaped links between processes on one machine, whose cores they share"


@dataclass(frozen=True)
class Measurement(Computation):
    """A computation that measures time and must run alone.

    Attributes:
        expected: Expected seconds, see :class:`Job`.
    """

    alone: ClassVar[bool] = True
    expected: float | None = field(default=None, compare=False)


@contextmanager
def _said(log: Path) -> Iterator[None]:
    """Redirects the output of this process and its children to a file."""
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("wb") as file:
        for number, stream in enumerate(streams, 1):
            stream.flush()
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, (stream, old) in enumerate(zip(streams, kept, strict=True), 1):
                stream.flush()
                os.dup2(old, number)
                os.close(old)


def in_lab(
    workers: int, gbit: float, limit: float, words: Sequence[str], measured: str = "", delay_ms: float = 0.0
) -> Any:
    """Runs a benchmark as every worker of a network lab, which ends with this process.

    Args:
        workers: Number of workers.
        gbit: Bandwidth of each link and direction, which the benchmark also gets as an option.
        limit: Time limit of the lab in seconds.
        words: Script and options of the benchmark; paths are relative to the repository.
        measured: Digest of the profile that determines how long workers sleep, unless it is part of the repository.
            Another file is another job.
        delay_ms: One-way delay of each message.

    Returns:
        Content that the benchmark wrote to ``--json``.

    Raises:
        ConfigError: if this machine cannot run a lab.
        TrainingError: if the benchmark failed or took too long.
    """
    del measured
    with TemporaryDirectory() as folder:
        found, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        lab = ["run", f"--workers={workers}", f"--gbit={gbit:g}", f"--timeout={limit:g}", f"--delay-ms={delay_ms:g}"]
        command = [sys.executable, *map(_here, bench.current(words)), f"--gbit={gbit:g}", f"--json={found}"]
        try:
            with _said(log):
                code = netlab.run(netlab.parse([*lab, "--", *command]))
        except (LabError, OSError) as error:
            raise ConfigError(" ".join(str(error).split())) from error
        if code:
            raise TrainingError(complaint(log.read_text(errors="replace"), "the lab", code))
        return json.loads(found.read_bytes())


def _here(word: str) -> str:
    """Word in which paths below scripts/ are absolute."""
    return re.sub(r"(^|[:=])scripts/", rf"\g<1>{ROOT / 'scripts'}/", word)


def slept(words: Sequence[str]) -> str:
    """Model whose assumed passes determine how long a benchmark sleeps, or an empty string."""
    found = [match[1] for word in words if (match := re.fullmatch(r"profile:scripts/profiles/(\w+)\.json", word))]
    return found[0] if found else ""


def asleep(words: Sequence[str], measured: MeasuredPasses) -> tuple[str, ...]:
    """Replaces assumed passes by measured ones in the options of a benchmark.

    Args:
        words: Options with assumed passes.
        measured: Measured passes of the same model.

    Raises:
        ConfigError: if the model has another size.
    """
    model, place = slept(words), words.index("--compute")
    measured.checked(model, sum(Profile.read(PROFILES / f"{model}.json").entries))
    kept = (*words[:place], *words[place + 2 :])
    return tuple(f"profile:{measured.path}" if slept([word]) else word for word in kept)


def complaint(log: str, what: str, code: int) -> str:
    """First error in a log, which is the cause of the later ones."""
    errors = (line.partition("error: ")[2] for line in log.splitlines() if "error: " in line)
    return next(errors, f"{what} ended with exit code {code}")


def _seconds(found: Sequence[float], predicted: float | None) -> list[float | str]:
    middle = median(found)
    further: list[float | str] = [NOT_COUNTED] * 2 if predicted is None else [predicted, predicted / middle]
    return [middle, min(found), max(found), *further]


def _turns(found: Sequence[float]) -> str:
    return ", ".join(f"{each:.3g}" for each in found)


def schedules(**setting: Any) -> dict[str, Any]:
    """Measured and predicted seconds of a training step under each schedule.

    Args:
        setting: Arguments of :func:`in_lab`; the benchmark is bench.py overlap.
    """
    found = in_lab(**setting)
    rows: dict[str, list[float | str]] = {
        _row_name(row): [
            *_seconds(row["seconds"], row["predicted"]),
            float(row["groups"]),
            row["ideal"] if row["ideal"] is not None else "no halves",
            _turns(row["seconds"]),
        ]
        for row in found
    }
    columns = ("method, schedule", *SECONDS, "groups", "ideal", TURNS)
    start = {
        "seconds of both passes": [found[0]["compute"]],
        "milliseconds of a round of short messages": [1000 * found[0]["alpha"]],
        "Gbit/s of a link": [found[0]["gbit"]],
    }
    title = f"Seconds of a step, {setting['workers']} workers at {setting['gbit']:g} Gbit/s"
    return {
        "sheets": [
            sheet(title, columns, rows),
            sheet("What the predictions start from, measured before", ("figure", "value"), start),
        ]
    }


def _row_name(row: Mapping[str, Any]) -> str:
    # A single stream is the default and is not mentioned.
    several = f", {row['streams']} streams" if row.get("streams", 1) > 1 else ""
    return f"{row['method']}, {row['schedule']}{several}"


def delayed(delays_ms: Sequence[float], **setting: Any) -> dict[str, Any]:
    """Seconds of a training step under each schedule, once for each delay of messages.

    Args:
        delays_ms: One-way delays of messages.
        setting: Other arguments of :func:`in_lab`.
    """
    found = [schedules(**setting, delay_ms=delay)["sheets"][0] for delay in delays_ms]
    pairs = zip(found, delays_ms, strict=True)
    return {"sheets": [{**made, "title": f"{made['title']}, delayed by {delay:g} ms"} for made, delay in pairs]}


def synchronizations(**setting: Any) -> dict[str, Any]:
    """Seconds of whole synchronizations, as measured and as predicted from counted rounds and bytes.

    Args:
        setting: Arguments of :func:`in_lab`; the benchmark is bench.py sync.
    """
    found = in_lab(**setting)
    ((title, timed),) = found["cases"].items()
    header, *lines = found["setting"]["breakdown"]
    counted = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    rows = {
        row["name"].removesuffix(", exact"): [
            *_counted(row["seconds"], counted.get(row["name"])),
            _turns(row["seconds"]),
        ]
        for row in timed
    }
    columns = ("method", *SECONDS, "messages, predicted", "messages alone", "rounds", "MB sent", TURNS)
    return {"sheets": [sheet(f"Seconds of a synchronization, {title}, {setting['gbit']:g} Gbit/s", columns, rows)]}


def _counted(seconds: Sequence[float], known: Mapping[str, Any] | None) -> list[float | str]:
    """Figures of a row; methods of torch have only seconds."""
    if known is None:
        return [*_seconds(seconds, None), *[NOT_COUNTED] * 4]
    messages = (known["messages, predicted"] / 1000, known["alone"] / 1000)
    counts = (float(known["rounds"]), known["bytes"] / 1e6)
    return [*_seconds(seconds, known["predicted"] / 1000), *messages, *counts]


@dataclass(frozen=True)
class Measured(Computed):
    """A benchmark in the network lab; ``arguments`` are those of :func:`in_lab`."""

    recipe: int = EDITION

    def assumes(self, scale: str) -> Sequence[str]:
        model = slept(dict(at(scale, self.arguments))["words"])
        return [model] if model else []

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> Measured:
        models = {slept(dict(each)["words"]) for each in self.arguments.values()}
        own = {model: given[model] for model in models if model in given}
        arguments = {scale: _asleep(each, own) for scale, each in self.arguments.items()}
        return replace(self, arguments=arguments, basis=basis_of(self.basis, own))

    def job(self, scale: str) -> Measurement:
        """The measurement."""
        arguments = at(scale, self.arguments)
        given = dict(arguments)
        delays = given.get("delays_ms", (0.0,))
        shell = "; ".join(typed(given["workers"], given["gbit"], given["words"], delay) for delay in delays)
        return Measurement(self.name, self.function, arguments, shell, self.recipe)

    def caption(self, scale: str) -> str:
        return f"{self.words} {self.job(scale).command}"

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        sheets = [made for made in results.of(self.job(scale)).data.get("sheets", ()) if MEDIAN in made["columns"]]
        words = "bars and figures: medians, with minimum and maximum; diamonds: predictions"
        return [
            Picture(f"seconds {place}" if place > 1 else "seconds", f"{made['title']}; {words}", partial(_draw, made))
            for place, made in enumerate(sheets, 1)
        ]


def _asleep(arguments: tuple[tuple[str, Any], ...], own: Mapping[str, MeasuredPasses]) -> tuple[tuple[str, Any], ...]:
    given = dict(arguments)
    measured = own.get(slept(given["words"]))
    if measured is None:
        return arguments
    return tuple({**given, "words": asleep(given["words"], measured), "measured": measured.digest}.items())


def typed(workers: int, gbit: float, words: Sequence[str], delay_ms: float = 0.0) -> str:
    """Command that runs a benchmark in a lab; see :func:`in_lab`."""
    lab = f"--workers {workers} --gbit {gbit:g}{f' --delay-ms {delay_ms:g}' if delay_ms else ''}"
    return f"python scripts/netlab.py run {lab} -- python {' '.join(bench.current(words))} --gbit {gbit:g}"


def _draw(made: Figures, figure: Any) -> None:
    """Horizontal bars, because names are long."""
    rows = [dict(zip(made["columns"], row, strict=True)) for row in made["rows"]]
    names, middle = [str(row[made["columns"][0]]) for row in rows], [row[MEDIAN] for row in rows]
    figure.set_size_inches(axes_of.SIZE[0], 0.8 + 0.3 * len(rows))
    axes, looks = figure.subplots(), palette.looks(names)
    axes_of.plain(axes, "seconds", grid="x")
    reach = [[row[MEDIAN] - row[LEAST] for row in rows], [row[MOST] - row[MEDIAN] for row in rows]]
    colors = [looks[name].color for name in names]
    axes.barh(range(len(rows)), middle, xerr=reach, ecolor=palette.SOFT, capsize=2.5, height=0.6, color=colors)
    known = [(row[PREDICTED], place) for place, row in enumerate(rows) if not isinstance(row[PREDICTED], str)]
    if known:
        edge = {"markeredgecolor": palette.PAPER, "color": palette.INK}
        axes.plot(*zip(*known, strict=True), "D", markersize=5, label="predicted", **edge)
    end = 1.04 * max(row[MOST] for row in rows)
    for place, value in enumerate(middle):
        axes.text(end, place, f"{value:.3g}", va="center", fontsize=axes_of.SMALL)
    axes.set_xlim(0, end)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)


def timed(
    script: str, runs: Sequence[Sequence[str]], floor: str, workers: int, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """One sheet per table of a benchmark; tables of several runs with the same title are joined.

    Args:
        script: Path of the benchmark, relative to the repository.
        runs: Options of each run.
        floor: Row that the others are compared with.
        workers: Number of processes for torchrun; 0 runs one process without it.
        beside: Names of further columns of the benchmark.

    Raises:
        TrainingError: if a run failed or took too long.
    """
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for words in runs:
        for title, rows in _run(script, words, workers).items():
            tables.setdefault(title, []).extend(rows)
    return {"sheets": [_sheet(title, rows, floor, beside) for title, rows in tables.items()]}


def _run(script: str, words: Sequence[str], workers: int) -> Mapping[str, Any]:
    """Tables by title."""
    name = " ".join(bench.current([script])[:2])
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        start = ["-m", "torch.distributed.run", *local(workers)] if workers else []
        command = [sys.executable, *start, *bench.current([str(ROOT / script), *words]), f"--json={found}"]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"{name} did not end within {TIMEOUT:g} s; check the load of this machine") from error
        if ended.returncode:
            raise TrainingError(complaint(ended.stderr, name, ended.returncode))
        tables: Mapping[str, Any] = json.loads(found.read_bytes())["cases"]
        return tables


def local(workers: int) -> Sequence[str]:
    """Options of torchrun for processes connected by loopback."""
    return ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(workers))


def _sheet(title: str, rows: Sequence[Mapping[str, Any]], floor: str, further: Sequence[str]) -> Mapping[str, Any]:
    """Milliseconds, and multiples of the floor."""
    base = next(median(row["seconds"]) for row in rows if row["name"] == floor)
    columns = ("what", "median ms", "least", "most", f"x {floor}", *further)
    figures = {}
    for row in rows:
        times = (median(row["seconds"]), min(row["seconds"]), max(row["seconds"]))
        figures[row["name"]] = [*(1000 * each for each in times), times[0] / base, *(row[name] for name in further)]
    return sheet(title, columns, figures)


@dataclass(frozen=True)
class Timed(Computed):
    """An exhibit measured by a benchmark; ``arguments`` are those of :func:`timed`."""

    charts: tuple[Chart, ...] = ()
    recipe: int = EDITION

    def job(self, scale: str) -> Measurement:
        """The measurement."""
        arguments = at(scale, self.arguments)
        given = dict(arguments)
        start = ("torchrun", *local(given["workers"])) if given["workers"] else ("python",)
        shell = "; ".join(" ".join((*start, *bench.current((given["script"], *words)))) for words in given["runs"])
        return Measurement(self.name, self.function, arguments, shell, self.recipe)

    def caption(self, scale: str) -> str:
        return f"{self.words} {self.job(scale).command}"
