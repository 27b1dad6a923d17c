"""Ok-Topk: split and reduce over regions of equal load, a second threshold for the sums, a balanced all-gather.

Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022; corrections of the
threshold after its official code. The local threshold of the paper is the compressor ``reused_threshold``; others may
be chosen.

Per worker at most about 6k(P-1)/P words: 2k(P-1)/P each to split, to balance (only if blocks are unequal) and to
gather; (P-1)/bucket + 3 ceil(log2 P) rounds, and one to balance. Their numbers, counted here as well, are at most
(P/2) ceil(log2 P) + P-1 words. Every ``threshold_period`` steps all non-zero sums are gathered instead of the k
largest, up to 2kP words; every ``repartition_period`` steps new borders cost as many words as the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.accumulator import Accumulator
from spardl.checks import is_a
from spardl.communicators.balance import balance, joined
from spardl.communicators.base import Communicator
from spardl.communicators.split import equal_regions, split_and_reduce, split_cost, swap_counts, swap_words
from spardl.communicators.transfer import Courier, all_gather_counts
from spardl.compressors.base import Output, SparseCompressor
from spardl.context import Context
from spardl.costs import Bounds, Cost, log2_ceil
from spardl.errors import ConfigError
from spardl.packing import Slot
from spardl.programs import Phase, Program, Team, whole_team
from spardl.sparse import SparseVector, Sum
from spardl.state import State
from spardl.thresholds import Reuse, check_number, smallest_magnitude

__all__ = ["OkTopk", "OkTopkState", "consensus_borders"]


@dataclass
class OkTopkState(State):
    """What is used again in the next steps, equal on all workers.

    Attributes:
        borders: int64, shape (P + 1,), of the regions; empty before the first step.
        threshold: the least magnitude of a sum that is kept; 0 if there is none to use again.
    """

    borders: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    threshold: float = 0.0


class Region(NamedTuple):
    """One worker's share of the sum.

    Attributes:
        team: all workers.
        borders: of all regions.
        courier: of sparse vectors.
        entries: of this worker's region, all workers' contributions added up; indices are local to it.
    """

    team: Team
    borders: Sequence[int]
    courier: Courier
    entries: SparseVector

    @property
    def lengths(self) -> list[int]:
        """Of all regions."""
        return [stop - start for start, stop in pairwise(self.borders)]

    def only(self, positions: Tensor) -> Region:
        """The region with some of its entries, at ``positions``: int64, shape (m,), increasing."""
        held = self.entries
        return self._replace(entries=SparseVector(held.indices[positions], held.values[positions], held.length))

    def gathered(self) -> Program[SparseVector]:
        """All regions' entries, whose numbers only their owners know."""
        slots = yield from self.courier.slots_of(self.team, self.entries, self.lengths)
        return (yield from self.courier.all_gather_joined(self.team, self.entries, slots))

    def in_vector(self) -> SparseVector:
        """The entries with indices of the whole vector."""
        start = self.borders[self.team.position]
        return SparseVector(self.entries.indices + start, self.entries.values, self.borders[-1])


def consensus_borders(team: Team, own: SparseVector) -> Program[list[int]]:
    """Regions that hold about equally many entries of each member.

    Every member proposes the positions that cut its own entries into equal parts; border i is the mean of all
    proposals for it, which member i works out. Proposals never fall from one border to the next, so the means do not.

    Args:
        team: who takes part.
        own: this member's entries.

    Returns:
        ``m + 1`` positions from 0 to the length of the vector.
    """
    proposals = yield from swap_counts(team, _proposals(own, team.size), own.indices.device)
    means = yield from all_gather_counts(team, [sum(proposals) // team.size], own.indices.device)
    return [mean for (mean,) in means] + [own.length]


def _proposals(own: SparseVector, count: int) -> list[int]:
    """The first positions of ``count`` parts with equally many entries; without entries, of equal length."""
    if not len(own):
        return equal_regions(own.length, count)[:-1]
    ranks = torch.tensor(equal_regions(len(own), count)[1:-1], dtype=torch.int64, device=own.indices.device)
    return [0, *own.indices[ranks].tolist()]


@dataclass(frozen=True)
class OkTopk(Reuse, Communicator[SparseCompressor]):
    """Sparse all-reduce of about the k largest sums; see ``Reuse`` for the other arguments.

    Args:
        repartition_period: tau, steps from one choice of regions to the next.
        threshold_period: tau', steps from one exact evaluation of the threshold to the next.
        bucket: workers that each worker sends to in one round of the split.
        balance_factor: before they are gathered, blocks are made equal if the largest exceeds the average by this
            factor; 0: always, ``None``: never.

    Raises:
        ConfigError: if a value is out of range.
    """

    lower_factor: float = 1.008
    high: float = 1.3333
    raise_factor: float = 1.008
    repartition_period: int = 64
    threshold_period: int = 32
    bucket: int = 4
    balance_factor: float | None = 4.0

    name = "oktopk"
    sums = frozenset({Output.AT_MOST_K, Output.ABOUT_K})

    def __post_init__(self) -> None:
        self.check_reuse("communicator")
        for name in ("repartition_period", "threshold_period", "bucket"):
            value = getattr(self, name)
            if not is_a(int, value) or value < 1:
                raise ConfigError(f"communicator.{name} must be a whole number, at least 1, got {value!r}")
        if self.balance_factor is not None:
            check_number("communicator", "balance_factor", self.balance_factor, 0)

    def init_state(self) -> OkTopkState:
        """No regions and no threshold yet."""
        return OkTopkState()

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Certain limits; where regions and blocks are about equal, far fewer words than the upper one."""
        workers, length = context.worker.size, context.layout.length
        capacity = compressor.capacity(context)
        entries = length if capacity is None else min(capacity, length)
        sums = min(length, workers * entries)
        exact = context.step % self.threshold_period == 0 or compressor.count(context) >= length
        parts = [
            split_cost(workers, entries, self.bucket),
            _gather_cost(workers, sums) if exact else _select_cost(workers, sums),
        ]
        if context.step % self.repartition_period == 0:
            parts.append(_borders_cost(workers))
        return Cost.total(parts)

    def published_cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """At most 6k(P-1)/P words, their numbers included, in steps without re-evaluation or new borders."""
        limits, k = self.cost(context, compressor), compressor.count(context)
        if not (context.step % self.threshold_period and context.step % self.repartition_period):
            return limits
        return limits._replace(words=Bounds(0, 6 * k * (context.worker.size - 1) // context.worker.size))

    def reduce(
        self,
        context: Context,
        accumulated: Accumulator,
        compressor: SparseCompressor,
        compression: State,
        state: State,
    ) -> Program[Sum]:
        """Select, split, add up, select again, gather."""
        assert isinstance(state, OkTopkState)
        team, (_, length, k) = whole_team(context.worker), compressor.whole(context)
        yield Phase.SELECT
        own = accumulated.take([compressor.whole(context)], compressor.selector(context, compression))
        if context.step % self.repartition_period == 0 or state.borders.numel() != team.size + 1:
            state.borders = torch.tensor((yield from consensus_borders(team, own)), dtype=torch.int64)
        borders, courier = state.borders.tolist(), Courier.of(accumulated)
        total = yield from split_and_reduce(team, own, borders, self.bucket, courier)
        region = Region(team, borders, courier, accumulated.rounded(borders[team.position], total))
        if k >= length:
            # All is wanted, zeros too, and there is no threshold to find.
            return (yield from region.gathered())
        if context.step % self.threshold_period and state.threshold > 0:
            kept = yield from self._select(region, k, state)
            if kept is not None:
                return kept
        return (yield from _reevaluate(region, k, state))

    def _select(self, region: Region, k: int, state: OkTopkState) -> Program[SparseVector | None]:
        """All sums above the threshold; ``None``, on all workers alike, if it is too far astray."""
        yield Phase.SELECT
        kept = region.only(_above(region.entries.values, state.threshold))
        gathered = yield from all_gather_counts(region.team, [len(kept.entries)], kept.entries.indices.device)
        counts = [count for (count,) in gathered]
        if self.is_astray(sum(counts), k):
            return None
        state.threshold = self.corrected(state.threshold, sum(counts), k)
        return (yield from self._gather(kept, counts))

    def _gather(self, region: Region, counts: Sequence[int]) -> Program[SparseVector]:
        """All workers' blocks, equal ones if need be."""
        team, length = region.team, region.borders[-1]
        if not self._is_unequal(counts):
            slots = [Slot(*pair) for pair in zip(counts, region.lengths, strict=True)]
            return (yield from region.courier.all_gather_joined(team, region.entries, slots))
        block = yield from balance(team, region.in_vector(), counts, region.courier)
        slots = [Slot(stop - start, length) for start, stop in pairwise(equal_regions(sum(counts), team.size))]
        return joined((yield from region.courier.all_gather(team, block, slots)))

    def _is_unequal(self, counts: Sequence[int]) -> bool:
        factor, alone = self.balance_factor, len(counts) == 1
        return factor is not None and not alone and max(counts) * len(counts) > factor * sum(counts)


def _above(values: Tensor, threshold: float) -> Tensor:
    # An overflow counts: it must reach the weights, where it is seen. A threshold can be 0 in the type of the values.
    return ((values.abs() >= threshold) & (values != 0)).nonzero().squeeze(1)


def _reevaluate(region: Region, k: int, state: OkTopkState) -> Program[SparseVector]:
    """The k largest of all sums, found exactly; the smallest of them is the new threshold."""
    yield Phase.SELECT
    nonzero = region.only(region.entries.values.nonzero().squeeze(1))
    union = yield from nonzero.gathered()
    yield Phase.SELECT
    largest, _ = union.top(k)
    # With fewer than k sums to choose from, the smallest of them says nothing about the next step.
    state.threshold = smallest_magnitude(largest.values) if len(largest) == k else 0.0
    return largest


def _borders_cost(workers: int) -> Cost:
    return Cost(Bounds.exactly(2 * log2_ceil(workers)), Bounds.exactly(swap_words(workers) + workers - 1))


def _gather_cost(workers: int, sums: int) -> Cost:
    """Of blocks of any sizes, which are gathered, too; in no round is one of them sent twice."""
    rounds = log2_ceil(workers)
    return Cost(Bounds.exactly(2 * rounds), Bounds(workers - 1, workers - 1 + 2 * rounds * sums))


def _select_cost(workers: int, sums: int) -> Cost:
    """Of one count and blocks that may be made equal first, or of two counts and all sums."""
    rounds = log2_ceil(workers)
    longest = max(2 * rounds * sums, 2 * sums + 2 * (workers - 1) * -(-sums // workers))
    return Cost(
        Bounds(2 * rounds, 2 * rounds + max(rounds, workers > 1)),
        Bounds(workers - 1, 2 * (workers - 1) + longest),
    )
