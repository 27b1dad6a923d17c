"""TopkDSA: each worker sums one region of the gradient, then an all-gather distributes the sums, sparse or dense.

Source: Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning, SC 2019 (dynamic sparse
all-reduce: split, then all-gather); the baseline of this name in Li and Hoefler, Ok-Topk, PPoPP 2022. No partial sum
is cut. Per worker and synchronization, with L = ceil(log2 P), for entries that are spread evenly over the regions and
a sum of u entries:

====================  =================  ==================================================
stage                 rounds             words
====================  =================  ==================================================
counts to owners      L                  number of set bits in 1 ... P-1
entries to owners     (P-1)/bucket       2k(P-1)/P
counts to all         L                  P-1
sums to all           L                  2u(P-1)/P sparse, n(P-1)/P dense
====================  =================  ==================================================

Without counts, the words range from 4k(P-1)/P (all workers choose the same entries: u = k) to (2k+n)(P-1)/P. A
worker whose region holds more entries than average sends more: an all-gather in L rounds sends its own region L times;
the mean over all workers is as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from spardl.basics.checks import check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.split import equal_regions, split_and_reduce, split_cost
from spardl.communicators.steps.transfer import BlockExchange, all_gather
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
    whole_team,
)
from spardl.vector.sparse import SparseVector, Sum
from spardl.vector.wire import Wire

__all__ = ["METHODS", "TopkDSA"]

METHODS = (Combination("topkdsa", compressor="topk", communicator="topkdsa", residual="local", momentum="auto"),)


@dataclass(frozen=True)
class TopkDSA(Communicator[SparseCompressor, State]):
    """Sums sparse vectors region by region, and gathers the sums: in sparse format, or dense if they have many entries.

    Args:
        bucket: Number of peers that a worker sends to in one round; a larger number means fewer rounds, but the same
            number of messages.
        dense_above: Regions are sent dense if the sum has more than this share of all entries. 1/2 minimizes the words
            sent; the published baseline uses 1/3.

    Raises:
        ConfigError: If a value is out of range.
    """

    bucket: int = 4
    dense_above: float = 1 / 3

    name = "topkdsa"
    sums = frozenset({Output.AT_MOST_K, Output.ABOUT_K, Output.ANY_COUNT})

    def __post_init__(self) -> None:
        check_integer("communicator.bucket", self.bucket, least=1)
        if not is_number(float, self.dense_above) or not 0 <= self.dense_above <= 1:
            raise ConfigError(f"communicator.dense_above must be a number from 0 to 1, got {self.dense_above!r}")

    @property
    def splits(self) -> bool:
        """True: a sum can pause after each region is summed, before the all-gather."""
        return True

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns the exact number of rounds, and bounds of the words.

        The lower bound is for an empty selection, the upper one for the worst distribution over the regions.
        """
        return Cost.total(self.half_costs(context, compressor))

    def half_costs(self, context: Context, compressor: SparseCompressor) -> tuple[Cost, Cost]:
        """Returns the cost of ``split_and_reduce``, and the total cost of the all-gathers of counts and sums."""
        workers, length = context.worker.size, context.layout.length
        others, levels = workers - 1, log2_ceil(workers)
        capacity = compressor.capacity(context)
        most = length if capacity is None else capacity
        split = split_cost(workers, min(most, others * -(-length // workers)), self.bucket)
        gathered = self._gathered(min(length, most * workers), length, workers) if others else 0
        return split, Cost(Bounds.exactly(2 * levels), Bounds(others, others + gathered))

    def _gathered(self, union: int, length: int, workers: int) -> int:
        """Returns the maximum number of words that a worker sends to gather sums of at most ``union`` entries."""
        region = -(-length // workers)
        sparse = min(union, int(self.dense_above * length))
        dense = (workers - 1) * region if union > self.dense_above * length else 0
        return max(dense, min(2 * sparse * log2_ceil(workers), 2 * (workers - 1) * region))

    def reduce(self, sync: Synchronization[SparseCompressor, State]) -> Program[Sum]:
        """Selects entries, sums each region at its owner, and gathers the sums."""
        yield Phase.SELECT
        context, accumulated, compressor = sync.context, sync.accumulated, sync.compressor
        length, team = accumulated.values.numel(), whole_team(context.worker)
        own = accumulated.take([compressor.whole(context)], compressor.selector(context, sync.compression))
        transport = BlockExchange.of(accumulated)
        borders = equal_regions(length, team.size)
        region = yield from split_and_reduce(team, own, borders, self.bucket, transport)
        start = borders[team.position]
        # Round before the boundary: the owner must use the same values as the workers that receive the region.
        region = accumulated.rounded(start, region)
        yield Boundary(SparseVector(region.indices + start, region.values, length))
        lengths = [stop - start for start, stop in pairwise(borders)]
        slots = yield from transport.slots_of(team, region, lengths)
        # All workers know all counts, so all of them choose the same format.
        if sum(slot.capacity for slot in slots) > self.dense_above * length:
            return (yield from _gather_dense(team, region, lengths, accumulated.wire))
        return (yield from transport.all_gather_joined(team, region, slots))


def _gather_dense(team: Team, region: SparseVector, lengths: Sequence[int], wire: Wire) -> Program[SparseVector]:
    """Gathers the regions as dense tensors."""
    yield Phase.PACK
    own = region.values.dtype
    gathered = yield from all_gather(team, region.dense().to(wire.dtype(own)), lengths, lengths)
    yield Phase.MERGE
    values = torch.cat(gathered).to(own)
    # An entry whose summands cancel is missing from this result. No mass is lost: the parts of these summands that
    # workers keep in their residuals add up to zero.
    indices = values.nonzero().squeeze(1)
    return SparseVector(indices, values[indices], values.numel())
