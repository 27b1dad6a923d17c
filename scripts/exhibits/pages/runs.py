"""Run folders, of whatever cluster: which there are, what they tell, and which belong together."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.errors import HydraException

from scripts import choices
from scripts.exhibits.kept import events_in
from scripts.exhibits.measures import Curve, final_metric, last_epoch_loss, metric_curve, share_of_bytes
from scripts.exhibits.records import is_training, read_records
from spardl.basics.errors import DataError
from spardl.basics.files import RECORD_BYTES, read_json, read_tail, read_text, read_yaml
from trainer.experiment import decisive, experiment_id
from trainer.runs import flat
from trainer.targets import editions

__all__ = ["Comparison", "Finished", "Method", "Unfinished", "caveats", "collect", "compare", "differences", "read"]

NEEDED = ("metric", "final", "steps", "workers", "cluster_seconds", "step_bytes", "step_bytes_dense")
# What a method is made of; the last only where it does something.
PARTS = ("compressor", "communicator", "residual", "momentum")
TARGET = "_target_"


class Finished(NamedTuple):
    """A run that came to its end.

    Attributes:
        folder: Its run folder, or its record as ``FILE.jsonl#ID``.
        config: resolved.
        summary: its summary.
        events: the lines of its metrics.
        command: what was typed, if the folder says so.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    command: str | None

    @property
    def simulated(self) -> bool:
        """Whether its seconds are virtual."""
        return "network" in self.config["cluster"]

    @property
    def metric(self) -> float:
        """The last value of the task's metric."""
        return final_metric(self.summary)

    @property
    def train_loss(self) -> float | None:
        """The mean training loss of the last epoch, if it was logged."""
        if (known := self.summary.get("train_loss")) is not None:
            return float(known)  # of all events, of which a record has some
        return last_epoch_loss([event for event in self.events if event["kind"] == "train"])

    @property
    def share(self) -> float:
        """Bytes sent, compared with a dense ring; 0 where nothing is to be sent."""
        return share_of_bytes([self.summary])

    @property
    def seconds(self) -> float:
        """On the cluster's clock."""
        value: float = self.summary["cluster_seconds"]
        return value

    @property
    def curve(self) -> Curve:
        """Of its metric."""
        return metric_curve(self.summary, (event for event in self.events if event["kind"] == "eval"))

    @property
    def settings(self) -> dict[str, Any]:
        """Whatever may change its result, but the seeds, by dotted names."""
        found = {name: value for name, value in flat(decisive(self.config)) if name.rpartition(".")[2] != "seed"}
        return {**found, "cluster.workers": self.summary["workers"]}


class Unfinished(NamedTuple):
    """A folder that has no result to show.

    Attributes:
        folder: it.
        state: why not, in words.
    """

    folder: Path
    state: str


class Method(NamedTuple):
    """Runs that differ in their seeds only.

    Attributes:
        name: what tells them from the others that they are compared with.
        runs: them.
    """

    name: str
    runs: Sequence[Finished]


class Comparison(NamedTuple):
    """Runs of one task.

    Attributes:
        title: what they did.
        methods: them, in the order of their first folders.
    """

    title: str
    methods: Sequence[Method]


def collect(folders: Sequence[Path]) -> tuple[list[Finished], list[Unfinished]]:
    """Reads run folders, files of records, and folders of either; each counts once.

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
        return Unfinished(folder, "no run" if folder.exists() else "not there")
    try:
        summary = read_json(folder / "summary.json")
        if summary["status"] != "finished":
            return Unfinished(folder, _state(folder, summary))
        config = yaml.safe_load(read_yaml(folder / "config.yaml"))
        events = [json.loads(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
        command = folder / "command.txt"
        typed = read_text(command, RECORD_BYTES).strip() if command.is_file() else None
        return _checked(Finished(folder, config, summary, events, typed))
    except FileNotFoundError as error:
        return Unfinished(folder, f"has no {Path(str(error.filename)).name}")
    except KeyError as error:
        return Unfinished(folder, f"lacks {error}; another version may have written it")
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
    """The run of a record, with the configuration that its command composes today."""
    try:
        config = choices.composed(*shlex.split(content["command"])[2:])
        today = (experiment_id(config, content["workers"]), editions(config))
        if today != (content["id"], content.get("editions") or {}):
            return Unfinished(place, "its command means another run by now")
        return _checked(Finished(place, config, content, events_in(content), content["command"]))
    except KeyError as error:
        return Unfinished(place, f"lacks {error}; record its training again")
    except HydraException as error:
        return Unfinished(place, f"cannot be read: {' '.join(str(error).split())}")


def _checked(run: Finished) -> Finished:
    """The run, if it has all that will be asked for.

    Raises:
        KeyError: it lacks something.
    """
    for name in NEEDED:
        run.summary[name]
    _title(run), _parts(run.config), run.metric, run.train_loss, run.share, run.curve, run.simulated, run.settings
    return run


def _state(folder: Path, summary: Mapping[str, Any]) -> str:
    reason = f": {summary['reason']}" if "reason" in summary else ""
    status = "still running, or killed" if summary["status"] == "running" else f"{summary['status']}{reason}"
    try:
        last = json.loads(read_tail(folder / "metrics.jsonl").splitlines()[-1])["step"]
    except (OSError, ValueError, LookupError):
        return f"{status}; nothing was logged"
    return f"{status}; step {last} was logged last"


def compare(runs: Sequence[Finished]) -> list[Comparison]:
    """Puts together what can be compared: runs of one task on the same data, with the same metric."""
    tasks: defaultdict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        tasks[json.dumps([run.summary["metric"], _data(run)], sort_keys=True)].append(run)
    groups = list(tasks.values())
    titles = _names([_title(group[0]) for group in groups], [_data(group[0]) for group in groups])
    return [Comparison(title, _methods(group)) for title, group in zip(titles, groups, strict=True)]


def _data(run: Finished) -> dict[str, Any]:
    """The settings that say what is learned from what."""
    return {key: value for key, value in run.settings.items() if key.partition(".")[0] in ("dataset", "task")}


def _title(run: Finished) -> str:
    data = run.config["dataset"][TARGET].rpartition(".")[2].removeprefix("load_").replace("_", " ")
    metric = run.summary["metric"]
    return f"{metric[:1].upper()}{metric[1:]} on {data}"


def _methods(runs: Sequence[Finished]) -> list[Method]:
    groups: defaultdict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        groups[json.dumps(run.settings, sort_keys=True)].append(run)
    for group in groups.values():
        group.sort(key=lambda run: str(run.config.get("seed")).rjust(20))
    first = [group[0] for group in groups.values()]
    names = _names([_parts(run.config) for run in first], [run.settings for run in first])
    return [Method(name, group) for name, group in zip(names, groups.values(), strict=True)]


def _parts(config: Mapping[str, Any]) -> str:
    """The parts of a method, in short."""
    idle = () if config.get("momentum", {}).get("factor") is not None else ("momentum",)
    return " + ".join(_shown(config[part][TARGET]) for part in PARTS if part not in idle)


def _names(bases: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Adds to some names the fewest settings that tell them apart.

    Args:
        bases: the names, which may be equal.
        settings: of each; these differ wherever the names are equal.
    """
    names = list(bases)
    for key in sorted({key for each in settings for key in each}, key=lambda key: (not key.endswith(TARGET), key)):
        longer = [f"{name}, {_short(key)}={_shown(each.get(key))}" for name, each in zip(names, settings, strict=True)]
        parted = {
            name for name in names if len({new for old, new in zip(names, longer, strict=True) if old == name}) > 1
        }
        names = [new if old in parted else old for old, new in zip(names, longer, strict=True)]
    return names


def differences(methods: Sequence[Method]) -> dict[str, list[str]]:
    """The settings that are not the same in all methods: each one's value, in the methods' order."""
    settings = [method.runs[0].settings for method in methods]
    keys = sorted({key for each in settings for key in each})
    found = {key: [_shown(each.get(key)) if key in each else "\u2014" for each in settings] for key in keys}
    return {_short(key): values for key, values in found.items() if len(set(values)) > 1}


def _short(key: str) -> str:
    return key.removesuffix(f".{TARGET}")


def _shown(value: Any) -> str:
    """A setting's value: classes without their modules."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.rpartition(".")[2] if text.startswith(("spardl.", "tasks.", "torch.")) else text


def caveats(runs: Iterable[Finished]) -> dict[str, list[str]]:
    """What runs warn of: each warning, and the folders of those that have it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        for caveat in run.summary.get("caveats", ()):
            found[caveat].append(run.folder.name)
    return dict(found)
