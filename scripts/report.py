"""Compares runs of real and simulated clusters: tables, curves, and the settings that differ.

python scripts/report.py outputs/*
python scripts/report.py outputs --html report.html
python scripts/report.py outputs/* --plot comparison.png
python scripts/report.py docs/results/learning.jsonl
python scripts/report.py runs outputs/* --csv > runs.csv
python scripts/report.py runs outputs/* --latex --png curves.png

Prints Markdown. Records of trainings can be given instead of run folders. Runs that differ only in their seeds share a
row; runs of different tasks or metrics go to different tables. Folders without a finished run are listed with their
state. --html writes a self-contained page, --plot only the curves. "report.py runs" prints one table of all runs: mean
and standard deviation over seeds, time, bytes and path (a folder of this name is ./runs).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml
from hydra.errors import HydraException
from markupsafe import Markup

from scripts import choices
from scripts.exhibits import pages
from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.charts.curves import draw_means, panel_pictures
from scripts.exhibits.charts.style import SIZE, check_drawing, drawing, explain, looks
from scripts.exhibits.jobs import events_in, machine_of
from scripts.exhibits.kinds.trainings import VIRTUAL
from scripts.exhibits.measures import (
    INTERVAL,
    Curve,
    final_metric,
    last_epoch_loss,
    metric_curve,
    share_of_bytes,
    shown_interval,
    spread,
)
from scripts.exhibits.records import is_training, read_records
from scripts.exhibits.tables import WRITERS, Cell, Row, Table, markdown
from spardl.basics.errors import ConfigError, DataError
from spardl.basics.files import RECORD_BYTES, read_json, read_tail, read_text, read_yaml, write_atomically
from trainer.build import CONFIGURATIONS
from trainer.experiment import experiment_id, result_settings
from trainer.runs import flat
from trainer.targets import editions

FINISHED, BAD_INPUT = 0, 2
TARGET, GROUPS = "_target_", ("communicator", "residual")
CLOCKS = {True: "virtual", False: "real"}
BARE = Basis("", "", "")  # basis of tables without results
RUNS = "runs"
UNKNOWN = "the command was not recorded; config.yaml holds every setting"


def method_name(config: Mapping[str, Any], command: str | None = None) -> str:
    """The choice of ``compressor=``, with the communicator and the residual if they are not those of the choice.

    Without a choice in the command line, that of the same class with the fewest deviations; the class name if no choice
    has it.
    """
    given = {group: choice_of(group, config[group][TARGET]) for group in GROUPS}
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(command or "")}
    known, name = _compressors(), typed.get("compressor")
    if not name:
        name = config["compressor"][TARGET].rpartition(".")[2]
        same = [each for each, (values, _) in known.items() if values.get(TARGET, "").rpartition(".")[2] == name]

        def deviations(choice: str) -> tuple[int, int, int, str]:
            values, groups = known[choice]
            others = sum(groups.get(group) != own for group, own in given.items())
            changed = sum(config["compressor"].get(key) != each for key, each in values.items() if key != TARGET)
            return others, changed, len(choice), choice

        name = min(same, key=deviations) if same else name
    own = known[name][1] if name in known else given
    return ", ".join([name, *(f"{group}={choice}" for group, choice in given.items() if own.get(group) != choice)])


def choice_of(group: str, target: str) -> str:
    """Choice of a group of conf/ with the class or function ``_target_``, or its bare name if no choice has it."""
    last = target.rpartition(".")[2]
    return _targets(group).get(last, last)


@cache
def _targets(group: str) -> Mapping[str, str]:
    """Choices by class name; of several choices of a class the shortest name."""
    found: dict[str, str] = {}
    for path in sorted((CONFIGURATIONS / group).glob("*.yaml"), key=lambda path: (-len(path.stem), path.stem)):
        target = (yaml.safe_load(path.read_text()) or {}).get(TARGET)
        if target:
            found[target.rpartition(".")[2]] = path.stem
    return found


@cache
def _compressors() -> Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]:
    """Settings of each choice of ``compressor=``, and its choices of other groups."""
    return {path.stem: _read(path.stem) for path in sorted((CONFIGURATIONS / "compressor").glob("*.yaml"))}


def _read(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A choice, with everything that it takes over from other files of the group."""
    content = yaml.safe_load((CONFIGURATIONS / "compressor" / f"{name}.yaml").read_text()) or {}
    values, groups = dict[str, Any](), dict[str, str]()
    for entry in content.pop("defaults", ()):
        if isinstance(entry, dict):
            ((key, choice),) = entry.items()
            groups[key.removeprefix("override ").partition("@")[0].strip("/")] = choice
        elif entry != "_self_":
            inherited, others = _read(entry.partition("@")[0])
            values.update(inherited)
            groups.update(others)
    return {**values, **content}, groups


class Finished(NamedTuple):
    """A finished run.

    Attributes:
        folder: Run folder, or record as ``FILE.jsonl#ID``.
        name: The method as users type it.
        title: Metric and data set.
        share: Bytes sent as a share of a dense ring all-reduce; 0 for a single worker.
        settings: Settings that may change the result, except seeds, by dotted name.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    command: str | None
    name: str
    title: str
    simulated: bool
    metric: float
    train_loss: float | None
    share: float
    seconds: float
    curve: Curve
    settings: Mapping[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        """Settings of the task and its data."""
        return {key: value for key, value in self.settings.items() if key.partition(".")[0] in ("dataset", "task")}

    @property
    def machine(self) -> str:
        """Processor and torch version."""
        return machine_of(self.summary.get("environment", {}))


def _finished(
    folder: Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    command: str | None,
) -> Finished:
    """Collects what reports need from a run; raises KeyError if something is missing."""
    metric, workers = summary["metric"], summary["workers"]
    data = config["dataset"][TARGET].rpartition(".")[2].removeprefix("load_").replace("_", " ")
    loss = summary.get("train_loss")  # computed from all events; a record keeps only some of them
    settings = {name: value for name, value in flat(result_settings(config)) if name.rpartition(".")[2] != "seed"}
    return Finished(
        folder,
        config,
        summary,
        command,
        method_name(config, command),
        f"{metric[:1].upper()}{metric[1:]} on {data}",
        "network" in config["cluster"],
        final_metric(summary),
        last_epoch_loss([event for event in events if event["kind"] == "train"]) if loss is None else float(loss),
        share_of_bytes([summary]),
        summary["cluster_seconds"],
        metric_curve(summary, (event for event in events if event["kind"] == "eval")),
        {**settings, "cluster.workers": workers},
    )


class Unfinished(NamedTuple):
    """A folder without a finished run, and the reason."""

    folder: Path
    state: str


class Method(NamedTuple):
    """Runs that differ only in their seeds, with a name that distinguishes them from the others."""

    name: str
    runs: Sequence[Finished]


class Comparison(NamedTuple):
    """Runs of one task, named by metric and data set; methods in the order of their first folders."""

    title: str
    methods: Sequence[Method]


def collect(folders: Sequence[Path]) -> tuple[list[Finished], list[Unfinished]]:
    """Reads run folders, files of records, and folders of either; each run counts once.

    Call it within :func:`scripts.choices.composing`.
    """
    paths: dict[Path, Path] = {}
    for path in chain.from_iterable(map(_expand, folders)):
        paths.setdefault(path.resolve(), path)
    found = list(chain.from_iterable(_recorded(path) if _is_file(path) else [read(path)] for path in paths.values()))
    return [run for run in found if isinstance(run, Finished)], [run for run in found if isinstance(run, Unfinished)]


def _expand(folder: Path) -> list[Path]:
    if _is_run(folder) or not folder.is_dir():
        return [folder]
    return sorted(filter(_is_run, folder.iterdir())) or sorted(filter(_is_file, folder.iterdir())) or [folder]


def _is_file(path: Path) -> bool:
    return path.suffix == ".jsonl" and path.is_file()


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "config.yaml"))


def read(folder: Path) -> Finished | Unfinished:
    """Reads one run folder."""
    if not _is_run(folder):
        return Unfinished(folder, "not a run folder" if folder.exists() else "does not exist")
    try:
        summary = read_json(folder / "summary.json")
        if summary["status"] != "finished":
            return Unfinished(folder, _state(folder, summary))
        config = yaml.safe_load(read_yaml(folder / "config.yaml"))
        events = [json.loads(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
        command = folder / "command.txt"
        typed = read_text(command, RECORD_BYTES).strip() if command.is_file() else None
        return _finished(folder, config, summary, events, typed)
    except FileNotFoundError as error:
        return Unfinished(folder, f"has no {Path(str(error.filename)).name}")
    except KeyError as error:
        return Unfinished(folder, f"lacks {error}; written by another version?")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        return Unfinished(folder, f"cannot be read: {' '.join(str(error).split())}")


def _recorded(path: Path) -> list[Finished | Unfinished]:
    """The trainings among the records of a file."""
    try:
        contents = read_records(path).values()
    except DataError as error:
        return [Unfinished(path, f"cannot be read: {error}")]
    return [_recalled(path.with_name(f"{path.name}#{each['id']}"), each) for each in contents if is_training(each)]


def _recalled(place: Path, content: Mapping[str, Any]) -> Finished | Unfinished:
    """The run of a record, with the configuration that its command composes now."""
    try:
        config = choices.composed(*shlex.split(content["command"])[2:])
        today = (experiment_id(config, content["workers"]), editions(config))
        if today != (content["id"], content.get("editions") or {}):
            return Unfinished(place, "its command now stands for another run; record it again")
        return _finished(place, config, content, events_in(content), content["command"])
    except KeyError as error:
        return Unfinished(place, f"lacks {error}; record its training again")
    except HydraException as error:
        return Unfinished(place, f"cannot be read: {' '.join(str(error).split())}")


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    reason = f": {summary['reason']}" if "reason" in summary else ""
    status = "still running, or killed" if summary["status"] == "running" else f"{summary['status']}{reason}"
    try:
        last = json.loads(read_tail(folder / "metrics.jsonl").splitlines()[-1])["step"]
    except (OSError, ValueError, LookupError):
        return f"{status}; nothing was logged"
    return f"{status}; step {last} was logged last"


def compare(runs: Sequence[Finished]) -> list[Comparison]:
    """Groups runs of one task on the same data with the same metric."""
    tasks: defaultdict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        tasks[json.dumps([run.summary["metric"], run.data], sort_keys=True)].append(run)
    groups = list(tasks.values())
    titles = _names([group[0].title for group in groups], [group[0].data for group in groups])
    return [Comparison(title, _methods(group)) for title, group in zip(titles, groups, strict=True)]


def _methods(runs: Sequence[Finished]) -> list[Method]:
    groups: defaultdict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        groups[json.dumps(run.settings, sort_keys=True)].append(run)
    for group in groups.values():
        group.sort(key=lambda run: str(run.config.get("seed")).rjust(20))
    first = [group[0] for group in groups.values()]
    names = _names([run.name for run in first], [run.settings for run in first])
    return [Method(name, group) for name, group in zip(names, groups.values(), strict=True)]


def _names(bases: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Appends to equal names the fewest settings that distinguish them; these differ if the names are equal."""
    names = list(bases)
    for key in sorted({key for each in settings for key in each}, key=lambda key: (not key.endswith(TARGET), key)):
        longer = [
            f"{name}, {_short(key)}={_shown(each.get(key), key)}" for name, each in zip(names, settings, strict=True)
        ]
        parted = {
            name for name in names if len({new for old, new in zip(names, longer, strict=True) if old == name}) > 1
        }
        names = [new if old in parted else old for old, new in zip(names, longer, strict=True)]
    return names


def differences(methods: Sequence[Method]) -> dict[str, list[str]]:
    """Settings that are not the same in all methods, with one value per method in order."""
    settings = [method.runs[0].settings for method in methods]
    keys = sorted({key for each in settings for key in each})
    found = {key: [_shown(each.get(key), key) if key in each else "\u2014" for each in settings] for key in keys}
    return {_short(key): values for key, values in found.items() if len(set(values)) > 1}


def _short(key: str) -> str:
    return key.removesuffix(f".{TARGET}")


def _shown(value: Any, key: str) -> str:
    """A setting's value: the choice of a group, or a class without its module."""
    group, _, last = key.partition(".")
    if last == TARGET and isinstance(value, str):
        return choice_of(group, value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text.rpartition(".")[2] if text.startswith(("spardl.", "tasks.", "torch.")) else text


def results(comparison: Comparison) -> Table:
    """Returns the metric and cost of the runs of one task, one row per method."""
    return _table(comparison.title, [(method.name, _results(method.runs)) for method in comparison.methods])


def run_table(comparisons: Sequence[Comparison]) -> Table:
    """Returns mean and standard deviation of all runs, one row per method and task."""
    return _table("Runs", [(method.name, _statistics(each, method)) for each in comparisons for method in each.methods])


def _table(title: str, rows: Sequence[tuple[str, Mapping[str, Cell]]]) -> Table:
    return Table(title, ("method", *rows[0][1]), [Row(name, list(cells.values()), ()) for name, cells in rows])


def _results(runs: Sequence[Finished]) -> dict[str, Cell]:
    values, seconds = [run.metric for run in runs], [run.seconds for run in runs]
    losses = [run.train_loss for run in runs if run.train_loss is not None]
    share = mean(run.share for run in runs)
    several = _seconds_by_machine(runs)
    return {
        "metric": Cell(spread(values), mean(values)),
        INTERVAL: Cell(shown_interval(values)),
        "every seed": Cell(", ".join(f"{value:.4g}" for value in values)),
        "train loss, last epoch": Cell(spread(losses), mean(losses)) if losses else Cell("not logged"),
        "sent / dense": Cell(f"{share:.2%}", share),
        "seconds": several or Cell(spread(seconds), mean(seconds)),
        **_places(runs),
    }


def _statistics(comparison: Comparison, method: Method) -> dict[str, Cell]:
    runs, several = method.runs, _seconds_by_machine(method.runs)
    sent, share = mean(run.summary["step_bytes"] for run in runs), mean(run.share for run in runs)
    seconds = [run.seconds for run in runs]
    return {
        "task": Cell(comparison.title),
        "seeds": Cell(str(len(runs)), len(runs)),
        "metric": Cell(str(runs[0].summary["metric"])),
        "mean": _mean([run.metric for run in runs]),
        "standard deviation": _deviation([run.metric for run in runs]),
        "seconds": several or _mean(seconds),
        "seconds, standard deviation": Cell("-") if several else _deviation(seconds),
        **_places(runs),
        "bytes per step": Cell(f"{sent:.4g}", sent),
        "sent / dense": Cell(f"{share:.2%}", share),
        "path": Cell("; ".join(str(run.folder) for run in runs)),
    }


def _places(runs: Sequence[Finished]) -> dict[str, Cell]:
    clocks, machines = {CLOCKS[run.simulated] for run in runs}, {run.machine for run in runs}
    return {"clock": Cell(", ".join(sorted(clocks))), "machine": Cell("; ".join(sorted(machines)))}


def _seconds_by_machine(runs: Sequence[Finished]) -> Cell | None:
    """Mean seconds of each of several machines, in alphabetical order: they have no common mean."""
    names = sorted({run.machine for run in runs})
    means = (mean(run.seconds for run in runs if run.machine == name) for name in names)
    return Cell("; ".join(f"{each:.4g}" for each in means)) if len(names) > 1 else None


def _mean(values: Sequence[float]) -> Cell:
    return Cell(f"{mean(values):.4g}", mean(values))


def _deviation(values: Sequence[float]) -> Cell:
    """Sample standard deviation; a dash for fewer than two values."""
    return Cell(f"{stdev(values):.2g}", stdev(values)) if len(values) > 1 else Cell("-")


def settings(comparison: Comparison) -> Table | None:
    """Settings that differ between the methods, one row per setting; ``None`` if all are equal."""
    found = differences(comparison.methods)
    rows = [Row(key, [Cell(value) for value in values], ()) for key, values in found.items()]
    names = [method.name for method in comparison.methods]
    return Table(f"What differs: {comparison.title}", ("setting", *names), rows) if rows else None


def remarks(finished: Sequence[Finished], others: Sequence[Unfinished]) -> list[Table]:
    """Caveats with the runs that have them, and folders without a finished run with the reason, if there are any."""
    warned: dict[str, list[str]] = {}
    for run in finished:
        for caveat in run.summary.get("caveats", ()):
            warned.setdefault(caveat, []).append(run.folder.name)
    caveats = [Row(caveat, [Cell(", ".join(names))], ()) for caveat, names in warned.items()]
    missing = [Row(str(folder), [Cell(state, bad=True)], ()) for folder, state in others]
    tables = [
        Table("Caveats", ("caveat", RUNS), caveats),
        Table("Folders without a finished run", ("folder", "state"), missing),
    ]
    return [table for table in tables if table.rows]


def basis(runs: Sequence[Finished]) -> Basis:
    """Returns the simulated, measured and assumed quantities of the runs."""
    virtual = sum(run.simulated for run in runs)
    if not virtual:
        return Basis("nothing", "training, and its seconds", "nothing")
    if virtual == len(runs):
        return VIRTUAL
    some = f"of {virtual} of {len(runs)} runs, those with the virtual clock: "
    return Basis(some + VIRTUAL.simulated, "training; the seconds of the other runs", some + VIRTUAL.assumed)


def pictures(comparison: Comparison, wanted: Sequence[str] = ("steps", "seconds")) -> list[Picture]:
    """Returns the metric of a task against some fields of :class:`Curve`, in panels of a few methods."""
    names = [method.name for method in comparison.methods]
    clocks = sorted({CLOCKS[run.simulated] for method in comparison.methods for run in method.runs})
    labels = {"steps": "steps", "seconds": f"{' or '.join(clocks)} seconds"}
    caption = f"{comparison.title}: means of all seeds, bands from the least to the most"
    curves: dict[str, list[Curve]] = {method.name: [run.curve for run in method.runs] for method in comparison.methods}

    def draw(clock: str, shown: Sequence[str], figure: Any) -> None:
        metric = comparison.methods[0].runs[0].summary["metric"]
        draw_means(figure.subplots(), curves, clock, labels[clock], metric, shown=shown)

    whole = [Picture(clock, caption, partial(draw, clock), f"against {labels[clock]}") for clock in wanted]
    return panel_pictures(whole, names, looks(names))


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws the metric of every task against seconds to a file, one panel above the other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    shown = [(each.title, picture) for each in comparisons for picture in pictures(each, ["seconds"])]
    with drawing():
        figure = Figure(figsize=(1.4 * SIZE[0], 1.4 * SIZE[1] * len(shown)), layout="constrained")
        for (title, picture), part in zip(shown, figure.subfigures(len(shown), squeeze=False)[:, 0], strict=True):
            part.suptitle(title)
            explain(part, picture.key)
            picture.draw(part)
        figure.savefig(path, dpi=200)


def source(run: Finished) -> pages.Source:
    """Returns the origin of the figures of a run."""
    where = pages.in_words(run.summary.get("environment", {}))
    return pages.Source(run.command or UNKNOWN, f"{run.folder}; {where}" if where else str(run.folder))


def section(number: int, comparison: Comparison) -> pages.Section:
    """Returns the section of one task."""
    own = f"task-{number}"
    known = basis([run for method in comparison.methods for run in method.runs])
    sources = {method.name: [source(run) for run in method.runs] for method in comparison.methods}
    parts = [pages.table(results(comparison), f"{own}-results", known, lambda row: sources[row.name])]
    parts += pages.figures(pictures(comparison), own, known)
    if differing := settings(comparison):
        parts.append(pages.table(differing, f"{own}-settings", BARE, lambda row: ()))
    return pages.Section(own, "", comparison.title, "", 0, Markup("").join(parts))


def write_page(
    path: Path, comparisons: Sequence[Comparison], finished: Sequence[Finished], others: Sequence[Unfinished]
) -> None:
    """Writes the page."""
    sections = [section(number, comparison) for number, comparison in enumerate(comparisons, 1)]
    for number, remark in enumerate(remarks(finished, others), 1):
        body = pages.table(remark, f"remark-{number}-table", BARE, lambda row: ())
        marks = sum(cell.bad for row in remark.rows for cell in row.cells)
        sections.append(pages.Section(f"remark-{number}", "", remark.title, "", marks, body))
    lead = f"Finished runs: {len(finished)}; folders without one: {len(others)}. Mean ± half of {INTERVAL} over seeds."
    facts = {"Command": shlex.join(["python", "scripts/report.py", *sys.argv[1:]]), **pages.here()}
    write_atomically(path, pages.page("Comparison of runs", lead, facts, sections).encode())


def main() -> int:
    """Runs the command line, and returns the exit code."""
    one_table = sys.argv[1:2] == [RUNS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, records (.jsonl), or folders of these")
    if one_table:
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--csv", dest="form", action="store_const", const="csv", help="print CSV with full precision")
        form.add_argument("--latex", dest="form", action="store_const", const="tex", help="print a LaTeX table")
    else:
        parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to FILE")
    name = "--png" if one_table else "--plot"
    parser.add_argument(
        name, dest="plot", type=Path, metavar="FILE", help="also draw the metric against seconds to FILE"
    )
    arguments = parser.parse_args(sys.argv[1 + one_table :])
    with choices.composing():
        finished, others = collect(arguments.folders)
    comparisons = compare(finished)
    if one_table:
        sys.stderr.writelines(f"skipped {folder}: {state}\n" for folder, state in others)
        if finished:
            print(WRITERS[arguments.form or "md"](run_table(comparisons)), end="")
    else:
        found = [table for each in comparisons for table in (results(each), settings(each)) if table]
        found += remarks(finished, others)
        print("\n".join(f"{table.title}\n\n{markdown(table)}" for table in found))
    if not finished:
        print("error: none of these folders contains a finished run; create one with python train.py", file=sys.stderr)
        return BAD_INPUT
    html = None if one_table else arguments.html
    try:
        if html or arguments.plot:
            check_drawing()
        if html:
            write_page(html, comparisons, finished, others)
        if arguments.plot:
            plot(comparisons, arguments.plot)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, ValueError) as error:
        print(f"error: cannot write the report ({error}); choose another file", file=sys.stderr)
        return BAD_INPUT
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
