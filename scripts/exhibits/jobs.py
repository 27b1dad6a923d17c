"""Jobs whose results are kept on disk and found again by id, how they run, and the part of a training that is recorded.

Unfinished jobs run here, some at a time; those for a cluster become Slurm arrays.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

from hydra.core.global_hydra import GlobalHydra

import train
from scripts import choices
from scripts.exhibits.measures import last_epoch_loss
from spardl.basics.errors import SpardlError, TrainingError
from spardl.basics.files import write_atomically
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.processes import run_each
from trainer.experiment import experiment_id
from trainer.report import environment
from trainer.runs import finished_run, run_id
from trainer.targets import editions

# Lines of each kind, enough for a curve a few inches wide.
MOST = 30
# Fields of a summary that tables, figures and claims read, or that show whether a repeated run is equal.
_SUMMARY = (
    "metric final best steps epochs workers parameters wall_seconds cluster_seconds step_bytes step_bytes_dense "
    "density residual_ratio residual_age weights_sha256 caveats editions environment"
)
_LOSSES = ("step", "epoch", "loss")
_EVALUATIONS, _TRAINING = "evaluations", "losses"


def thinned(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns every n-th event including the last, with the smallest n that leaves at most ``MOST``."""
    every = math.ceil(len(events) / MOST) or 1
    return events[(len(events) - 1) % every :: every]


def contents(summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Content of the record of a finished training: summary, loss of the last epoch, and :func:`thinned` metrics."""
    training = [event for event in events if event["kind"] == "train"]
    loss = last_epoch_loss(training)
    return {
        **{key: summary.get(key) for key in _SUMMARY.split()},
        "train_loss": loss if loss is None or math.isfinite(loss) else None,
        _EVALUATIONS: _cut([event for event in events if event["kind"] == "eval"], ("step", *summary["final"])),
        _TRAINING: _cut(training, _LOSSES),
    }


def _cut(events: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    return [{key: event[key] for key in keys} for event in thinned(events)]


def events_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Metrics in a record, training losses first."""
    kinds = {"train": _TRAINING, "eval": _EVALUATIONS}
    return [{"kind": kind, **event} for kind, key in kinds.items() for event in content.get(key, ())]


class Outcome(NamedTuple):
    """Result or failure of a job.

    Attributes:
        where: Folder or file that holds the result; for a record ``FILE.jsonl#ID``.
        data: Summary of a training, or result of a computation; empty after a failure.
        reason: Why there is no result.
        started: Whether the job was ever started.
        made: Versions, commit and machine, as far as known.
        lines: Metrics of a training, if its run folder is not available.
    """

    where: Path
    data: Mapping[str, Any]
    reason: str | None = None
    started: bool = True
    made: Mapping[str, Any] = MappingProxyType({})
    lines: Sequence[Mapping[str, Any]] | None = None

    @property
    def fault(self) -> str:
        """Text of a table cell in place of a result."""
        return f"failed: {self.reason}" if self.started else str(self.reason)

    @property
    def origin(self) -> str:
        """Place of the result; for a record or a computation, also the commit and processor that produced it."""
        if ".json" not in self.where.name or not self.made:
            return str(self.where)
        known = {"commit": self.made.get("commit"), "on": self.made.get("cpu")}
        return ", ".join([str(self.where), *(f"{name} {value}" for name, value in known.items() if value)])

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """All lines of a training's metrics, as far as they are kept."""
        if self.lines is not None:
            return self.lines
        return [json.loads(line) for line in (self.where / "metrics.jsonl").read_text().splitlines()]

    def events(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """Metrics of a kind, ``train`` or ``eval``."""
        return (event for event in self.metrics if event["kind"] == kind)


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes that have a result."""
    return [outcome for outcome in outcomes if outcome.reason is None]


def any_failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a job that was started has no result."""
    return any(outcome.reason is not None and outcome.started for outcome in outcomes)


UNKNOWN = "unknown machine"


def machine_of(made: Mapping[str, Any]) -> str:
    """Returns the processor and torch version of an environment; both change how long local work takes."""
    torch = str(made.get("torch") or "").partition("+")[0]
    parts = [str(made.get("cpu") or ""), f"torch {torch}" if torch else ""]
    return ", ".join(part for part in parts if part) or UNKNOWN


def by_machine(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes that succeeded, by machine in alphabetical order."""
    good = succeeded(outcomes)
    return {name: [outcome for outcome in good if machine_of(outcome.made) == name] for name in machines(good)}


def machines(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns the names of the machines of outcomes, in alphabetical order."""
    return sorted({machine_of(outcome.made) for outcome in outcomes})


def common(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[Sequence[Outcome], Sequence[Outcome]] | None:
    """Returns the outcomes of both on the machine that they share with most results; ``None`` if they share none."""
    ours, theirs = by_machine(one), by_machine(other)
    shared = [name for name in ours if name in theirs]
    if not shared:
        return None
    most = max(shared, key=lambda name: min(len(ours[name]), len(theirs[name])))
    return ours[most], theirs[most]


class Job(ABC):
    """A job whose result is a function of ``id``.

    Attributes:
        alone: Whether the job measures time, so that nothing else may run at the same time.
        expected: Approximate duration in seconds, if known.
    """

    alone: ClassVar[bool] = False
    expected: float | None = None

    @property
    @abstractmethod
    def id(self) -> str:
        """Hash of everything that the result depends on."""

    @property
    @abstractmethod
    def command(self) -> str:
        """Command that repeats the job."""

    @abstractmethod
    def find(self, outputs: Path) -> Outcome | None:
        """Returns the finished result, if the current code would give the same one."""

    @abstractmethod
    def perform(self, outputs: Path) -> None:
        """Runs the job in a separate process; raises SpardlError if it fails."""

    @abstractmethod
    def recorded(self, outcome: Outcome) -> dict[str, Any]:
        """Returns the content of a record of the result, as JSON data."""

    @abstractmethod
    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome | None:
        """Returns the result in a record at ``FILE.jsonl#ID``; ``None`` if the job would no longer give it."""

    def _failed(self, outputs: Path) -> Path:
        return outputs / "failed" / f"{self.id}.json"

    def failure(self, outputs: Path) -> Outcome | None:
        """Returns the failure of the last attempt, if it failed."""
        path = self._failed(outputs)
        try:
            return Outcome(path, {}, json.loads(path.read_bytes())["reason"])
        except (OSError, ValueError, KeyError):
            return None

    def note(self, outputs: Path, fault: SpardlError | None) -> None:
        """Records whether the job failed."""
        path = self._failed(outputs)
        if fault is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"reason": str(fault), "command": self.command}).encode())


class Labels(NamedTuple):
    """Labels of a run in W&B: name of the exhibit, row of its table, and further labels, such as the task."""

    group: str
    job_type: str
    tags: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The labels as words of train.py."""
        texts = (self.group, self.job_type, *self.tags)
        group, job_type, *tags = ("'" + text.replace("'", "\\'") + "'" for text in texts)
        return (f"logger.group={group}", f"logger.job_type={job_type}", f"logger.tags=[{','.join(tags)}]")


@dataclass(frozen=True)
class Training(Job):
    """A run of train.py.

    Attributes:
        words: Command line, including ``cluster.workers``.
        labels: Labels for W&B; they do not change the id, because exhibits share runs.
        cluster: Choice of ``cluster=``; only ``simulated`` runs on any machine.
    """

    words: tuple[str, ...]
    labels: Labels | None = field(default=None, compare=False)
    cluster: str = "simulated"
    expected: float | None = field(default=None, compare=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; see :func:`scripts.choices.composing`."""
        return choices.composed(*self._all)

    @property
    def _all(self) -> tuple[str, ...]:
        return (f"cluster={self.cluster}", *self.words)

    @property
    def workers(self) -> int:
        count: int = self.config["cluster"]["workers"]
        return count

    @property
    def elsewhere(self) -> bool:  # on a cluster
        return self.cluster != "simulated"

    @cached_property
    def id(self) -> str:
        return experiment_id(self.config, self.workers)

    @property
    def command(self) -> str:
        return f"python train.py {shlex.join(self._all)}"

    @property
    def batch_words(self) -> tuple[str, ...]:
        """Words of :attr:`command` and the labels."""
        return (*self._all, *(self.labels.words if self.labels else ()))

    def find(self, outputs: Path) -> Outcome | None:
        run = finished_run(outputs, self.id)
        if run is None:
            return None
        summary = run.read_summary()
        return Outcome(run.folder, summary, made=summary.get("environment", {})) if self.of_today(summary) else None

    def of_today(self, summary: Mapping[str, Any]) -> bool:
        """Whether the current code would give the result in a summary or record of this run."""
        return (summary.get("editions") or {}) == editions(self.config)

    def recorded(self, outcome: Outcome) -> dict[str, Any]:
        return {"seed": self.config["seed"], **contents(outcome.data, outcome.metrics)}

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome | None:
        found = Outcome(where, content, made=content["environment"], lines=events_in(content))
        return found if self.of_today(content) else None

    def perform(self, outputs: Path) -> None:
        """Trains, or resumes an unfinished run."""
        log = outputs / "logs" / f"{self.id}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
        sys.argv = ["train.py", *self.batch_words, f"output_dir={outputs}", "resume=auto"]
        if train.main():
            raise TrainingError(_complaint(log))


def _complaint(log: Path) -> str:
    """Returns the last error in the output of a run."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else f"see {log}"


@dataclass(frozen=True)
class Computation(Job):
    """A function call whose result is JSON data.

    Attributes:
        name: First part of the name of the result file.
        function: Function to call with ``arguments``.
        arguments: Names and hashable JSON values.
        shell: Command that shows the same result.
        recipe: Version of the function; raise it whenever the function would return another result.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    shell: str
    recipe: int = 1

    @cached_property
    def id(self) -> str:
        """Hash of the name, the arguments and the recipe."""
        return run_id({"name": self.name, "arguments": dict(self.arguments), "recipe": self.recipe})

    @property
    def command(self) -> str:
        return self.shell

    def _file(self, outputs: Path) -> Path:
        return outputs / "computed" / f"{self.name}-{self.id}.json"

    def find(self, outputs: Path) -> Outcome | None:
        path = self._file(outputs)
        try:
            return self.recalled(json.loads(path.read_bytes()), path)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def recorded(self, outcome: Outcome) -> dict[str, Any]:
        own = {"name": self.name, "arguments": dict(self.arguments), "recipe": self.recipe}
        return {**own, "environment": outcome.made, "result": outcome.data}

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome | None:
        return Outcome(where, content["result"], made=content["environment"])

    def perform(self, outputs: Path) -> None:
        path, made = self._file(outputs), environment()
        found = Outcome(path, self.function(**dict(self.arguments)), made=made)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.recorded(found)).encode())


# Plans of more seconds are given in hours.
HOURS = 7200.0
# Of long jobs, which share the machine; measurements run at normal priority.
NICENESS = 10
# Called when a job ends, with its error if it failed.
Ended: TypeAlias = Callable[[Job, SpardlError | None], None]


def complete(jobs: Sequence[Job], outputs: Path, at_once: int, then: Ended | None = None) -> list[Training]:
    """Runs unfinished jobs, some at a time, and prints the progress; measurements, which must run alone, come last.

    Jobs with equal ids run once. Returns the trainings that need a cluster and were not run.
    """
    missing = [job for job in {job.id: job for job in jobs}.values() if job.find(outputs) is None]
    elsewhere = [job for job in missing if isinstance(job, Training) and job.elsewhere]
    here = [job for job in missing if job not in elsewhere]
    if here:
        _do(here, len(jobs), outputs, at_once, then)
    return elsewhere


def _do(missing: Sequence[Job], of: int, outputs: Path, at_once: int, then: Ended | None) -> None:
    outputs.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {of} jobs to do{_plan(missing)}", flush=True)
    began, done = time.perf_counter(), 0

    def ended(job: Job, fault: SpardlError | None) -> None:
        nonlocal done
        done += 1
        job.note(outputs, fault)
        if then:
            then(job, fault)
        left = (time.perf_counter() - began) / done * (len(missing) - done)
        how = "done" if fault is None else f"failed: {fault}"
        print(f"[{done}/{len(missing)}, {left:.0f} s left] {job.command}: {how}", flush=True)

    _load_once()
    _perform([job for job in missing if not job.alone], outputs, at_once, ended)
    _perform([job for job in missing if job.alone], outputs, 1, ended)


def _plan(jobs: Sequence[Job]) -> str:
    """Returns the expected duration, as far as it is known."""
    known = [job.expected for job in jobs if job.expected is not None]
    seconds = sum(known)
    rest = f", and {len(jobs) - len(known)} of unknown length" if len(known) < len(jobs) else ""
    long = f"{seconds / 60:.1f} minutes" if seconds <= HOURS else f"{seconds / 3600:.1f} hours of a core"
    return f": about {long}{rest}" if known else ""


def _perform(jobs: Sequence[Job], outputs: Path, at_once: int, ended: Ended) -> None:
    def work(number: int, heartbeat: Callable[[int], None]) -> None:
        GlobalHydra.instance().clear()  # of the parent; train.py needs its own
        if not jobs[number].alone:
            os.nice(NICENESS)
        jobs[number].perform(outputs)

    if jobs:
        run_each(len(jobs), work, outputs / "logs", at_once, lambda number, fault: ended(jobs[number], fault))


def _load_once() -> None:
    """Imports the common modules once, which saves seconds in every forked process."""
    import sklearn.datasets  # noqa: F401, PLC0415 - only where jobs run
    import torch._dynamo  # noqa: PLC0415 - only where jobs run

    precompile(torch.float32)


ARRAY = Path(__file__).resolve().parents[2] / "slurm" / "array.sh"
AT_ONCE = 4


def write_arrays(jobs: Sequence[Training], outputs: Path, folder: Path, name: str) -> list[str]:
    """Writes trainings as files of commands ``name-WORKERS.txt`` into a folder, and returns their sbatch commands.

    All nodes share ``outputs``, the folder of the runs.
    """
    lines: defaultdict[int, list[str]] = defaultdict(list)
    for job in jobs:
        words = ("python", "train.py", *job.batch_words, f"output_dir={outputs.resolve()}", "resume=auto")
        lines[job.workers].append(shlex.join(words))
    folder.mkdir(parents=True, exist_ok=True)
    commands = []
    for workers, found in sorted(lines.items()):
        path = (folder / f"{name}-{workers}.txt").resolve()
        write_atomically(path, "".join(f"{line}\n" for line in found).encode())
        array = f"--array=0-{len(found) - 1}%{AT_ONCE}"
        commands.append(shlex.join(["sbatch", array, f"--ntasks={workers}", str(ARRAY), str(path)]))
    return commands
