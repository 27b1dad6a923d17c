"""Traced training in the simulated cluster: observes inputs and results of synchronizations without changing them."""

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
    """Plan of one size preset.

    Attributes:
        cases: Tasks.
        words: Arguments that all trainings share.
        steps: Number of steps of each training.
        cost: Approximate duration of all runs.
        every: Steps between two observations, from the first step on. Choose an odd number to observe all phases of
            Ok-Topk's periods.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    steps: int
    cost: str
    every: int = 1

    @property
    def length(self) -> str:
        """Numbers of trained and observed steps, for captions."""
        return f"{self.steps:,} steps from the first one on{f', one in {self.every} looked at' * (self.every > 1)}"


def watched_training(
    exhibit: str, kind: str, function: Callable[..., Any], words: Sequence[str], steps: int, every: int = 1
) -> Computation:
    """Job of one traced training.

    Args:
        exhibit: Name of the exhibit, for the command.
        kind: Name of the computation, for the id.
        function: Function of ``words`` and ``steps``, and of ``every`` if that is above 1.
        words: Arguments of train.py.
        steps: Number of training steps.
        every: Steps between two observations.
    """
    shell = f"python scripts/reproduce.py {exhibit} (train.py {' '.join(words)}, {steps} steps)"
    looked = (("every", every),) if every > 1 else ()
    return Computation(kind, function, (("words", tuple(words)), ("steps", steps), *looked), shell)


class Watcher:
    """Observes every synchronization of every worker, without changing anything."""

    def before(self, method: Method, worker: Worker, state: MethodState) -> None:
        """Called before a worker synchronizes."""

    def after(self, worker: Worker, step: int, average: Sum) -> None:
        """Called when a worker has the average of a step."""


@dataclass(frozen=True)
class Watched(Method):
    """A method that reports its inputs and results to an observer and computes the same averages.

    Attributes:
        watcher: Observer.
    """

    watcher: Watcher = Watcher()  # noqa: RUF009 - does nothing

    @classmethod
    def of(cls, method: Method, watcher: Watcher) -> Watched:
        """Wraps a method with an observer."""
        return cls(**{field.name: getattr(method, field.name) for field in fields(method)}, watcher=watcher)

    def average(self, worker: Worker, state: MethodState, into: Tensor | None = None) -> Program[Sum]:
        """Averages and reports to the observer."""
        step = state.step
        self.watcher.before(self, worker, state)
        average = yield from super().average(worker, state, into)
        self.watcher.after(worker, step, average)
        return average


def selection(method: Method, worker: Worker, state: MethodState) -> Tensor:
    """Positions that a worker's compressor is about to select, computed on copies of its state.

    Returns:
        Strictly increasing positions as int64.

    Raises:
        ConfigError: if the method does not send single entries.
    """
    compressor, context = sparse(method), Context(worker, state.layout, state.step - method.warmup.steps)
    select = compressor.selector(context, deepcopy(state.compression))
    return select(Accumulator(state.memory.clone()), [compressor.whole(context)])


def sparse(method: Method) -> SparseCompressor:
    """Compressor of a method.

    Raises:
        ConfigError: if the method does not send single entries.
    """
    if not isinstance(method.compressor, SparseCompressor):
        raise ConfigError(f"compressor={method.compressor.name} does not send single entries; choose one that does")
    return method.compressor


def configuration(words: Sequence[str]) -> Mapping[str, Any]:
    """Complete configuration of a traced training; call it inside :func:`scripts.choices.composing`.

    Args:
        words: Arguments of train.py.

    Raises:
        ConfigError: if the configuration is invalid.
    """
    return choices.composed("cluster=simulated", "recipe=published", *words)


def train_watched(words: Sequence[str], steps: int, watcher: Watcher) -> None:
    """Trains for some steps.

    Args:
        words: Arguments of train.py, with ``cluster.workers`` and without dense warm-up.
        steps: Number of training steps.
        watcher: Observer of all synchronizations.

    Raises:
        ConfigError: if the configuration is invalid.
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
