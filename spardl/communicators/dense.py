"""Dense all-reduce, written as a program: counted round by round, the same bits in every cluster.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005:
pairwise exchange for the reduce-scatter, ring for the all-gather; each P-1 rounds and n(P-1)/P words per worker, as
many as the all-reduce of Patarasuk and Yuan (JPDC 2009) around a ring. There, the order in which an entry's summands
are added depends on where in the vector it is; here it is always that of the ranks, so a gradient has the same
average to the last bit however it is cut into groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.communicators.base import DenseCommunicator
from spardl.protocol.programs import Boundary, Bounds, Cost, Exchange, Phase, Program, Receive, Send, Worker, whole_team

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(DenseCommunicator):
    """Sums dense vectors: worker r adds up chunk r, then all chunks go around a ring."""

    name = "dense"

    @property
    def splits(self) -> bool:
        """Reduce-scatter, then all-gather."""
        return True

    def total_cost(self, workers: int, length: int) -> Cost:
        """Each worker sends all chunks but one, twice; chunks differ by one entry where P does not divide n."""
        return Cost.total(self.half_total_costs(workers, length))

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """Once before the boundary, once after it."""
        low, high = (length - chunk for chunk in (-(-length // workers), length // workers))
        half = Cost(Bounds.exactly(workers - 1), Bounds(low, high))
        return half, half

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Reduce-scatter, then all-gather, in place."""
        chunks = list(tensor.tensor_split(worker.size))
        yield Phase.MERGE
        yield Boundary((yield from _reduce_scatter(worker, chunks)))
        yield from _all_gather(worker, chunks)
        return tensor


def _reduce_scatter(worker: Worker, chunks: list[Tensor]) -> Program[Tensor]:
    """Sends every chunk straight to its owner, who adds up what arrives in the order of the ranks."""
    team, own = whole_team(worker), chunks[worker.rank]
    parts = {worker.rank: own}
    for distance in range(1, team.size):
        outgoing, source = chunks[team.at(distance)], team.rank(-distance)
        (parts[source],) = yield Exchange(
            sends=[Send(team.rank(distance), outgoing, outgoing.numel())],
            receives=[Receive(source, own.numel(), own.dtype)],
        )
    total = parts[0]
    for rank in range(1, team.size):
        total.add_(parts[rank])
    return own if total is own else own.copy_(total)


def _all_gather(worker: Worker, chunks: list[Tensor]) -> Program[None]:
    """Every worker hands on what it got last, until each chunk has been everywhere."""
    team = whole_team(worker)
    for step in range(team.size - 1):
        outgoing, incoming = chunks[team.at(-step)], chunks[team.at(-step - 1)]
        yield Exchange(
            sends=[Send(team.rank(1), outgoing, outgoing.numel())],
            receives=[Receive(team.rank(-1), incoming.numel(), incoming.dtype, incoming)],
        )
