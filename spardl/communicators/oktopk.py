"""Ok-Topk: split and reduce over regions of equal load, a second threshold for the sums, a balanced all-gather.

Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022; corrections of the
threshold after its official code. The local threshold of the paper is the compressor ``reused_threshold``; others may
be chosen.

Per worker at most 6k(P-1)/P words on average: 2k(P-1)/P each to split, to balance (only if blocks are unequal) and to
gather; (P-1)/bucket + 3 ceil(log2 P) rounds, and one to balance. Their numbers, counted here as well, are at most
(P/2) ceil(log2 P) + P-1 words. Every ``threshold_period`` steps all non-zero sums are gathered instead of the k
largest, up to 2kP words; every ``repartition_period`` steps new borders cost as many words as the numbers.

The paper supposes that a threshold used again still selects about k. While residuals grow from zero it selects
several times as many, so this library adds a limit: no selection, of a worker's entries or of the sums, has more than
4k/3; one that has more is cut to the k largest. Of the sums, each region gives its largest, in proportion to how many
it has. A threshold of the sums that is found ahead of time (``reevaluate_beyond``, also an addition) is found among
4k/3 such sums. So one of the k largest is missed where its region has more than its share of them; what is cut or
missed is kept by the residual, like all that did not reach the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_whole
from spardl.communicators.base import Communicator
from spardl.communicators.steps.split import (
    balance,
    equal_regions,
    joined,
    split_and_reduce,
    split_cost,
    swap_counts,
    swap_words,
)
from spardl.communicators.steps.transfer import Courier, all_gather_counts
from spardl.compressors.base import Output, SparseCompressor
from spardl.protocol.programs import (
    Bounds,
    Combination,
    Context,
    Cost,
    Phase,
    Program,
    State,
    Team,
    log2_ceil,
    whole_team,
)
from spardl.vector import sparse
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.candidates import Reuse, check_number, smallest_magnitude
from spardl.vector.layout import Part
from spardl.vector.packing import Slot
from spardl.vector.selection import top_k
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["METHODS", "OkTopk", "OkTopkState", "consensus_borders"]

_OKTOPK = Combination("oktopk", compressor="reused_threshold", communicator="oktopk", residual="partial")
# The other three are what the official code has for three models: without this library's addition, so thresholds are
# evaluated in their period only.
METHODS = (
    replace(_OKTOPK, momentum="auto"),
    replace(
        _OKTOPK,
        name="oktopk_vgg",
        dense_steps=512,
        compressor_options={"density": 0.02, "reevaluate_beyond": None},
        communicator_options={"reevaluate_beyond": None},
    ),
    replace(
        _OKTOPK,
        name="oktopk_lstm",
        dense_steps=128,
        compressor_options={"density": 0.02, "reevaluate_beyond": None, "pre_limit": 1.5, "low": 0.75},
        communicator_options={"reevaluate_beyond": None, "low": 0.75, "lower_factor": 1.01, "high": 1.25},
    ),
    replace(
        _OKTOPK,
        name="oktopk_bert",
        compressor_options={
            "period": 128,
            "pre_corrections": 0,
            "low": 0.8,
            "lower_factor": 1.025,
            "raise_factor": 1.025,
            "reevaluate_beyond": None,
        },
        communicator_options={
            "threshold_period": 128,
            "low": 0.8,
            "lower_factor": 1.036,
            "high": 1.25,
            "raise_factor": 1.025,
            "reevaluate_beyond": None,
            "balance_factor": 0,
        },
    ),
)


@dataclass
class OkTopkState(State):
    """What is used again in the next steps, equal on all workers.

    Attributes:
        borders: int64, shape (P + 1,), of the regions; empty before the first step.
        threshold: the least magnitude of a sum that is kept; 0 if there is none to use again.
    """

    borders: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    threshold: float = 0.0

    def rescale(self, factor: float) -> None:
        """The threshold is in the units of gradients."""
        self.threshold *= factor


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
        return self._replace(entries=self.entries.at(positions))

    def nonzero(self) -> Region:
        """The region without the entries that are zero."""
        return self.only(self.entries.values.nonzero().squeeze(1))

    def counts(self) -> Program[list[int]]:
        """The numbers of entries of all regions."""
        gathered = yield from all_gather_counts(self.team, [len(self.entries)], self.entries.indices.device)
        return [count for (count,) in gathered]

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
    """Sparse all-reduce of about the k largest sums, at most 4k/3; see ``Reuse`` for the other arguments.

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
            check_whole(f"communicator.{name}", getattr(self, name), least=1)
        if self.balance_factor is not None:
            check_number("communicator", "balance_factor", self.balance_factor, 0)

    def init_state(self) -> OkTopkState:
        """No regions and no threshold yet."""
        return OkTopkState()

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Certain limits; where regions and blocks are about equal, far fewer words than the upper one."""
        workers, length, k = context.worker.size, context.layout.length, compressor.count(context)
        capacity = compressor.capacity(context)
        entries = min(_most(k) if capacity is None else capacity, length)
        sums = min(length, workers * entries)
        exact = context.step % self.threshold_period == 0 or k >= length
        parts = [
            split_cost(workers, entries, self.bucket),
            # Shares are rounded up.
            _gather_cost(workers, sums) if exact else _select_cost(workers, min(sums, _most(k) + workers)),
        ]
        if context.step % self.repartition_period == 0:
            parts.append(_borders_cost(workers))
        return Cost.total(parts)

    def published_cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """At most 6k(P-1)/P words, between the steps at the end of a period: those have the limits of ``cost``.

        This is the mean over all workers, and supposes that regions hold equal shares of each worker's entries. The
        numbers of the entries are included, unless k is so small (below about 10 P) that they outweigh the entries.
        """
        limits, k, workers = self.cost(context, compressor), compressor.count(context), context.worker.size
        if not (context.step % self.threshold_period and context.step % self.repartition_period):
            return limits
        # Two selections; numbers of two kinds, of which the second may be asked for twice; shares that are rounded up.
        least = 4 * _most(k) * (workers - 1) // workers + swap_words(workers) + 4 * (workers - 1)
        return limits._replace(words=Bounds(0, max(6 * k * (workers - 1) // workers, least)))

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
        select = _limited(compressor.selector(context, compression), k)
        own = accumulated.take([compressor.whole(context)], select)
        if context.step % self.repartition_period == 0 or state.borders.numel() != team.size + 1:
            state.borders = torch.tensor((yield from consensus_borders(team, own)), dtype=torch.int64)
        borders, courier = state.borders.tolist(), Courier.of(accumulated)
        total = yield from split_and_reduce(team, own, borders, self.bucket, courier)
        region = Region(team, borders, courier, accumulated.rounded(borders[team.position], total))
        if k >= length:
            # All is wanted, zeros too, and there is no threshold to find.
            return (yield from region.gathered())
        if context.step % self.threshold_period:
            return (yield from self._select(region, k, state))
        return (yield from _reevaluate(region, k, state))

    def _select(self, region: Region, k: int, state: OkTopkState) -> Program[SparseVector]:
        """All sums above the threshold; about the k largest, if these are too many or the threshold is astray."""
        yield Phase.SELECT
        kept = region.only(_above(region.entries.values, state.threshold))
        counts = yield from kept.counts()
        found, known = sum(counts), state.threshold > 0
        astray, few = not known or self.is_astray(found, k), known and found < k
        if not astray:
            state.threshold = self.corrected(state.threshold, found, k)
            if found <= _most(k):
                return (yield from self._gather(kept, counts))
        elif few:
            kept = region.nonzero()
            counts = yield from kept.counts()
        # A threshold is found more surely among more than k.
        shares = _shares(counts, _most(k) if astray else k)
        share = kept.entries.largest(shares[region.team.position])
        # Numbers were told twice where there are few: those rounds are enough.
        union = yield from self._gather(kept._replace(entries=share), shares, level=not few)
        yield Phase.SELECT
        largest = union.largest(k)
        if astray:
            state.threshold = _threshold_of(largest, k)
        return largest

    def _gather(self, region: Region, counts: Sequence[int], *, level: bool = True) -> Program[SparseVector]:
        """All workers' blocks, made equal if need be and ``level``."""
        team, length = region.team, region.borders[-1]
        if not (level and self._is_unequal(counts)):
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


def _most(k: int) -> int:
    """The most entries of a selection where k are wanted: two of so many, and their numbers, cost less than 6k."""
    return 4 * k // 3


def _limited(select: Select, k: int) -> Select:
    """A selection that falls back to the k largest of what it has found, if that is far too much."""

    def limited(accumulated: Accumulator, parts: Sequence[Part]) -> Tensor:
        positions = select(accumulated, parts)
        if positions.numel() <= _most(k):
            return positions
        return positions[top_k(sparse.gather(accumulated.values, positions), k)]

    return limited


def _shares(counts: Sequence[int], room: int) -> list[int]:
    """What each may send so that all together send about as much as there is room for: in proportion, rounded up."""
    total = sum(counts)
    return list(counts) if total <= room else [-(-count * room // total) for count in counts]


def _reevaluate(region: Region, k: int, state: OkTopkState) -> Program[SparseVector]:
    """The k largest of all sums, found exactly; the smallest of them is the new threshold."""
    yield Phase.SELECT
    union = yield from region.nonzero().gathered()
    yield Phase.SELECT
    largest = union.largest(k)
    state.threshold = _threshold_of(largest, k)
    return largest


def _threshold_of(largest: SparseVector, k: int) -> float:
    # With fewer than k sums to choose from, the smallest of them says nothing about the next step.
    return smallest_magnitude(largest.values) if len(largest) == k else 0.0


def _borders_cost(workers: int) -> Cost:
    return Cost(Bounds.exactly(2 * log2_ceil(workers)), Bounds.exactly(swap_words(workers) + workers - 1))


def _gather_cost(workers: int, sums: int) -> Cost:
    """Of blocks of any sizes, which are gathered, too; in no round is one of them sent twice."""
    rounds = log2_ceil(workers)
    return Cost(Bounds.exactly(2 * rounds), Bounds(workers - 1, workers - 1 + 2 * rounds * sums))


def _select_cost(workers: int, sums: int) -> Cost:
    """Of one count, and blocks that may be made equal first, or of two counts and blocks as they are."""
    rounds = log2_ceil(workers)
    longest = max(2 * rounds * sums, 2 * sums + 2 * (workers - 1) * -(-sums // workers))
    return Cost(
        Bounds(2 * rounds, 2 * rounds + max(rounds, workers > 1)),
        Bounds(workers - 1, 2 * (workers - 1) + longest),
    )
