"""Jobs whose results are kept on disk and found again by id, and the part of a training that records keep."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import train
from scripts import choices
from scripts.exhibits.measures import last_epoch_loss
from spardl.basics.errors import SpardlError, TrainingError
from spardl.basics.files import write_atomically
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
