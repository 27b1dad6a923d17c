"""Lazy block-wise sparsification of SparDL, on and off: number of selections, sent entries and losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import palette
from scripts.exhibits.charts.curves import draw_steps
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds.thresholds import largest_of
from scripts.exhibits.kinds.trainings import Case
from scripts.exhibits.kinds.watched import Trace, TracedExhibit, TracePlan, basis_of_trace, sparse, train_watched
from scripts.exhibits.outcomes import failed
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, SimulatedCluster
from spardl.communicators.base import Synchronization
from spardl.communicators.spardl import Blocks, SparDL, SparDLState, srs_rounds
from spardl.communicators.steps.doubling import Target
from spardl.communicators.steps.split import cut_apart
from spardl.communicators.steps.transfer import BlockExchange
from spardl.compressors import TopK
from spardl.compressors.base import SparseCompressor
from spardl.method.method import Method, MethodState
from spardl.method.residuals import GlobalResidual
from spardl.protocol.programs import Context, Phase, Program, State, Team, Worker, whole_team
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Layout, Range
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, Sum, concatenate


@dataclass
class Tally:
    """Counts selections.

    Attributes:
        selections: Number of selections.
        entries: Number of entries that they searched.
    """

    selections: int = 0
    entries: int = 0

    def note(self, entries: Iterable[int]) -> None:
        """Adds one selection for each number of searched ``entries``."""
        found = list(entries)
        self.selections += len(found)
        self.entries += sum(found)


@dataclass(frozen=True)
class CountedTopK(TopK):
    """Exact top-k that counts its selections.

    Attributes:
        tally: Counter of the selections.
    """

    tally: Tally = field(default_factory=Tally, compare=False)

    def selector(self, context: Context, state: State) -> Select:
        """Selector that counts the entries that it reads."""
        select = super().selector(context, state)

        def counted(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
            self.tally.note(part.stop - part.start for part in parts)
            return select(accumulated, parts)

        return counted


@dataclass(frozen=True)
class EagerSparDL(SparDL):
    """SparDL without lazy sparsification and without teams.

    Every block is sparsified at the beginning and again after each addition. Entries that are not selected go to the
    residual and are not considered again in this synchronization. Rounds and words are equal to those of SparDL.

    Attributes:
        tally: Counter of the selections after additions; the compressor counts those at the beginning.

    Raises:
        ConfigError: if there is more than one team.
    """

    tally: Tally = field(default_factory=Tally, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams != 1:
            raise ConfigError(f"eager selection is for one team, got communicator.teams={self.teams}; use teams=1")

    @property
    def splits(self) -> bool:
        """False: this communicator cannot be split into halves."""
        return False

    def reduce(self, sync: Synchronization[SparseCompressor, SparDLState]) -> Program[Sum]:
        """Reduces with a selection after every addition."""
        team = whole_team(sync.context.worker)
        blocks = Blocks(sync.context.layout.length, team.size, -(-sync.compressor.count(sync.context) // team.size))
        select = sync.compressor.selector(sync.context, sync.compression)
        block = yield from self._reduce_scatter(team, sync.accumulated, blocks, select)
        return (yield from BlockExchange.of(sync.accumulated).all_gather_joined(team, block, blocks.slots))

    def _reduce_scatter(
        self, team: Team, accumulated: Accumulator, blocks: Blocks, select: Select
    ) -> Program[SparseVector]:
        yield Phase.SELECT
        held = [accumulated.take([part], select) for part in blocks.parts]
        transport = BlockExchange.of(accumulated)
        for distance, size in srs_rounds(team.size):
            outgoing, incoming = ([team.at(first + each) for each in range(size)] for first in (distance, 0))
            arrived = yield from transport.exchange(
                to=team.rank(distance),
                vector=concatenate([held[number] for number in outgoing]),
                slot=_room(blocks, outgoing),
                source=team.rank(-distance),
                coming=_room(blocks, incoming),
            )
            borders = list(accumulate((blocks.slots[number].length for number in incoming), initial=0))
            for number, block in zip(incoming, cut_apart(arrived, borders), strict=True):
                self.tally.note([len(held[number]) + len(block)])
                target = Target(accumulated, blocks.parts[number].start, blocks.slots[number])
                held[number] = target.add_up([held[number], block], holders=1)
        return held[team.position]


def _room(blocks: Blocks, numbers: Sequence[int]) -> Slot:
    slots = [blocks.slots[number] for number in numbers]
    return Slot(sum(slot.capacity for slot in slots), sum(slot.length for slot in slots))


LAZY, EAGER = "lazily", "at once"
COLUMNS = (
    "case, when a block is cut",
    "selections of a worker",
    "entries looked through / n",
    "mass / the most possible",
    "second half",
    "distance from the largest sums, second half",
    "entries that are also sent lazily",
)


@dataclass
class _Way:
    """One of the two variants with its results by step."""

    method: Method
    tally: Tally
    mass: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)

    def average(self, layout: Layout, vectors: Sequence[Tensor]) -> SparseVector:
        """Average that this variant computes from gradients and residuals of all workers."""
        states = [self.method.init_state(layout, vector.dtype) for vector in vectors]
        for vector, state in zip(vectors, states, strict=True):
            self.method.accumulate(vector, state)
        cluster = SimulatedCluster(len(vectors), Network(alpha=0, gbit=1), count_local=False)
        pairs = zip(cluster.local_workers, states, strict=True)
        average, *_ = cluster.run([self.method.average(*pair) for pair in pairs])
        assert isinstance(average, SparseVector)
        return average

    def judge(self, average: Tensor, best: Tensor) -> None:
        """Compares an average with the largest entries of the mean of all workers' vectors."""
        self.mass.append((average.abs().sum() / best.abs().sum()).item())
        self.distance.append(((average - best).norm() / best.norm()).item())


def ways(compressor: SparseCompressor) -> dict[str, _Way]:
    """Both variants by name, with the density of a compressor.

    Raises:
        ConfigError: if the compressor is not top-k.
    """
    if not isinstance(compressor, TopK):
        raise ConfigError(f"compressor={compressor.name} is not compared here; use compressor=spardl")
    settings = {each.name: getattr(compressor, each.name) for each in fields(TopK)}
    found = {}
    for name in (LAZY, EAGER):
        tally = Tally()
        communicator = EagerSparDL(tally=tally) if name == EAGER else SparDL()
        found[name] = _Way(Method(CountedTopK(**settings, tally=tally), communicator, GlobalResidual()), tally)
    return found


@dataclass
class _Both(Trace):
    """Runs both variants on the vectors of all workers."""

    ways: dict[str, _Way] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: Layout.flat(0))
    same: list[float] = field(default_factory=list)

    def start(self, method: Method, worker: Worker, state: MethodState) -> None:
        self.ways, self.layout = self.ways or ways(sparse(method)), state.layout

    def look(self, vectors: Sequence[Tensor], average: Sum) -> None:
        best = largest_of(torch.stack(list(vectors)).mean(0), self.wanted)
        found = {name: way.average(self.layout, vectors) for name, way in self.ways.items()}
        for name, own in found.items():
            self.ways[name].judge(own.dense(), best)
        kept = torch.isin(found[EAGER].indices, found[LAZY].indices, assume_unique=True)
        self.same.append(kept.double().mean().item())


def compare_selections(words: Sequence[str], steps: int) -> dict[str, Any]:
    """Trains with SparDL and also computes the average without lazy sparsification in every step.

    Args:
        words: Arguments of train.py, with SparDL and without teams.
        steps: Number of training steps.

    Returns:
        ``same`` by step: the share of entries sent without lazy sparsification that is also sent with it. By variant:
        ``selections`` per worker and synchronization; ``entries`` that they search, relative to those of the gradient;
        and by step, relative to the same number of largest entries of the mean of all workers' vectors, the ``mass`` of
        the average and its ``distance`` from these entries.

    Raises:
        ConfigError: if the configuration is invalid.
    """
    both = _Both()
    train_watched(words, steps, both)
    each = steps * len(both.vectors)
    found = {
        name: {
            "selections": way.tally.selections / each,
            "entries": way.tally.entries / each / both.layout.length,
            "mass": way.mass,
            "distance": way.distance,
        }
        for name, way in both.ways.items()
    }
    return {"same": both.same, **found}


@dataclass(frozen=True)
class Laziness(TracedExhibit):
    """Trainings with SparDL: one row per way to sparsify, and the sent mass by step."""

    basis: Basis = field(
        default=basis_of_trace(
            "in every step of real trainings with SparDL, lazy as it is: what either way makes of the same gradients "
            "and residuals"
        ),
        kw_only=True,
    )
    traced = "lazy"
    trace = compare_selections
    about = (
        "{plan.titles}. {plan.steps} steps of training with SparDL without teams; both ways get the same gradients "
        "and residuals. Lazily: a block is cut to its largest entries when it is about to be sent, or is complete. At "
        "once: every block is cut at the beginning and again after each addition; removed entries go to the residual, "
        "and later additions do not bring them back. Mass: the sum of magnitudes of the average, over that of the k "
        "largest entries of the mean of all workers' vectors; distance: of the average from these, over their norm. "
        "Rounds and words are equal. {words}"
    )

    def variants(self, plan: TracePlan) -> Mapping[str, tuple[str, ...]]:
        return {"": ("compressor=spardl",)}

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        rows = [row for case in plan.cases for row in self._rows(self.job(plan, case, ""), case, results)]
        return [Table(self.title, COLUMNS, rows)]

    def _rows(self, job: Computation, case: Case, results: Results) -> list[Row]:
        outcome = results.of(job)
        if outcome.reason is not None:
            return [Row(case.title, failed([outcome], len(COLUMNS) - 1), [job])]
        same = {EAGER: mean(outcome.data["same"]), LAZY: 1.0}
        return [Row(f"{case.title}, {way}", _cells(outcome.data[way], same[way]), [job]) for way in (LAZY, EAGER)]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        caption = "Mass that is sent over the most that is possible, by step, if blocks are cut lazily and at once"
        looks = palette.looks((LAZY, EAGER))
        draw = partial(draw_steps, styles=looks, up="mass / the most possible")
        found = self.finished(scale, results)
        lines = [(case, {way: [[mass] for mass in data[way]["mass"]] for way in looks}) for case, data in found]
        return [Picture(case.name, caption, partial(draw, lines=each), case.title, looks) for case, each in lines]


def _cells(data: Mapping[str, Any], same: float) -> list[Cell]:
    mass, distance = data["mass"], data["distance"]
    later = len(mass) // 2
    figures = (data["selections"], data["entries"], mean(mass), mean(mass[later:]), mean(distance[later:]), same)
    return [Cell(f"{figure:.4g}", figure) for figure in figures]
