"""Exhibits measured by benchmarks: in the network lab, where workers have slow links, or without it on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, TypeAlias

from scripts import bench, netlab
from scripts.exhibits.base import Basis, ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts import style
from scripts.exhibits.charts.sheets import Figures
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.predictions import Computed, sheet
from scripts.exhibits.tables import Cell, Table, row_of
from scripts.labs.first_process import LabError
from spardl.basics.errors import ConfigError, TrainingError

ROOT = Path(__file__).resolve().parents[3]
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


@dataclass(frozen=True)
class Measurement(Computation):
    """A computation that measures time and must run alone, with its expected seconds."""

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


def in_lab(workers: int, gbit: float, limit: float, words: Sequence[str], delay_ms: float = 0.0) -> Any:
    """Runs a benchmark as every worker of a network lab, which ends with this process.

    Args:
        workers: Number of workers.
        gbit: Bandwidth of each link and direction, which the benchmark also gets as an option.
        limit: Time limit of the lab in seconds.
        words: Script and options of the benchmark; paths are relative to the repository.
        delay_ms: One-way delay of each message.

    Returns:
        Content that the benchmark wrote to ``--json``.

    Raises:
        ConfigError: If this machine cannot run a lab.
        TrainingError: If the benchmark failed or took too long.
    """
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


def complaint(log: str, what: str, code: int) -> str:
    """First error in a log, which is the cause of the later ones."""
    errors = (line.partition("error: ")[2] for line in log.splitlines() if "error: " in line)
    return next(errors, f"{what} ended with exit code {code}")


def turns(found: Sequence[float], factor: float = 1.0) -> str:
    """Returns the figures of every turn in one text, times a factor."""
    return ", ".join(f"{factor * each:.3g}" for each in found)


def _seconds(found: Sequence[float], predicted: float | None) -> list[float | str]:
    middle = median(found)
    further: list[float | str] = [NOT_COUNTED] * 2 if predicted is None else [predicted, predicted / middle]
    return [middle, min(found), max(found), *further]


def schedules(**setting: Any) -> dict[str, Any]:
    """Measured and predicted seconds of a step under each schedule: bench.py overlap, with arguments of in_lab."""
    found = in_lab(**setting)
    rows: dict[str, list[float | str]] = {
        _row_name(row): [
            *_seconds(row["seconds"], row["predicted"]),
            float(row["groups"]),
            row["ideal"] if row["ideal"] is not None else "no halves",
            turns(row["seconds"]),
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
    """Seconds of a step under each schedule as :func:`schedules`, once for each one-way delay of messages."""
    found = [schedules(**setting, delay_ms=delay)["sheets"][0] for delay in delays_ms]
    pairs = zip(found, delays_ms, strict=True)
    return {"sheets": [{**made, "title": f"{made['title']}, delayed by {delay:g} ms"} for made, delay in pairs]}


def synchronizations(**setting: Any) -> dict[str, Any]:
    """Seconds of whole synchronizations, measured and predicted: bench.py sync, with arguments of in_lab."""
    found = in_lab(**setting)
    ((title, timed),) = found["cases"].items()
    header, *lines = found["setting"]["breakdown"]
    counted = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    rows = {
        row["name"].removesuffix(", exact"): [
            *_counted(row["seconds"], counted.get(row["name"])),
            turns(row["seconds"]),
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

    def commands(self, given: Mapping[str, Any]) -> Iterable[str]:
        """Commands that print the same figures, from the arguments by name."""
        delays = given.get("delays_ms", (0.0,))
        return (typed(given["workers"], given["gbit"], given["words"], delay) for delay in delays)

    def job(self, scale: str) -> Measurement:
        """The measurement."""
        arguments = at(scale, self.arguments)
        shell = "; ".join(self.commands(dict(arguments)))
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


def typed(workers: int, gbit: float, words: Sequence[str], delay_ms: float = 0.0) -> str:
    """Command that runs a benchmark in a lab."""
    lab = f"--workers {workers} --gbit {gbit:g}{f' --delay-ms {delay_ms:g}' if delay_ms else ''}"
    return f"python scripts/netlab.py run {lab} -- python {' '.join(bench.current(words))} --gbit {gbit:g}"


def _draw(made: Figures, figure: Any) -> None:
    rows = [dict(zip(made["columns"], row, strict=True)) for row in made["rows"]]
    names, middle = [str(row[made["columns"][0]]) for row in rows], [row[MEDIAN] for row in rows]
    figure.set_size_inches(style.SIZE[0], 0.8 + 0.3 * len(rows))
    axes, looks = figure.subplots(), style.looks(names)
    style.plain(axes, "seconds", grid="x")
    reach = [[row[MEDIAN] - row[LEAST] for row in rows], [row[MOST] - row[MEDIAN] for row in rows]]
    colors = [looks[name].color for name in names]
    axes.barh(range(len(rows)), middle, xerr=reach, ecolor=style.SOFT, capsize=2.5, height=0.6, color=colors)
    known = [(row[PREDICTED], place) for place, row in enumerate(rows) if not isinstance(row[PREDICTED], str)]
    if known:
        edge = {"markeredgecolor": style.PAPER, "color": style.INK}
        axes.plot(*zip(*known, strict=True), "D", markersize=5, label="predicted", **edge)
    end = 1.04 * max(row[MOST] for row in rows)
    for place, value in enumerate(middle):
        axes.text(end, place, f"{value:.3g}", va="center", fontsize=style.SMALL)
    axes.set_xlim(0, end)
    style.rows_from_the_top(axes, names)
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
class Timed(Measured):
    """An exhibit measured by a benchmark; ``arguments`` are those of :func:`timed`."""

    def commands(self, given: Mapping[str, Any]) -> Iterable[str]:
        start = ("torchrun", *local(given["workers"])) if given["workers"] else ("python",)
        return (" ".join((*start, *bench.current((given["script"], *words)))) for words in given["runs"])

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        return ()


class Place(NamedTuple):
    """Number of workers, and bandwidth of each link in Gbit/s."""

    workers: int
    gbit: float

    @property
    def title(self) -> str:
        """Name of a row."""
        return f"P = {self.workers}, {self.gbit:g} Gbit/s"


class Course(NamedTuple):
    """Plan of one size preset.

    Attributes:
        places: Places to compare.
        words: Options of bench.py overlap without methods and schedule.
        limit: Time limit of a lab in seconds.
        cost: Approximate duration of all runs, in words.
    """

    places: tuple[Place, ...]
    words: tuple[str, ...]
    limit: float
    cost: str


def timed_updates(**setting: Any) -> dict[str, Any]:
    """Seconds per step of each method, by turn: bench.py overlap, with arguments of in_lab."""
    return {"rows": in_lab(**setting), "cores": os.cpu_count()}


# Measurements of one place by method: ``seconds`` of each turn, and those ``predicted``.
Updates: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class LabUpdates(Exhibit):
    """One method against others at several numbers of workers, each on links of several speeds.

    Attributes:
        methods: Choices of ``compressor=`` by name; the first one is compared with all others.
        courses: Course by size preset.
        model: The model, for readers.
    """

    methods: Mapping[str, str]
    courses: ByScale[Course]
    model: str
    basis: Basis = field(
        default=Basis(
            simulated="only the predictions",
            measured="seconds of steps over shaped links between processes on one machine, whose cores they share; "
            "gradients, messages and updates are real, of a model of this size",
            assumed="the passes: workers sleep for the times of a profile, scaled, as if each had a GPU",
        ),
        kw_only=True,
    )

    def job(self, course: Course, place: Place) -> Measurement:
        """Job that measures all methods in turns in one setting."""
        methods = ("--methods", ",".join(self.methods.values()), "--schedules", "after_backward")
        words = ("scripts/bench_overlap.py", *course.words, *methods)
        arguments = (("workers", place.workers), ("gbit", place.gbit), ("limit", course.limit), ("words", words))
        return Measurement(self.name, timed_updates, arguments, typed(*place, words), EDITION)

    def jobs(self, scale: str) -> Sequence[Measurement]:
        course = at(scale, self.courses)
        return [self.job(course, place) for place in course.places]

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} labs, {at(scale, self.courses).cost}"

    def caption(self, scale: str) -> str:
        return (
            f"{self.model}. A step: both passes, then the synchronization, then the update; nothing overlaps. Medians "
            "of turns that alternate between methods; ratios are turn by turn. Predicted: the passes, a worker's own "
            "work as measured while all did theirs, and counted rounds and bytes on the network as measured just "
            "before. All workers share the cores of one machine: where workers are many and links are fast, steps wait "
            "for cores and not for the network, and methods that compute little look better than on machines of their "
            f"own. {' '.join(at(scale, self.courses).words)}"
        )

    def _by_name(self, data: Mapping[str, Any]) -> Updates:
        by_choice = {row["method"]: row for row in data["rows"]}
        return {name: by_choice[choice] for name, choice in self.methods.items()}

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        ours, *others = self.methods
        ratios = ("place", *(f"{ours} over {each}{how}" for each in others for how in ("", f", {PREDICTED}")), "cores")
        seconds = ("place", *(f"{each}, {what}" for each in self.methods for what in ("ms", PREDICTED)), TURNS)
        return [
            self._table(f"how many times as fast {ours}'s steps are", ratios, self._ratio_cells, scale, results),
            self._table("milliseconds of a step, medians", seconds, self._second_cells, scale, results),
        ]

    def _table(
        self,
        title: str,
        columns: Sequence[str],
        cells: Callable[[Mapping[str, Any]], list[Cell]],
        scale: str,
        results: Results,
    ) -> Table:
        course, count = at(scale, self.courses), len(columns) - 1
        jobs = {place.title: self.job(course, place) for place in course.places}
        rows = [row_of(name, job, results.of(job), count, cells) for name, job in jobs.items()]
        return Table(f"{self.title}: {title}", columns, rows)

    def _ratio_cells(self, data: Mapping[str, Any]) -> list[Cell]:
        ours, *others = self._by_name(data).values()
        cells = []
        for other in others:
            measured = _turn_ratios(other, ours)
            middle = median(measured)
            cells.append(Cell(f"{middle:.3g}x ({min(measured):.3g}..{max(measured):.3g})", middle))
            cells.append(number(other[PREDICTED] / ours[PREDICTED], ".3g", "x"))
        return [*cells, number(float(data["cores"]), "g")]

    def _second_cells(self, data: Mapping[str, Any]) -> list[Cell]:
        found = self._by_name(data)
        figures = [1000 * value for row in found.values() for value in (median(row["seconds"]), row[PREDICTED])]
        every = "; ".join(f"{name}: {turns(row['seconds'], 1000)}" for name, row in found.items())
        return [*map(number, figures), Cell(every)]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        caption = (
            f"{next(iter(self.methods))}'s steps: how many times as fast as those of other methods, over the number of "
            "workers; medians of turns, with the least and the most; dotted: predicted"
        )
        course, key = at(scale, self.courses), dict(list(style.looks(self.methods).items())[1:])
        panels: dict[float, dict[int, Updates]] = {}
        for place in course.places:
            outcome = results.of(self.job(course, place))
            if outcome.reason is None:
                panels.setdefault(place.gbit, {})[place.workers] = self._by_name(outcome.data)
        return [
            Picture(f"{gbit:g} Gbit/s", caption, partial(_draw_ratios, key, found), f"{gbit:g} Gbit/s", key)
            for gbit, found in panels.items()
        ]


def _turn_ratios(other: Mapping[str, Any], ours: Mapping[str, Any]) -> list[float]:
    return [one / own for one, own in zip(other["seconds"], ours["seconds"], strict=True)]


def _draw_ratios(looks: Mapping[str, style.Look], found: Mapping[int, Updates], figure: Any) -> None:
    """Draws the ratios of the methods with a look to the first method, over the number of workers."""
    axes, drawn = figure.subplots(), [1.0]
    style.plain(axes, "workers", "times as fast, logarithmic")
    for name, look in looks.items():
        pairs = [(rows[name], next(iter(rows.values()))) for rows in found.values()]
        ratios = [_turn_ratios(*pair) for pair in pairs]
        guessed = [other[PREDICTED] / ours[PREDICTED] for other, ours in pairs]
        middle = [median(each) for each in ratios]
        reach = [
            [value - min(each) for value, each in zip(middle, ratios, strict=True)],
            [max(each) - value for value, each in zip(middle, ratios, strict=True)],
        ]
        axes.errorbar(list(found), middle, yerr=reach, color=look.color, marker=look.marker, capsize=2.5)
        axes.plot(list(found), guessed, color=look.color, linestyle=":", linewidth=1)
        drawn += [*guessed, *(value for each in ratios for value in each)]
    axes.axhline(1, color=style.SOFT, linewidth=0.9)
    axes.set_xticks(list(found))
    style.logarithmic(axes.yaxis, drawn, "\u00d7")
