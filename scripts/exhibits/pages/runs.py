"""Reads run folders and records, names their methods, and groups the runs that can be compared."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml
from hydra.errors import HydraException

from scripts import choices
from scripts.exhibits.jobs import events_in
from scripts.exhibits.measures import Curve, final_metric, last_epoch_loss, metric_curve, share_of_bytes
from scripts.exhibits.outcomes import machine_of
from scripts.exhibits.records import is_training, read_records
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import DataError
from spardl.basics.files import RECORD_BYTES, read_json, read_tail, read_text, read_yaml
from trainer.build import CONFIGURATIONS
from trainer.experiment import experiment_id, result_settings
from trainer.runs import flat
from trainer.targets import editions

TARGET = "_target_"
GROUPS = ("communicator", "residual")


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


COLUMNS = (
    "method",
    "task",
    "seeds",
    "metric",
    "mean",
    "standard deviation",
    "seconds",
    "seconds, standard deviation",
    "clock",
    "machine",
    "bytes per step",
    "sent / dense",
    "path",
)
CLOCKS = {True: "virtual", False: "real"}


def run_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per method and task."""
    rows = [_row(comparison, method) for comparison in comparisons for method in comparison.methods]
    return Table("Runs", COLUMNS, rows)


def _row(comparison: Comparison, method: Method) -> Row:
    runs, machines = method.runs, run_machines(method.runs)
    sent, share = mean(run.summary["step_bytes"] for run in runs), mean(run.share for run in runs)
    several = [Cell(seconds_by_machine(runs)), Cell("-")]
    cells = [
        Cell(comparison.title),
        Cell(str(len(runs)), len(runs)),
        Cell(str(runs[0].summary["metric"])),
        *_statistics([run.metric for run in runs]),
        *(_statistics([run.seconds for run in runs]) if len(machines) == 1 else several),
        Cell(", ".join(sorted({CLOCKS[run.simulated] for run in runs}))),
        Cell("; ".join(machines)),
        Cell(f"{sent:.4g}", sent),
        Cell(f"{share:.2%}", share),
        Cell("; ".join(str(run.folder) for run in runs)),
    ]
    return Row(method.name, cells, ())


def _statistics(values: Sequence[float]) -> list[Cell]:
    """Mean, and sample standard deviation; a dash for fewer than two values."""
    middle, spread = mean(values), stdev(values) if len(values) > 1 else None
    return [Cell(f"{middle:.4g}", middle), Cell("-") if spread is None else Cell(f"{spread:.2g}", spread)]


def run_machines(runs: Sequence[Finished]) -> list[str]:
    """Names of the machines of runs, in alphabetical order."""
    return sorted({run.machine for run in runs})


def seconds_by_machine(runs: Sequence[Finished]) -> str:
    """Mean seconds of each machine, in the order of :func:`run_machines`: they have no common mean."""
    groups = [[run.seconds for run in runs if run.machine == name] for name in run_machines(runs)]
    return "; ".join(f"{mean(group):.4g}" for group in groups)
