"""Exhibits of the adaptation of SparDL's h: entries sent per team and block, and their union, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import palette
from scripts.exhibits.charts.curves import draw_steps
from scripts.exhibits.kinds.watched import Trace, TracedExhibit, TracePlan, basis_of_trace, train_watched
from scripts.exhibits.outcomes import row_of
from scripts.exhibits.tables import Cell, Table
from spardl.communicators.spardl import SparDLState
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Worker

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

    basis: Basis = field(
        default=basis_of_trace("h and the size of the union of every block, in every step of real trainings"),
        kw_only=True,
    )
    traced = "adaptation"
    trace = record_adaptation
    about = (
        "{plan.titles}. {plan.steps} steps, B-SAG. Means over all workers' blocks; the union is what all teams send of "
        f"a block, each entry once. Near k from: the step from which on the union stays within {NEAR:.0%} of k, as the "
        f"mean of {WINDOW} steps. {{words}}"
    )

    def variants(self, plan: TracePlan) -> Mapping[str, tuple[str, ...]]:
        own = ("compressor=spardl", "communicator.gather=bruck")
        return {f"d = {teams}": (own[0], f"communicator.teams={teams}", own[1]) for teams in plan.teams}

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan, tables = at(scale, self.plans), []
        for case in plan.cases:
            jobs = {teams: self.job(plan, case, teams) for teams in self.variants(plan)}
            rows = [row_of(teams, job, results.of(job), len(COLUMNS) - 1, _cells) for teams, job in jobs.items()]
            tables.append(Table(f"{self.title}: {case.title}", COLUMNS, rows))
        return tables

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, pictures = at(scale, self.plans), []
        looks = palette.looks(self.variants(plan))
        caption = "h and the union over k by step, means over all blocks; the grey band is near k"
        for case in plan.cases:
            found = {teams: results.of(self.job(plan, case, teams)) for teams in looks}
            good = {teams: outcome.data for teams, outcome in found.items() if outcome.reason is None}
            for kind, words in KINDS.items():
                lines = {teams: [[share] for share in _shares(data, kind)] for teams, data in good.items()}
                near = NEAR if kind == "union" else 0.0
                draw = partial(draw_steps, lines=lines, styles=looks, up=f"{kind} / k", near=near)
                pictures.append(Picture(f"{case.name} {kind}", caption, draw, f"{case.title}: {words}", looks))
        return pictures


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
