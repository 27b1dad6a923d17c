"""Exhibits of the adaptation of SparDL's h: entries sent per team and block, and their union, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.kinds.trainings import Case
from scripts.exhibits.kinds.watched import Trace, TracedExhibit, TracePlan, basis_of_trace, train_watched
from scripts.exhibits.outcomes import row_of
from scripts.exhibits.tables import Cell, Row, Table
from spardl.communicators.spardl import SparDLState
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Worker

__all__ = ["Adaptation", "record_adaptation"]

BASIS = basis_of_trace("h and the size of the union of every block, in every step of real trainings")
NEAR, WINDOW = 0.1, 10  # tolerance as a share of k; number of steps to average
# Quantities to draw, one panel each.
KINDS: Mapping[str, str] = MappingProxyType({"h": "entries that a team sends", "union": "entries of all teams"})
COLUMNS = ("teams", "k of a block", "h at first", "h, second half", "union / k, at first", "second half", "near k from")


class _Sent(NamedTuple):
    """One synchronization of one block.

    Attributes:
        h: Number of entries that each team sent of the block.
        union: Number of different entries among them.
        k: Target number of entries.
    """

    h: int
    union: int
    k: int


@dataclass
class _Noting(SparDLState):
    """State that also records the values to which it adapts."""

    sent: list[_Sent] = field(default_factory=list)

    def adapt(self, merged: int, k: int, teams: int) -> None:
        """Adapts h, and records it."""
        self.sent.append(_Sent(self.h, merged, k))
        super().adapt(merged, k, teams)


@dataclass
class _Watch(Trace):
    """Replaces the states of all workers by those that record."""

    states: dict[int, _Noting] = field(default_factory=dict)

    def before(self, method: Method, worker: Worker, state: MethodState) -> None:
        if worker.rank not in self.states:
            assert isinstance(state.communication, SparDLState)
            self.states[worker.rank] = _Noting(**asdict(state.communication))
            state.communication = self.states[worker.rank]


def record_adaptation(words: Sequence[str], steps: int) -> dict[str, Any]:
    """Trains with SparDL in teams and traces h.

    Args:
        words: Arguments of train.py, with more than one team and B-SAG.
        steps: Number of training steps.

    Returns:
        ``h``, ``union`` and ``k`` of each worker's block, by step.

    Raises:
        ConfigError: if the configuration is invalid.
    """
    watch = _Watch()
    train_watched(words, steps, watch)
    workers = [watch.states[rank].sent for rank in sorted(watch.states)]
    return {
        name: [[getattr(sent, name) for sent in at_once] for at_once in zip(*workers, strict=True)]
        for name in _Sent._fields
    }


@dataclass(frozen=True)
class Adaptation(TracedExhibit):
    """Cases x numbers of teams, with one table and one picture per case."""

    basis: Basis = field(default=BASIS, kw_only=True)
    traced = "adaptation"
    trace = record_adaptation

    def variants(self, plan: TracePlan) -> Mapping[str, tuple[str, ...]]:
        own = ("compressor=spardl", "communicator.gather=bruck")
        return {f"d = {teams}": (own[0], f"communicator.teams={teams}", own[1]) for teams in plan.teams}

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        return (
            f"{plan.titles}. {plan.steps} steps, B-SAG. Means over all workers' blocks; the union is what all teams "
            f"send of a block, each entry once. Near k from: the step from which on the union stays within {NEAR:.0%} "
            f"of k, as the mean of {WINDOW} steps. {' '.join(plan.words)}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [
            Table(
                f"{self.title}: {case.title}",
                COLUMNS,
                [self._row(plan, case, each, results) for each in self.variants(plan)],
            )
            for case in plan.cases
        ]

    def _row(self, plan: TracePlan, case: Case, teams: str, results: Results) -> Row:
        job = self.job(plan, case, teams)
        return row_of(teams, job, results.of(job), len(COLUMNS) - 1, _cells)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        caption = "h and the union over k by step, means over all blocks; the grey band is near k"
        return [
            Picture(
                f"{case.name} {kind}",
                caption,
                partial(self._draw, plan, case, kind, results),
                f"{case.title}: {words}",
                palette.looks(self.variants(plan)),
            )
            for case in plan.cases
            for kind, words in KINDS.items()
        ]

    def _draw(self, plan: TracePlan, case: Case, kind: str, results: Results, figure: Any) -> None:
        axes, looks = figure.subplots(), palette.looks(self.variants(plan))
        axes_of.plain(axes, "step", f"{kind} / k")
        for teams, look in looks.items():
            outcome = results.of(self.job(plan, case, teams))
            if outcome.reason is None:
                shares = _shares(outcome.data, kind)
                axes.plot(shares, color=look.color, linestyle=look.dash)
        if kind == "union":
            axes.axhspan(1 - NEAR, 1 + NEAR, color=palette.SOFT, alpha=0.15, linewidth=0)


def _shares(data: Mapping[str, Any], name: str) -> list[float]:
    """Mean over all blocks relative to k, by step."""
    return [mean(found) / mean(wanted) for found, wanted in zip(data[name], data["k"], strict=True)]


def _cells(data: Mapping[str, Any]) -> list[Cell]:
    sent, unions, later = _shares(data, "h"), _shares(data, "union"), len(data["h"]) // 2
    k = mean(data["k"][0])
    figures = (k, k * sent[0], k * mean(sent[later:]), unions[0], mean(unions[later:]))
    return [*(Cell(f"{figure:.4g}", figure) for figure in figures), _settled(unions)]


def _settled(unions: Sequence[float]) -> Cell:
    """First step after which every moving average stays near 1."""
    windows = [mean(unions[first : first + WINDOW]) for first in range(max(1, len(unions) - WINDOW + 1))]
    far = [first for first, share in enumerate(windows) if abs(share - 1) > NEAR]
    first = far[-1] + 1 if far else 0
    return Cell("not yet") if first == len(windows) else Cell(f"step {first}", first)
