"""Traced training in the simulated cluster: observes inputs and results of synchronizations without changing them.

A kind of exhibit has a :class:`Trace`, which keeps figures by step, and a :class:`TracedExhibit`, which shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from scripts import choices
from scripts.exhibits.base import Basis, ByScale, Planned, Results, at
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds.trainings import Case
from scripts.exhibits.tables import Cell, Row, row_of
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, SimulatedCluster
from spardl.compressors.base import SparseCompressor
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Context, Program, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum
from trainer.build import build_dataset, build_plan
from trainer.learner import Learner

# Arguments of train.py by name of the row.
Variants = Mapping[str, tuple[str, ...]]


def basis_of_trace(measured: str) -> Basis:
    """Basis of figures that a trace measures."""
    return Basis("the cluster: all workers in one process; no seconds", measured, "nothing")


@dataclass(frozen=True)
class TracePlan:
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

    @property
    def titles(self) -> str:
        """Titles of all tasks, for captions."""
        return "; ".join(case.title for case in self.cases)


@dataclass(frozen=True)
class TracedExhibit(Planned):
    """Traced trainings: cases x variants.

    Attributes:
        plans: Plan by size preset.
        traced: Name of the computation, for the id.
        trace: Function of ``words`` and ``steps``, and of ``every`` if that is above 1.
        about: Caption, with fields for ``plan``, ``exhibit`` and ``words``.
    """

    plans: ByScale[TracePlan]
    traced: ClassVar[str]
    trace: ClassVar[Callable[..., Mapping[str, Any]]]
    about: ClassVar[str]

    def variants(self, plan: TracePlan) -> Variants:
        """Returns the arguments of train.py after those of the case, by name of the row; one training each."""
        del plan
        return {"": ()}

    def job(self, plan: TracePlan, case: Case, variant: str = "") -> Computation:
        """Job of one traced training."""
        words = (*plan.words, *case.words, *self.variants(plan)[variant])
        shell = f"python scripts/reproduce.py {self.name} (train.py {' '.join(words)}, {plan.steps} steps)"
        looked = (("every", plan.every),) if plan.every > 1 else ()
        arguments = (("words", words), ("steps", plan.steps), *looked)
        return Computation(self.traced, type(self).trace, arguments, shell)

    def jobs(self, scale: str) -> Sequence[Computation]:
        plan = at(scale, self.plans)
        return [self.job(plan, case, variant) for case in plan.cases for variant in self.variants(plan)]

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        return self.about.format(plan=plan, exhibit=self, words=" ".join(plan.words))

    def row(
        self,
        results: Results,
        job: Computation,
        name: str,
        columns: Sequence[str],
        cells: Callable[[Mapping[str, Any]], Sequence[Cell]],
    ) -> Row:
        """Row of one job in a table with these columns, with the cells that a function makes from its result."""
        return row_of(name, job, results.of(job), len(columns) - 1, cells)

    def finished(self, plan: TracePlan, case: Case, results: Results) -> dict[str, Mapping[str, Any]]:
        """Results of a case by variant; failed ones are missing."""
        found = {variant: results.of(self.job(plan, case, variant)) for variant in self.variants(plan)}
        return {variant: outcome.data for variant, outcome in found.items() if outcome.reason is None}


@dataclass
class Trace:
    """Observes synchronizations without changing them: passes on the vectors of all workers once all have started one.

    Attributes:
        first: First observed step.
        every: Steps between two observations.
        wanted: Number of entries that the method is to keep (k).
        vectors: Sum of gradient and residual of each worker in the last observed step, by rank.
        looked: Number of observed steps.
    """

    first: int = 0
    every: int = 1
    wanted: int = 0
    vectors: dict[int, Tensor] = field(default_factory=dict)
    looked: int = 0

    def observes(self, step: int) -> bool:
        """Whether a step is observed."""
        return step >= self.first and (step - self.first) % self.every == 0

    def before(self, method: Method, worker: Worker, state: MethodState) -> None:
        """Copies the vector of the worker."""
        if self.observes(state.step):
            self.wanted = sparse(method).count(Context(worker, state.layout, state.step))
            self.vectors[worker.rank] = state.memory.clone()
            self.start(method, worker, state)

    def after(self, worker: Worker, step: int, average: Sum) -> None:
        """Passes on all vectors at the first result of a step."""
        if self.observes(step) and self.first + self.looked * self.every == step:
            self.looked += 1
            self.look([self.vectors[rank] for rank in sorted(self.vectors)], average)

    def start(self, method: Method, worker: Worker, state: MethodState) -> None:
        """Called before a worker synchronizes in an observed step."""

    def look(self, vectors: Sequence[Tensor], average: Sum) -> None:
        """Called at the first result of an observed step, with all vectors by rank; the result is equal everywhere."""


@dataclass(frozen=True)
class Watched(Method):
    """A method that reports its inputs and results to an observer and computes the same averages."""

    trace: Trace = field(default_factory=Trace)

    @classmethod
    def of(cls, method: Method, trace: Trace) -> Watched:
        """Wraps a method with an observer."""
        return cls(**{each.name: getattr(method, each.name) for each in fields(method)}, trace=trace)

    def average(self, worker: Worker, state: MethodState, into: Tensor | None = None) -> Program[Sum]:
        """Averages and reports to the observer."""
        step = state.step
        self.trace.before(self, worker, state)
        average = yield from super().average(worker, state, into)
        self.trace.after(worker, step, average)
        return average


def selection(method: Method, worker: Worker, state: MethodState) -> Tensor:
    """Increasing positions (int64) that a worker's compressor is about to select, computed on copies of its state."""
    compressor, context = sparse(method), Context(worker, state.layout, state.step - method.warmup.steps)
    select = compressor.selector(context, deepcopy(state.compression))
    return select(Accumulator(state.memory.clone()), [compressor.whole(context)])


def sparse(method: Method) -> SparseCompressor:
    """Compressor of a method; raises ConfigError if the method does not send single entries."""
    if not isinstance(method.compressor, SparseCompressor):
        raise ConfigError(f"compressor={method.compressor.name} does not send single entries; choose one that does")
    return method.compressor


def configuration(words: Sequence[str]) -> Mapping[str, Any]:
    """Complete configuration of a traced training; call it inside :func:`scripts.choices.composing`."""
    return choices.composed("cluster=simulated", "recipe=published", *words)


def train_watched(words: Sequence[str], steps: int, trace: Trace) -> None:
    """Trains for some steps with an observer; needs ``cluster.workers`` and no dense warm-up.

    Raises:
        ConfigError: If the configuration is invalid.
    """
    with choices.composing():
        plain = configuration(words)
    plan = build_plan(plain, build_dataset(plain))
    plan = replace(plan, method=Watched.of(plan.method, trace))
    cluster = SimulatedCluster(plain["cluster"]["workers"], Network(alpha=0, gbit=1), count_local=False)
    plan.check(cluster.size)
    learner = Learner(plan, cluster, torch.device("cpu"))
    for step in range(steps):
        learner.step(step)
