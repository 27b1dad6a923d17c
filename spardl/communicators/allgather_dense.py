"""Dense all-gather: every worker gathers every worker's vector and adds them up.

Source: the all-gather of Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems, IEEE TPDS 1997. ceil(log2 P) rounds and n(P-1) words per worker: fewer rounds than a ring, for
small vectors on networks of high latency.
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
    """Sums dense vectors by gathering all of them."""

    name = "allgather_dense"

    def total_cost(self, workers: int, length: int) -> Cost:
        """Every worker sends as much as all others have."""
        return Cost(Bounds.exactly(log2_ceil(workers)), Bounds.exactly(length * (workers - 1)))

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Gather, add up by rank."""
        sizes = [tensor.numel()] * worker.size
        first, *others = yield from all_gather(whole_team(worker), tensor, sizes, sizes)
        yield Phase.MERGE
        # A copy, since the others' vectors share the memory of one message, which would outlive this sum.
        total = first.clone()
        for other in others:
            total.add_(other)
        return total
