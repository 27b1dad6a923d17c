"""SparDL: sparse Reduce-Scatter within teams, sparse All-Gather between teams and within teams.

Source: Zhao et al., SparDL: Distributed Deep Learning Training with Efficient Sparse Communication, ICDE 2024
(arXiv 2304.00737). P workers form d teams of m = P/d. R-SAG and B-SAG are the paper's sparse all-gathers between teams:
by recursive doubling, and by Bruck's algorithm, before which each worker selects h entries (h adapts by step).
Per worker and synchronization, with k_b = k/m:

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

from spardl.basics.checks import check_choice, check_integer
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.doubling import Target, recursive_doubling
from spardl.communicators.steps.transfer import BlockExchange
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
from spardl.vector.layout import Range, Ranges
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

METHODS = (
    Combination(
        "spardl",
        compressor="topk",
        communicator="spardl",
        residual="global",
        momentum="auto",
        # Entries of an orthogonal matrix have similar sizes: a few of them contain little of the update, but a few bits
        # per entry suffice.
        muon_options={"density": 0.1, "wire": "int4"},
    ),
)


@dataclass(frozen=True)
class Blocks:
    """A vector of ``length`` divided into ``count`` nearly equal blocks, with ``capacity`` entries kept of each.

    A block shorter than ``capacity`` is kept whole. Some blocks are empty if the vector has fewer entries than blocks.
    """

    length: int
    count: int
    capacity: int

    @cached_property
    def parts(self) -> list[Range]:
        """Blocks as ranges, each with the number of entries to keep."""
        borders = [block * self.length // self.count for block in range(self.count + 1)]
        return [Range(start, stop, min(self.capacity, stop - start)) for start, stop in pairwise(borders)]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Slot of each block: its length, and the maximum number of entries in a message."""
        return tuple(Slot(part.k, part.stop - part.start) for part in self.parts)

    @cached_property
    def _twice(self) -> Ranges:
        # All blocks twice, so that consecutive blocks across the end of the vector are also a single slice.
        return Ranges(np.tile(Ranges.of(self.parts).columns, 2))

    def cyclic(self, first: int, size: int) -> Ranges:
        """Returns ``size`` consecutive blocks, starting with number ``first``; block 0 follows the last block."""
        return self._twice[first : first + size]


# Cached: shared by all steps and by all workers that one process simulates, up to 1,024 workers with 10 rounds each.
@lru_cache(maxsize=1024)
def _make_blocks(length: int, count: int, capacity: int) -> Blocks:
    return Blocks(length, count, capacity)


@lru_cache(maxsize=1 << 14)
def _cyclic_blocks(blocks: Blocks, first: int, size: int) -> Ranges:
    return blocks.cyclic(first, size)


@dataclass
class SparDLState(State):
    """State of the adaptation of h, the number of entries that each team contributes to B-SAG.

    Attributes:
        h: Number of entries that each team contributed last time; 0 before the first time.
        step: Change of h in the next step, in entries.
        inertia: Whether the next change of h is doubled if it has the same direction as the last one.
    """

    h: int = 0
    step: int = 0
    inertia: bool = False

    def start(self, k: int, teams: int) -> int:
        """Returns h for the current step, within [ceil(k/d), k], where d is ``teams``; the first h is the lower end."""
        self.h = _clamp(self.h, -(-k // teams), k)
        self.step = self.step or max(1, (k - self.h) // 100)
        return self.h

    def adapt(self, merged: int, k: int, teams: int) -> None:
        """Changes h so that the union of the entries of all teams approaches k entries.

        Args:
            merged: Number of entries in the union of this step.
            k: Wanted number of entries.
            teams: Number of teams.
        """
        # All teams see the same union of a block, so they compute the same h, which determines the size of the next
        # messages, without exchanging it. A union of exactly k counts as too small, so h keeps oscillating around its
        # optimum and follows it when it moves.
        if (merged > k) != (self.step > 0):
            if self.inertia:
                self.step = _clamp(2 * self.step, -k, k)
            # Toggle: after a doubled step, two more steps must have the right direction before the next doubling.
            self.inertia = not self.inertia
        else:
            # Reverse the step and halve it, but never to 0: a small block would keep its first h forever.
            self.step = int(-self.step / 2) or -self.step
            self.inertia = False
        self.h = _clamp(self.h + self.step, -(-k // teams), k)


def _clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def srs_rounds(size: int) -> list[tuple[int, int]]:
    """Returns the rounds of Spar-Reduce-Scatter in a team of ``size``: pairs (distance, number of blocks to send).

    The distance is the position of the receiver minus that of the sender. It is halved from round to round, from
    2^(L-1) to 1, where L = ceil(log2 size). A round sends as many blocks as its distance; only the first round sends
    fewer if the size is not a power of two.
    """
    distances = [1 << level for level in reversed(range((size - 1).bit_length()))]
    return [(distance, min(distance, size - distance)) for distance in distances]


def spar_reduce_scatter(
    team: Team, accumulated: Accumulator, blocks: Blocks, select: Select, *, full: bool = False
) -> Program[None]:
    """Sums every block of the vector at one member: block i at the member at position i.

    Afterwards, the vector of a member holds the sum of its block, and the entries that it dropped from other blocks.

    Args:
        team: Members in a fixed order, one per block.
        accumulated: Gradient plus residual of this member.
        blocks: Division of the vector into blocks.
        select: Function that selects the entries of a block to keep.
        full: Whether ``select`` always selects as many entries as a block may keep.
    """
    transport = BlockExchange.of(accumulated, full=full)
    for distance, size in srs_rounds(team.size):
        outgoing, incoming = (
            _cyclic_blocks(blocks, team.at(distance), size),
            _cyclic_blocks(blocks, team.position, size),
        )
        yield Phase.SELECT
        # Lazy block-wise sparsification: a block is cut to its k_b largest entries only when it is sent, after all
        # received entries were added, so each block is cut once. The blocks of a round form one contiguous vector.
        arrived = yield from transport.exchange(
            to=team.rank(distance),
            vector=accumulated.take(outgoing, select),
            slot=_slot(outgoing),
            source=team.rank(-distance),
            coming=_slot(incoming),
        )
        accumulated.add(incoming.start, arrived)


def _slot(blocks: Ranges) -> Slot:
    return Slot(blocks.wanted, blocks.length)


class ReducedBlock(NamedTuple):
    """The block that this worker has summed within its team, and will sum over the teams.

    Attributes:
        accumulated: Vector of this worker (gradient plus residual), which contains the block.
        start: First position of the block.
        slot: Length of the block, and the maximum number of entries in the result.
        select: Function that selects entries of a range.
        full: Whether ``select`` always selects the requested number of entries.
    """

    accumulated: Accumulator
    start: int
    slot: Slot
    select: Select
    full: bool = False

    def take(self, k: int) -> SparseVector:
        """Removes the k largest entries of the block from the vector and returns them."""
        return self.accumulated.take([Range(self.start, self.start + self.slot.length, k)], self.select)


def _shard(block: SparseVector, own: ReducedBlock, peers: Team) -> SparseVector:
    """Returns the block with indices in the whole vector."""
    # Every team ends with the same block; only the first one counts it.
    count = 0 if peers.position else len(block)
    indices = block.indices[:count] + own.start if own.start else block.indices[:count]
    return SparseVector(indices, block.values[:count], own.accumulated.values.numel())


def recursive_gather(peers: Team, own: ReducedBlock, state: SparDLState) -> Program[SparseVector]:
    """R-SAG: sums a block over the teams by recursive doubling, and cuts the sum to k_b entries in every round.

    The number of teams must be a power of two.
    """
    target = Target(own.accumulated, own.start, own.slot, own.full)
    return (yield from recursive_doubling(peers, own.take(own.slot.capacity), target))


def bruck_gather(peers: Team, own: ReducedBlock, state: SparDLState) -> Program[SparseVector]:
    """B-SAG: gathers h entries of the block from each team, and cuts their sum to k_b entries.

    The number of teams may be any number; ``state`` adapts h from step to step.
    """
    capacity = own.slot.capacity
    if peers.size == 1:
        return own.take(capacity)
    # If a block is kept whole, nothing is selected, and density 1 must lose nothing: h is not adapted then.
    h = capacity if capacity == own.slot.length else state.start(capacity, peers.size)
    transport, slots = BlockExchange.of(own.accumulated, full=own.full), [Slot(h, own.slot.length)] * peers.size
    # ``merge`` adds in the order of teams on every worker; another order could change the last bit of a sum.
    union = merge((yield from transport.all_gather(peers, own.take(h), slots)))
    state.adapt(len(union), capacity, peers.size)
    # All teams round the same sums, so each of them keeps its share of the rounding error.
    return own.accumulated.rounded(own.start, union.largest(capacity), peers.size)


def _recursive_words(teams: int, k: int) -> Bounds:
    return Bounds.exactly(2 * k * log2_ceil(teams))


def _bruck_words(teams: int, k: int) -> Bounds:
    return Bounds(2 * -(-k // teams) * (teams - 1), 2 * k * (teams - 1))


class Gather(NamedTuple):
    """An algorithm that sums a block over the teams.

    Attributes:
        run: Generator function that every member runs.
        words: Function that returns the number of words that a member sends, from the number of teams and the maximum
            number of entries in the result.
    """

    run: Callable[[Team, ReducedBlock, SparDLState], Program[SparseVector]]
    words: Callable[[int, int], Bounds]


GATHERS: Mapping[str, Gather] = MappingProxyType(
    {"bruck": Gather(bruck_gather, _bruck_words), "recursive": Gather(recursive_gather, _recursive_words)}
)


@dataclass(frozen=True)
class SparDL(Communicator[SparseCompressor, SparDLState]):
    """Sparse all-reduce that selects the largest entries again in every round, for any number of workers.

    Args:
        teams: Number of teams (d), a divisor of the number of workers; more teams mean fewer rounds and more words.
        gather: All-gather between teams: ``bruck`` (B-SAG) or ``recursive`` (R-SAG, d a power of two).

    Raises:
        ConfigError: If a value is out of range.
    """

    teams: int = 1
    gather: str = "bruck"

    name = "spardl"
    sums = frozenset({Output.AT_MOST_K})
    drops = True
    sends_whole = True

    def __post_init__(self) -> None:
        check_integer("communicator.teams", self.teams, least=1)
        check_choice("communicator.gather", self.gather, GATHERS)
        if self.gather == "recursive" and self.teams & (self.teams - 1):
            raise ConfigError(
                f"communicator.gather=recursive (R-SAG) needs a power of two as communicator.teams, got {self.teams}; "
                "use gather=bruck (B-SAG), which takes any number"
            )

    @property
    def splits(self) -> bool:
        """True: a sum can pause before the all-gather within the team."""
        return True

    def check_workers(self, workers: int) -> None:
        """Checks that ``teams`` divides the number of ``workers``, and raises ``ConfigError`` otherwise."""
        if workers % self.teams:
            legal = [str(d) for d in range(1, workers + 1) if workers % d == 0]
            raise ConfigError(
                f"communicator.teams={self.teams} does not divide {workers} workers; use one of {', '.join(legal)}"
            )

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns the cost by the formulas of the module docstring, as bounds if the blocks have unequal sizes."""
        return Cost.total(self.half_costs(context, compressor))

    def half_costs(self, context: Context, compressor: SparseCompressor) -> tuple[Cost, Cost]:
        """Returns the cost of all stages before the all-gather within the team, and the cost of this all-gather."""
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
        return _make_blocks(context.layout.length, size, -(-compressor.count(context) // size))

    def init_state(self) -> SparDLState:
        """Returns the initial state of the adaptation of h."""
        return SparDLState()

    def reduce(self, sync: Synchronization[SparseCompressor, SparDLState]) -> Program[Sum]:
        """Runs the reduce-scatter in the team, the gather between teams, and the all-gather in the team."""
        worker, accumulated = sync.context.worker, sync.accumulated
        # Teams are contiguous ranks. The peers of a worker have its position in the other teams, hence the same block.
        size = worker.size // self.teams
        first = worker.rank - worker.rank % size
        team = Team(range(first, first + size), worker.rank % size)
        peers = Team(range(worker.rank % size, worker.size, size), worker.rank // size)

        blocks = self._blocks(sync.context, sync.compressor, size)
        select = sync.compressor.selector(sync.context, sync.compression)
        full = sync.compressor.fills
        yield from spar_reduce_scatter(team, accumulated, blocks, select, full=full)
        yield Phase.SELECT
        own = ReducedBlock(accumulated, blocks.parts[team.position].start, blocks.slots[team.position], select, full)
        block = yield from GATHERS[self.gather].run(peers, own, sync.state)
        yield Boundary(_shard(block, own, peers))
        # A union of the entries of several teams can hold fewer entries than the slot.
        filled = full and (self.teams == 1 or self.gather == "recursive")
        return (yield from BlockExchange.of(accumulated, full=filled).all_gather_joined(team, block, blocks.slots))
