"""The backend's own dense all-reduce (gloo, NCCL, MPI): the fastest dense sum on a given installation.

Source: the collectives of torch.distributed. Their order of additions is the backend's, so it need not agree to the
last bit with the simulated cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.basics.checks import check_flag
from spardl.communicators.base import DenseCommunicator
from spardl.protocol.programs import AllGather, AllReduce, Boundary, Bounds, Cost, Program, ReduceScatter, Worker

__all__ = ["Backend"]


@dataclass(frozen=True)
class Backend(DenseCommunicator):
    """Hands the dense vector to ``torch.distributed``.

    Args:
        halves: as a reduce-scatter and an all-gather, between which other work can be done (schedule=dear), instead
            of one all-reduce. For NCCL: gloo's reduce-scatter moves as many bytes as a whole all-reduce.

    Raises:
        ConfigError: if ``halves`` is neither true nor false.
    """

    halves: bool = False

    name = "backend"

    def __post_init__(self) -> None:
        check_flag("communicator.halves", self.halves)

    @property
    def splits(self) -> bool:
        """As configured."""
        return self.halves

    def total_cost(self, workers: int, length: int) -> Cost:
        """Of a bandwidth-optimal all-reduce; what the backend really does is its own."""
        if self.halves:
            return Cost.total(self.half_total_costs(workers, length))
        words = 2 * length * (workers - 1) // workers
        return Cost(Bounds.exactly(2 * (workers - 1)), Bounds.exactly(words))

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """Of bandwidth-optimal halves."""
        half = Cost(Bounds.exactly(workers - 1), Bounds.exactly(length * (workers - 1) // workers))
        return half, half

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """One collective call, or two, in place."""
        if not self.halves:
            if worker.size > 1:
                yield AllReduce(tensor)
            return tensor
        chunk = tensor.tensor_split(worker.size)[worker.rank]
        if worker.size > 1:
            arrived = yield ReduceScatter(tensor)
            chunk.copy_(arrived[0])
        yield Boundary(chunk)
        if worker.size > 1:
            yield AllGather(tensor)
        return tensor
