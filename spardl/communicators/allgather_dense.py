"""Dense all-gather: every worker gathers the vectors of all workers and sums them.

Source: the all-gather of Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems, IEEE TPDS 1997. ceil(log2 P) rounds and n(P-1) words per worker. It takes fewer rounds than a
ring, which suits small vectors on networks of high latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.communicators.base import DenseCommunicator
from spardl.communicators.steps.transfer import all_gather
from spardl.protocol.programs import Bounds, Cost, Phase, Program, Worker, log2_ceil, whole_team

__all__ = ["AllGatherDense"]


@dataclass(frozen=True)
class AllGatherDense(DenseCommunicator):
    """Sums dense vectors with one all-gather."""

    name = "allgather_dense"

    def total_cost(self, workers: int, length: int) -> Cost:
        """Returns the cost of sending P - 1 vectors per worker."""
        return Cost(Bounds.exactly(log2_ceil(workers)), Bounds.exactly(length * (workers - 1)))

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Gathers all vectors and sums them in the order of ranks."""
        sizes = [tensor.numel()] * worker.size
        first, *others = yield from all_gather(whole_team(worker), tensor, sizes, sizes)
        yield Phase.MERGE
        # Clone: the gathered vectors are views of one large message, which the sum must not keep alive.
        total = first.clone()
        for other in others:
            total.add_(other)
        return total
