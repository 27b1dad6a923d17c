"""TopkA: every worker gathers the sparse vectors of all workers and sums them.

Source: the all-gather baseline of Renggli et al., SparCML, SC 2019, and of Li and Hoefler, Ok-Topk, PPoPP
2022. ceil(log2 P) rounds and 2k(P-1) words per worker. The sum has up to kP entries, because no entry is dropped. If
the number of selected entries is not known in advance, workers first gather the counts, in ceil(log2 P) more rounds
with P-1 words in total.
"""

from __future__ import annotations

from dataclasses import dataclass

from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.transfer import BlockExchange
from spardl.compressors.base import Output, SparseCompressor
from spardl.protocol.programs import Bounds, Combination, Context, Cost, Phase, Program, State, log2_ceil, whole_team
from spardl.vector.norms import host_reads
from spardl.vector.packing import Slot
from spardl.vector.sparse import Sum, merge, merge_padded

__all__ = ["METHODS", "AllGather"]

METHODS = (Combination("topka", compressor="topk", communicator="allgather", residual="local", momentum="auto"),)


@dataclass(frozen=True)
class AllGather(Communicator[SparseCompressor, State]):
    """Sums sparse vectors with one all-gather."""

    name = "allgather"
    sums = frozenset({Output.AT_MOST_K, Output.ABOUT_K, Output.ANY_COUNT})
    sends_whole = True

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns the cost: exact if the number of entries is known in advance, otherwise bounds."""
        others, rounds = context.worker.size - 1, log2_ceil(context.worker.size)
        capacity = compressor.capacity(context)
        if capacity is None:
            most = 2 * context.layout.length * others + others
            return Cost(Bounds.exactly(2 * rounds), Bounds(others, most))
        return Cost(Bounds.exactly(rounds), Bounds.exactly(2 * capacity * others))

    def reduce(self, sync: Synchronization[SparseCompressor, State]) -> Program[Sum]:
        """Selects entries, gathers them, and sums them in the order of ranks."""
        yield Phase.SELECT
        context, compressor = sync.context, sync.compressor
        own = sync.accumulated.take([compressor.whole(context)], compressor.selector(context, sync.compression))
        team, capacity = whole_team(context.worker), compressor.capacity(context)
        transport = BlockExchange.of(sync.accumulated, full=compressor.fills)
        if capacity is None:
            # Receivers allocate their buffers in advance, so they need the counts before the entries.
            slots = yield from transport.slots_of(team, own, [own.length] * team.size)
        else:
            slots = [Slot(capacity, own.length)] * team.size
        blocks = yield from transport.all_gather(team, own, slots)
        return merge(blocks) if host_reads(own.values) or not compressor.fills else merge_padded(blocks)
