"""Dense all-reduce of the torch.distributed backend (gloo, NCCL, MPI), usually the fastest dense sum.

Source: the collectives of torch.distributed. The backend chooses the order of additions, so results may differ in the
last bit from the simulated cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.basics.checks import check_bool
from spardl.communicators.base import DenseCommunicator
from spardl.protocol.programs import AllGather, AllReduce, Boundary, Bounds, Cost, Program, ReduceScatter, Worker

__all__ = ["Backend"]


@dataclass(frozen=True)
class Backend(DenseCommunicator):
    """Sums dense vectors with the collectives of ``torch.distributed``.

    Args:
        halves: Whether to run a reduce-scatter and an all-gather instead of one all-reduce, so that ``schedule=dear``
            can compute between them. Use it with NCCL: the reduce-scatter of gloo sends as many bytes as an all-reduce.

    Raises:
        ConfigError: If ``halves`` is not a boolean.
    """

    halves: bool = False

    name = "backend"
    collective = True

    def __post_init__(self) -> None:
        check_bool("communicator.halves", self.halves)

    @property
    def splits(self) -> bool:
        """Whether a sum can pause between its reduce-scatter and its all-gather: the value of ``halves``."""
        return self.halves

    def total_cost(self, workers: int, length: int) -> Cost:
        """Returns the cost of a bandwidth-optimal all-reduce; the algorithm of the backend may differ."""
        if self.halves:
            return Cost.total(self.half_total_costs(workers, length))
        words = 2 * length * (workers - 1) // workers
        return Cost(Bounds.exactly(2 * (workers - 1)), Bounds.exactly(words))

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """Returns the costs of a bandwidth-optimal reduce-scatter and all-gather."""
        half = Cost(Bounds.exactly(workers - 1), Bounds.exactly(length * (workers - 1) // workers))
        return half, half

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Sums ``tensor`` in place, with one or two collective calls."""
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
