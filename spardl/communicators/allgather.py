"""TopkA: every worker gathers every worker's sparse vector and adds them up.

Source: the all-gather baseline of Renggli et al., SparCML, SC 2019, and of Li and Hoefler, Ok-Topk, PPoPP
2022. ceil(log2 P) rounds and 2k(P-1) words per worker; the sum has up to kP entries, and nothing is dropped
on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from spardl.accumulator import Accumulator
from spardl.communicators.base import Communicator, Sum
from spardl.communicators.transfer import all_gather_sparse
from spardl.compressors.base import Output, SparseCompressor
from spardl.packing import Slot
from spardl.programs import Phase, Program, Worker, whole_team
from spardl.sparse import merge
from spardl.state import State

__all__ = ["AllGather"]


@dataclass(frozen=True)
class AllGather(Communicator[SparseCompressor]):
    """Sums sparse vectors by gathering all of them."""

    name = "allgather"
    sums = frozenset({Output.SPARSE})

    def reduce(
        self,
        worker: Worker,
        accumulated: Accumulator,
        compressor: SparseCompressor,
        compression: State,
        state: State,
    ) -> Program[Sum]:
        """Select, gather, add up by rank."""
        yield Phase.SELECT
        length = accumulated.values.numel()
        k = compressor.count(length)
        own = accumulated.take(0, length, k, compressor.selector(compression))
        gathered = yield from all_gather_sparse(whole_team(worker), own, [Slot(k, length)] * worker.size)
        return merge(gathered)
