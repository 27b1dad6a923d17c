"""Real training in the simulated cluster, watched from outside: what goes into synchronizations, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from scripts import choices
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds.trainings import Case
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, SimulatedCluster
from spardl.compressors.base import SparseCompressor
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Context, Program, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum
from trainer.build import build_dataset, build_plan
from trainer.learner import Learner

__all__ = [
    "Watched",
    "WatchedPlan",
    "Watcher",
    "configuration",
    "selection",
    "sparse",
    "train_watched",
    "watched_training",
]


@dataclass(frozen=True)
class WatchedPlan:
    """What a scale means.

    Attributes:
        cases: Tasks.
        words: what all trainings share.
        steps: of each training.
        cost: about how long all of it takes.
        every: of so many steps one is looked at, from the first one on. Should be odd, so that no phase of Ok-Topk's
            periods is missed.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    steps: int
    cost: str
    every: int = 1

    @property
    def length(self) -> str:
        """How many steps are trained, and looked at, for a caption."""
        return f"{self.steps:,} steps from the first one on{f', one in {self.every} looked at' * (self.every > 1)}"


def watched_training(
    exhibit: str, kind: str, function: Callable[..., Any], words: Sequence[str], steps: int, every: int = 1
) -> Computation:
    """The job of one training that is watched.

    Args:
        exhibit: its name, to type.
        kind: Name of the computation, for the id.
        function: takes ``words`` and ``steps``, and ``every``, if that is more than 1, and computes it.
        words: of train.py.
        steps: of training.
        every: Steps between two observations.
    """
    shell = f"python scripts/reproduce.py {exhibit} (train.py {' '.join(words)}, {steps} steps)"
    looked = (("every", every),) if every > 1 else ()
    return Computation(kind, function, (("words", tuple(words)), ("steps", steps), *looked), shell)


class Watcher:
    """Observes every synchronization of every worker, without changing anything."""

    def before(self, method: Method, worker: Worker, state: MethodState) -> None:
        """A worker is about to synchronize."""

    def after(self, worker: Worker, step: int, average: Sum) -> None:
        """A worker has its average of a step."""


@dataclass(frozen=True)
class Watched(Method):
    """A method that shows what it works on, and computes what it would have computed anyway.

    Attributes:
        watcher: Observer.
    """

    watcher: Watcher = Watcher()  # noqa: RUF009 - does nothing

    @classmethod
    def of(cls, method: Method, watcher: Watcher) -> Watched:
        """The same method, watched."""
        return cls(**{field.name: getattr(method, field.name) for field in fields(method)}, watcher=watcher)

    def average(self, worker: Worker, state: MethodState, into: Tensor | None = None) -> Program[Sum]:
        """Averages, and traces the worker."""
        step = state.step
        self.watcher.before(self, worker, state)
        average = yield from super().average(worker, state, into)
        self.watcher.after(worker, step, average)
        return average


def selection(method: Method, worker: Worker, state: MethodState) -> Tensor:
    """What a worker's compressor is about to select of the whole vector, found on copies of what it would change.

    Returns:
        int64, strictly increasing positions.

    Raises:
        ConfigError: if the method sends no single entries.
    """
    compressor, context = sparse(method), Context(worker, state.layout, state.step - method.warmup.steps)
    select = compressor.selector(context, deepcopy(state.compression))
    return select(Accumulator(state.memory.clone()), [compressor.whole(context)])


def sparse(method: Method) -> SparseCompressor:
    """The method's compressor.

    Raises:
        ConfigError: if it sends no single entries.
    """
    if not isinstance(method.compressor, SparseCompressor):
        raise ConfigError(f"compressor={method.compressor.name} selects nothing; choose one that sends single entries")
    return method.compressor


def configuration(words: Sequence[str]) -> Mapping[str, Any]:
    """The configuration of a training that is watched, whole; within :func:`scripts.choices.composing`.

    Args:
        words: of train.py.

    Raises:
        ConfigError: if they do not compose one.
    """
    return choices.composed("cluster=simulated", "recipe=published", *words)


def train_watched(words: Sequence[str], steps: int, watcher: Watcher) -> None:
    """Trains for some steps.

    Args:
        words: of train.py; name ``cluster.workers``, and no dense warm-up.
        steps: how many.
        watcher: of all synchronizations.

    Raises:
        ConfigError: if the configuration does not work.
    """
    with choices.composing():
        plain = configuration(words)
    plan = build_plan(plain, build_dataset(plain))
    plan = replace(plan, method=Watched.of(plan.method, watcher))
    cluster = SimulatedCluster(plain["cluster"]["workers"], Network(alpha=0, gbit=1), count_local=False)
    plan.check(cluster.size)
    learner = Learner(plan, cluster, torch.device("cpu"))
    for step in range(steps):
        learner.step(step)
