"""Ok-Topk: split and reduce over regions of equal load, a threshold for the sums, and a balanced all-gather.

Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022; the corrections of the
threshold follow its official code. The local threshold of the paper is the compressor ``reused_threshold``; other
sparse compressors can replace it.

Per worker at most 6k(P-1)/P words on average: 2k(P-1)/P each to split, to balance (only if blocks are unequal) and to
gather; (P-1)/bucket + 3 ceil(log2 P) rounds, plus one to balance. Counts, which the paper omits, add at most
(P/2) ceil(log2 P) + P-1 words. Every ``threshold_period`` steps, all non-zero sums are gathered instead of the k
largest, up to 2kP words. Every ``repartition_period`` steps, new borders cost as many words as the counts.

The paper assumes that a reused threshold selects about k entries. While residuals grow from zero, it selects several k.
This library therefore limits every selection, of a worker's entries and of the sums, to 4k/3 entries: a larger one is
cut to the k largest, where each region contributes its largest sums in proportion to its count. A
threshold that is evaluated early (``reevaluate_beyond``, also an addition) is found among 4k/3 such sums, so it can
miss one of the k largest sums in a region with more than its share of them. The residual keeps everything that is cut
or missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_integer
from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.split import (
    balance,
    equal_regions,
    joined,
    split_and_reduce,
    split_cost,
    swap_counts,
    swap_words,
)
from spardl.communicators.steps.transfer import BlockExchange, all_gather_counts
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
from spardl.vector.layout import Range
from spardl.vector.packing import Slot
from spardl.vector.selection import top_k
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["METHODS", "OkTopk", "OkTopkState", "consensus_borders"]

_OKTOPK = Combination("oktopk", compressor="reused_threshold", communicator="oktopk", residual="partial")
# The other three methods use the options of the official code for three models. They disable the early evaluation of
# thresholds, which is an addition of this library.
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
    """Values that later steps reuse, equal on all workers.

    Attributes:
        borders: Borders of the regions: int64, shape (P + 1,); empty before the first step.
        threshold: Smallest magnitude of a sum that is kept; 0 if no threshold is known.
    """

    borders: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    threshold: float = 0.0

    def rescale(self, factor: float) -> None:
        """Multiplies the threshold by ``factor``, because it scales with the gradients."""
        self.threshold *= factor


class Region(NamedTuple):
    """The summed entries in one worker's region (a range of the vector that this worker sums).

    Attributes:
        team: All workers.
        borders: Borders of all regions, as positions in the vector.
        transport: Sends and receives sparse vectors.
        entries: Summed entries of this worker's region, with indices relative to its start.
    """

    team: Team
    borders: Sequence[int]
    transport: BlockExchange
    entries: SparseVector

    @property
    def lengths(self) -> list[int]:
        """Length of each region: its number of positions in the vector."""
        return [stop - start for start, stop in pairwise(self.borders)]

    def only(self, positions: Tensor) -> Region:
        """Returns the region with only the entries numbered ``positions``: int64, shape (m,), increasing."""
        return self._replace(entries=self.entries.at(positions))

    def nonzero(self) -> Region:
        """Returns the region without the entries that are zero."""
        return self.only(self.entries.values.nonzero().squeeze(1))

    def counts(self, own: Sequence[int] | Tensor) -> Program[list[int]]:
        """Gathers one number per worker, in the order of ranks; ``own``, shape (1,), is this worker's number."""
        gathered = yield from all_gather_counts(self.team, own, self.entries.indices.device)
        return [count for (count,) in gathered]

    def gathered(self) -> Program[SparseVector]:
        """Gathers the entries of all regions as one vector; exchanges their numbers first."""
        slots = yield from self.transport.slots_of(self.team, self.entries, self.lengths)
        return (yield from self.transport.all_gather_joined(self.team, self.entries, slots))

    def in_vector(self) -> SparseVector:
        """Returns the entries of this region, with indices in the whole vector."""
        start = self.borders[self.team.position]
        return SparseVector(self.entries.indices + start, self.entries.values, self.borders[-1])


def consensus_borders(team: Team, own: SparseVector) -> Program[list[int]]:
    """Divides the vector into regions that hold about equally many entries of each member.

    Every member proposes positions that divide its own entries into equal parts. Border i is the mean of all proposals
    for it, computed by member i.

    Args:
        team: Members in a fixed order.
        own: Entries of this member.

    Returns:
        Borders of the m regions: ``m + 1`` positions from 0 to the length of the vector.
    """
    # The proposals of each member increase, so their means increase as well: borders never cross.
    proposals = yield from swap_counts(team, _proposals(own, team.size), own.indices.device)
    means = yield from all_gather_counts(team, [sum(proposals) // team.size], own.indices.device)
    return [mean for (mean,) in means] + [own.length]


def _proposals(own: SparseVector, count: int) -> list[int]:
    """Returns the starts of ``count`` ranges with equally many entries, or of equal length without entries."""
    if not len(own):
        return equal_regions(own.length, count)[:-1]
    ranks = torch.tensor(equal_regions(len(own), count)[1:-1], dtype=torch.int64, device=own.indices.device)
    return [0, *own.indices[ranks].tolist()]


@dataclass(frozen=True)
class OkTopk(Reuse, Communicator[SparseCompressor, OkTopkState]):
    """Sparse all-reduce of about the k largest sums (at most 4k/3); the other arguments are those of ``Reuse``.

    Args:
        repartition_period: Number of steps from one division into regions to the next (tau).
        threshold_period: Number of steps from one exact evaluation of the threshold to the next (tau').
        bucket: Number of peers that a worker sends to in one round, when entries are sent to the owners of their
            regions.
        balance_factor: Blocks are balanced before the all-gather if the largest exceeds the average size by this
            factor; 0 always balances them, ``None`` never.

    Raises:
        ConfigError: If a value is out of range.
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
            check_integer(f"communicator.{name}", getattr(self, name), least=1)
        if self.balance_factor is not None:
            check_number("communicator", "balance_factor", self.balance_factor, 0)

    def init_state(self) -> OkTopkState:
        """Returns a state without borders and without a threshold."""
        return OkTopkState()

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns bounds of rounds and words; if regions are balanced, the words stay far below the upper bound."""
        workers, length, k = context.worker.size, context.layout.length, compressor.count(context)
        capacity = compressor.capacity(context)
        entries = min(_selection_limit(k) if capacity is None else capacity, length)
        sums = min(length, workers * entries)
        exact = context.step % self.threshold_period == 0 or k >= length
        parts = [
            split_cost(workers, entries, self.bucket),
            # Every worker rounds its share up, so it exceeds the limit by at most one entry.
            _gather_cost(workers, sums) if exact else _select_cost(workers, min(sums, _selection_limit(k) + workers)),
        ]
        if context.step % self.repartition_period == 0:
            parts.append(_borders_cost(workers))
        return Cost.total(parts)

    def published_cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns the published upper bound of 6k(P-1)/P words, or ``cost()`` in steps that recompute thresholds.

        The bound applies to the mean over all workers if each region holds an equal share of each worker's entries. If
        k is below about 10 P, messages with counts are larger than those with entries, and so is the returned bound.
        """
        limits, k, workers = self.cost(context, compressor), compressor.count(context), context.worker.size
        if not (context.step % self.threshold_period and context.step % self.repartition_period):
            return limits
        # Two selections, two exchanges of counts (the second one up to twice), and shares that are rounded up.
        least = 4 * _selection_limit(k) * (workers - 1) // workers + swap_words(workers) + 4 * (workers - 1)
        return limits._replace(words=Bounds(0, max(6 * k * (workers - 1) // workers, least)))

    def reduce(self, sync: Synchronization[SparseCompressor, OkTopkState]) -> Program[Sum]:
        """Selects entries, sums them region by region, selects the largest sums, and gathers these."""
        context, accumulated, compressor, state = sync.context, sync.accumulated, sync.compressor, sync.state
        team, (_, length, k) = whole_team(context.worker), compressor.whole(context)
        yield Phase.SELECT
        select = _capped(compressor.selector(context, sync.compression), k)
        own = accumulated.take([compressor.whole(context)], select)
        # New borders are also needed after a change of the world size.
        if context.step % self.repartition_period == 0 or state.borders.numel() != team.size + 1:
            state.borders = torch.tensor((yield from consensus_borders(team, own)), dtype=torch.int64)
        # Slots are allocated after the exchange of counts, so they are always full.
        borders, transport = state.borders.tolist(), BlockExchange.of(accumulated, full=True)
        total = yield from split_and_reduce(team, own, borders, self.bucket, transport)
        # The owner rounds its sums before it selects, so it compares the values that all workers will receive.
        region = Region(team, borders, transport, accumulated.rounded(borders[team.position], total))
        if k >= length:
            # Density 1 must return every entry, including zeros, and needs no threshold.
            return (yield from region.gathered())
        if context.step % self.threshold_period:
            return (yield from self._select(region, k, state))
        return (yield from _reevaluate(region, k, state))

    def _select(self, region: Region, k: int, state: OkTopkState) -> Program[SparseVector]:
        """Gathers all sums above the threshold; about the k largest if these are too many or the threshold is off."""
        yield Phase.SELECT
        above = _above(region.entries.values, state.threshold)
        # The host waits for a GPU once, for the counts of all workers.
        counts = yield from region.counts(above.sum().view(1))
        kept = region.only(torch.nonzero_static(above, size=counts[region.team.position]).squeeze(1))
        # Every branch below depends only on the gathered counts and the shared state, so all workers take the same one
        # and arrive at the same threshold without another message.
        found, known = sum(counts), state.threshold > 0
        off_target, too_few = not known or self.is_astray(found, k), known and found < k
        if not off_target:
            state.threshold = self.corrected(state.threshold, found, k)
            if found <= _selection_limit(k):
                return (yield from self._gather(kept, counts))
        elif too_few:
            # Fewer than k sums reach the threshold, so use all non-zero ones.
            kept = region.nonzero()
            counts = yield from kept.counts([len(kept.entries)])
        # A threshold near the k-th largest sum needs more than k candidates, as regions contribute by their counts.
        shares = _shares(counts, _selection_limit(k) if off_target else k)
        share = kept.entries.largest(shares[region.team.position])
        # After a second exchange of counts, balancing would exceed the number of rounds in ``cost``.
        union = yield from self._gather(kept._replace(entries=share), shares, balanced=not too_few)
        yield Phase.SELECT
        largest = union.largest(k)
        if off_target:
            state.threshold = _threshold_of(largest, k)
        return largest

    def _gather(self, region: Region, counts: Sequence[int], *, balanced: bool = True) -> Program[SparseVector]:
        """Gathers the blocks of all workers; balances unequal blocks first if ``balanced``."""
        team, length = region.team, region.borders[-1]
        if not (balanced and self._is_unequal(counts)):
            slots = [Slot(*pair) for pair in zip(counts, region.lengths, strict=True)]
            return (yield from region.transport.all_gather_joined(team, region.entries, slots))
        block = yield from balance(team, region.in_vector(), counts, region.transport)
        slots = [Slot(stop - start, length) for start, stop in pairwise(equal_regions(sum(counts), team.size))]
        return joined((yield from region.transport.all_gather(team, block, slots)))

    def _is_unequal(self, counts: Sequence[int]) -> bool:
        factor, alone = self.balance_factor, len(counts) == 1
        return factor is not None and not alone and max(counts) * len(counts) > factor * sum(counts)


def _above(values: Tensor, threshold: float) -> Tensor:
    # Keep infinities, so that an overflow reaches the result, where it is detected. Never keep zeros: a threshold can
    # underflow to 0 in the dtype of the values.
    return (values.abs() >= threshold) & (values != 0)


def _selection_limit(k: int) -> int:
    # With two selections of 4k/3 entries and their counts, the cost stays below 6k words.
    return 4 * k // 3


def _capped(select: Select, k: int) -> Select:
    """Returns a selection function that cuts the result of ``select`` to the k largest entries beyond the limit."""

    def capped(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
        positions = select(accumulated, parts)
        if positions.numel() <= _selection_limit(k):
            return positions
        return positions[top_k(sparse.gather(accumulated.values, positions), k)]

    return capped


def _shares(counts: Sequence[int], limit: int) -> list[int]:
    """Returns the number of entries that each worker may send: proportional to ``counts``, about ``limit`` in total."""
    total = sum(counts)
    # Rounded up, so that the shares never add up to less than the limit.
    return list(counts) if total <= limit else [-(-count * limit // total) for count in counts]


def _reevaluate(region: Region, k: int, state: OkTopkState) -> Program[SparseVector]:
    """Gathers all sums, returns the k largest, and takes the smallest of these as the new threshold."""
    yield Phase.SELECT
    union = yield from region.nonzero().gathered()
    yield Phase.SELECT
    largest = union.largest(k)
    state.threshold = _threshold_of(largest, k)
    return largest


def _threshold_of(largest: SparseVector, k: int) -> float:
    # The smallest of fewer than k sums says nothing about the k-th largest sum of the next step.
    return smallest_magnitude(largest.values) if len(largest) == k else 0.0


def _borders_cost(workers: int) -> Cost:
    return Cost(Bounds.exactly(2 * log2_ceil(workers)), Bounds.exactly(swap_words(workers) + workers - 1))


def _gather_cost(workers: int, sums: int) -> Cost:
    """Returns bounds of the cost to gather blocks of any sizes, and their counts."""
    # No round sends a block twice, so a worker sends at most all sums in each of them.
    rounds = log2_ceil(workers)
    return Cost(Bounds.exactly(2 * rounds), Bounds(workers - 1, workers - 1 + 2 * rounds * sums))


def _select_cost(workers: int, sums: int) -> Cost:
    """Returns bounds: one exchange of counts and balanced blocks, or two exchanges and unbalanced blocks."""
    rounds = log2_ceil(workers)
    longest = max(2 * rounds * sums, 2 * sums + 2 * (workers - 1) * -(-sums // workers))
    return Cost(
        Bounds(2 * rounds, 2 * rounds + max(rounds, workers > 1)),
        Bounds(workers - 1, 2 * (workers - 1) + longest),
    )
