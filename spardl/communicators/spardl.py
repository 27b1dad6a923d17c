"""SparDL: sparse Reduce-Scatter inside teams, sparse All-Gather between and inside them.

Source: Zhao et al., SparDL: Distributed Deep Learning Training with Efficient Sparse Communication, ICDE 2024
(arXiv 2304.00737). P workers form d teams of m = P/d. Per worker and synchronization, with k_b = k/m:

=====================  ==========================  ====================================
stage                  rounds                      words
=====================  ==========================  ====================================
Spar-Reduce-Scatter    ceil(log2 m)                2 k_b (m-1)
R-SAG (d = 2^j)        log2 d                      2 k_b log2 d
B-SAG (any d)          ceil(log2 d)                2 h (d-1), h in [ceil(k_b/d), k_b]
all-gather in a team   ceil(log2 m)                2 k_b (m-1)
=====================  ==========================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from spardl.basics.checks import check_choice, check_whole
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.communicators.steps.doubling import Target, recursive_doubling
from spardl.communicators.steps.transfer import Courier
from spardl.compressors.base import Output, SparseCompressor
from spardl.protocol.programs import (
    Boundary,
    Bounds,
    Combination,
    Context,
    Cost,
    Phase,
    Program,
    State,
    Team,
    log2_ceil,
)
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Part, Parts
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, Sum, merge

__all__ = [
    "METHODS",
    "Blocks",
    "SparDL",
    "SparDLState",
    "bruck_gather",
    "recursive_gather",
    "spar_reduce_scatter",
    "srs_rounds",
]

METHODS = (Combination("spardl", compressor="topk", communicator="spardl", residual="global", momentum="auto"),)


@dataclass(frozen=True)
class Blocks:
    """A vector of ``length`` cut into ``count`` ranges of nearly equal size, ``capacity`` entries kept of each.

    A range shorter than ``capacity`` is kept whole, and with fewer elements than ranges some are empty.
    """

    length: int
    count: int
    capacity: int

    @cached_property
    def parts(self) -> list[Part]:
        """The blocks as ranges, and how many entries are kept of each."""
        borders = [block * self.length // self.count for block in range(self.count + 1)]
        return [Part(start, stop, min(self.capacity, stop - start)) for start, stop in pairwise(borders)]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The room that each block takes in a message."""
        return tuple(Slot(part.k, part.stop - part.start) for part in self.parts)

    @cached_property
    def _twice(self) -> Parts:
        """All blocks two times, so that a bag is a slice."""
        return Parts(np.tile(Parts.of(self.parts).columns, 2))

    def bag(self, first: int, size: int) -> Parts:
        """Neighbouring blocks from one on, counted around: ``size`` from the block ``first``, below ``count``, on."""
        return self._twice[first : first + size]


# One object for all workers that a process plays, and for all steps: both, for 1,024 workers with 10 bags each.
@lru_cache(maxsize=1024)
def _cut_into(length: int, count: int, capacity: int) -> Blocks:
    return Blocks(length, count, capacity)


@lru_cache(maxsize=1 << 14)
def _bag(blocks: Blocks, first: int, size: int) -> Parts:
    return blocks.bag(first, size)


@dataclass
class SparDLState(State):
    """The adaptation of h in B-SAG.

    Attributes:
        h: entries that each team contributed last time; 0 before the first time.
        step: the next change of h.
        inertia: whether the last step already pointed the right way.
    """

    h: int = 0
    step: int = 0
    inertia: bool = False

    def start(self, k: int, teams: int) -> int:
        """The h to use now, within [ceil(k/d), k]; the first one is the lower end."""
        self.h = _clamp(self.h, -(-k // teams), k)
        self.step = self.step or max(1, (k - self.h) // 100)
        return self.h

    def adapt(self, merged: int, k: int, teams: int) -> None:
        """Moves h so that the union of all teams' entries comes to hold k.

        A step that points the right way twice is doubled, one that points the wrong way is halved and
        turned. It never becomes 0, or a small block would keep its first h for ever.

        Args:
            merged: entries in the union this time.
            k: entries wanted.
            teams: number of teams.
        """
        # Nobody is told another team's h, though the size of its message follows from it: all teams see the same union
        # of a block, so they come to the same h. A union of exactly k counts as too small, so h never rests: it swings
        # around the right one.
        if (merged > k) != (self.step > 0):
            if self.inertia:
                self.step = _clamp(2 * self.step, -k, k)
            # Not ``True``: a doubled step has to be right twice again before the next doubling.
            self.inertia = not self.inertia
        else:
            self.step = int(-self.step / 2) or -self.step
            self.inertia = False
        self.h = _clamp(self.h + self.step, -(-k // teams), k)


def _clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def srs_rounds(size: int) -> list[tuple[int, int]]:
    """The rounds of Spar-Reduce-Scatter in a team: (distance, blocks in the bag).

    Distances fall from 2^(L-1) to 1, L = ceil(log2 size). A bag holds as many blocks as its distance; only the
    first one is smaller where the size is no power of two.
    """
    distances = [1 << level for level in reversed(range((size - 1).bit_length()))]
    return [(distance, min(distance, size - distance)) for distance in distances]


def spar_reduce_scatter(team: Team, accumulated: Accumulator, blocks: Blocks, select: Select) -> Program[None]:
    """Adds up every block, sparsely, at the member whose position is the block's number.

    A block is cut to its k_b largest entries only when it is about to leave, after all that arrived for it
    was added (lazy block-wise sparsification). Afterwards the vector holds this member's own block fully
    reduced, and in the others what was dropped.

    Args:
        team: who takes part; as many members as there are blocks.
        accumulated: this member's vector.
        blocks: how it is cut.
        select: picks the entries to keep.
    """
    courier = Courier.of(accumulated)
    for distance, size in srs_rounds(team.size):
        outgoing, incoming = _bag(blocks, team.at(distance), size), _bag(blocks, team.position, size)
        yield Phase.SELECT
        # The blocks of a bag travel end to end, as one vector.
        arrived = yield from courier.exchange(
            to=team.rank(distance),
            vector=accumulated.take(outgoing, select),
            slot=_room(outgoing),
            source=team.rank(-distance),
            coming=_room(incoming),
        )
        accumulated.add(incoming.start, arrived)


def _room(bag: Parts) -> Slot:
    return Slot(bag.wanted, bag.length)


class ReducedBlock(NamedTuple):
    """A team's own block after Spar-Reduce-Scatter, about to be added up over the teams.

    Attributes:
        accumulated: this worker's vector.
        start: first position of the block.
        slot: the block's length and how many entries of it the result may hold.
        select: picks entries.
    """

    accumulated: Accumulator
    start: int
    slot: Slot
    select: Select

    def take(self, k: int) -> SparseVector:
        """Cuts the k largest entries of the block out of the vector."""
        return self.accumulated.take([Part(self.start, self.start + self.slot.length, k)], self.select)


def _shard(block: SparseVector, own: ReducedBlock, peers: Team) -> SparseVector:
    """The block with indices of the whole vector: all teams end with the same one, and the first counts it."""
    count = 0 if peers.position else len(block)
    return SparseVector(block.indices[:count] + own.start, block.values[:count], own.accumulated.values.numel())


def recursive_gather(peers: Team, own: ReducedBlock, state: SparDLState) -> Program[SparseVector]:
    """R-SAG: recursive doubling over a power of two of teams, re-selecting k_b entries in every round."""
    target = Target(own.accumulated, own.start, own.slot)
    return (yield from recursive_doubling(peers, own.take(own.slot.capacity), target))


def bruck_gather(peers: Team, own: ReducedBlock, state: SparDLState) -> Program[SparseVector]:
    """B-SAG: one all-gather of h entries per team, any number of teams; the union is cut to k_b entries.

    All workers add up in the order of the teams; otherwise their sums could differ in the last bit.
    """
    capacity = own.slot.capacity
    if peers.size == 1:
        return own.take(capacity)
    # Of a block that is kept whole there is nothing to choose, and density 1 must lose nothing.
    h = capacity if capacity == own.slot.length else state.start(capacity, peers.size)
    courier, slots = Courier.of(own.accumulated), [Slot(h, own.slot.length)] * peers.size
    union = merge((yield from courier.all_gather(peers, own.take(h), slots)))
    state.adapt(len(union), capacity, peers.size)
    return own.accumulated.rounded(own.start, union.largest(capacity), peers.size)


def _recursive_words(teams: int, k: int) -> Bounds:
    return Bounds.exactly(2 * k * log2_ceil(teams))


def _bruck_words(teams: int, k: int) -> Bounds:
    return Bounds(2 * -(-k // teams) * (teams - 1), 2 * k * (teams - 1))


class Gather(NamedTuple):
    """A way to add up a block over the teams.

    Attributes:
        run: the program of one member.
        words: what it sends, of a number of teams and a block of which the result holds some number of entries.
    """

    run: Callable[[Team, ReducedBlock, SparDLState], Program[SparseVector]]
    words: Callable[[int, int], Bounds]


GATHERS: Mapping[str, Gather] = MappingProxyType(
    {"bruck": Gather(bruck_gather, _bruck_words), "recursive": Gather(recursive_gather, _recursive_words)}
)


@dataclass(frozen=True)
class SparDL(Communicator[SparseCompressor]):
    """Sparse all-reduce that re-selects on the way, for any number of workers.

    Args:
        teams: d, must divide the number of workers; more teams mean fewer rounds and more words.
        gather: how teams exchange: ``bruck`` (B-SAG) or ``recursive`` (R-SAG, d a power of two).

    Raises:
        ConfigError: if a value is none of these.
    """

    teams: int = 1
    gather: str = "bruck"

    name = "spardl"
    sums = frozenset({Output.AT_MOST_K})
    drops = True
    sends_whole = True

    def __post_init__(self) -> None:
        check_whole("communicator.teams", self.teams, least=1)
        check_choice("communicator.gather", self.gather, GATHERS)
        if self.gather == "recursive" and self.teams & (self.teams - 1):
            raise ConfigError(
                f"communicator.gather=recursive (R-SAG) needs a power of two of teams, got teams={self.teams}; "
                "use gather=bruck (B-SAG), which takes any"
            )

    @property
    def splits(self) -> bool:
        """All that is added up, then the all-gather in the team."""
        return True

    def check_workers(self, workers: int) -> None:
        """Accepts every multiple of ``teams``."""
        if workers % self.teams:
            legal = [str(d) for d in range(1, workers + 1) if workers % d == 0]
            raise ConfigError(
                f"communicator.teams={self.teams} does not divide {workers} workers; use one of {', '.join(legal)}"
            )

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """The formulas above; blocks of unequal length differ where they are kept whole."""
        return Cost.total(self.half_costs(context, compressor))

    def half_costs(self, context: Context, compressor: SparseCompressor) -> tuple[Cost, Cost]:
        """All but the all-gather in the team, and that."""
        size, teams = context.worker.size // self.teams, self.teams
        blocks = self._blocks(context, compressor, size)
        capacities = [slot.capacity for slot in blocks.slots]
        least, most, words = min(capacities), max(capacities), GATHERS[self.gather].words
        inside = Cost(
            Bounds.exactly(log2_ceil(size)), Bounds(2 * (sum(capacities) - most), 2 * (sum(capacities) - least))
        )
        between = Bounds(words(teams, least).low, words(teams, most).high)
        return Cost.total([inside, Cost(Bounds.exactly(log2_ceil(teams)), between)]), inside

    def _blocks(self, context: Context, compressor: SparseCompressor, size: int) -> Blocks:
        return _cut_into(context.layout.length, size, -(-compressor.count(context) // size))

    def init_state(self) -> SparDLState:
        """The adaptation of h, at its beginning."""
        return SparDLState()

    def reduce(
        self,
        context: Context,
        accumulated: Accumulator,
        compressor: SparseCompressor,
        compression: State,
        state: State,
    ) -> Program[Sum]:
        """Reduce-scatter in the team, gather between teams, all-gather in the team."""
        assert isinstance(state, SparDLState)
        worker = context.worker
        size = worker.size // self.teams
        first = worker.rank - worker.rank % size
        team = Team(range(first, first + size), worker.rank % size)
        peers = Team(range(worker.rank % size, worker.size, size), worker.rank // size)

        blocks = self._blocks(context, compressor, size)
        select = compressor.selector(context, compression)
        yield from spar_reduce_scatter(team, accumulated, blocks, select)
        yield Phase.SELECT
        own = ReducedBlock(accumulated, blocks.parts[team.position].start, blocks.slots[team.position], select)
        block = yield from GATHERS[self.gather].run(peers, own, state)
        yield Boundary(_shard(block, own, peers))
        return (yield from Courier.of(accumulated).all_gather_joined(team, block, blocks.slots))
