"""The backend's own dense all-reduce (gloo, NCCL, MPI): the fastest dense sum on a given installation.

Its order of additions is the backend's, so it need not agree to the last bit with the simulated cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.communicators.base import DenseCommunicator
from spardl.costs import Bounds, Cost
from spardl.programs import AllReduce, Program, Worker

__all__ = ["Backend"]


@dataclass(frozen=True)
class Backend(DenseCommunicator):
    """Hands the dense vector to ``torch.distributed.all_reduce``."""

    name = "backend"

    def total_cost(self, workers: int, length: int) -> Cost:
        """Of a bandwidth-optimal all-reduce; what the backend really does is its own."""
        words = 2 * length * (workers - 1) // workers
        return Cost(Bounds.exactly(2 * (workers - 1)), Bounds.exactly(words))

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """One collective call, in place."""
        if worker.size > 1:
            yield AllReduce(tensor)
        return tensor
