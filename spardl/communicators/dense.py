"""Dense all-reduce of point-to-point messages, so that rounds are counted and all clusters compute the same bits.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005:
pairwise exchange for the reduce-scatter, ring for the all-gather. Each half takes P-1 rounds and n(P-1)/P words per
worker, as in the ring all-reduce of Patarasuk and Yuan (JPDC 2009). In a ring, the order of additions depends on the
position of an entry. Here it is always the order of ranks, so averages are bit-identical for every division into
buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.communicators.base import DenseCommunicator
from spardl.protocol.programs import Boundary, Bounds, Cost, Exchange, Phase, Program, Receive, Send, Worker, whole_team

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(DenseCommunicator):
    """Sums dense vectors: worker r sums chunk r, then the sums are passed around a ring."""

    name = "dense"

    @property
    def splits(self) -> bool:
        """True: a sum can pause between its reduce-scatter and its all-gather."""
        return True

    def total_cost(self, workers: int, length: int) -> Cost:
        """Returns the cost of sending P - 1 chunks twice; chunk sizes differ by one where P does not divide n."""
        return Cost.total(self.half_total_costs(workers, length))

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """Returns the costs of the reduce-scatter and of the all-gather."""
        low, high = (length - chunk for chunk in (-(-length // workers), length // workers))
        half = Cost(Bounds.exactly(workers - 1), Bounds(low, high))
        return half, half

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Sums ``tensor`` in place, with a reduce-scatter and an all-gather."""
        chunks = list(tensor.tensor_split(worker.size))
        yield Phase.MERGE
        yield Boundary((yield from _reduce_scatter(worker, chunks)))
        yield from _all_gather(worker, chunks)
        return tensor


def _reduce_scatter(worker: Worker, chunks: list[Tensor]) -> Program[Tensor]:
    """Sends every chunk to its owner, which sums the received chunks in the order of ranks."""
    team, own = whole_team(worker), chunks[worker.rank]
    parts = {worker.rank: own}
    for distance in range(1, team.size):
        outgoing, source = chunks[team.at(distance)], team.rank(-distance)
        (parts[source],) = yield Exchange(
            sends=[Send(team.rank(distance), outgoing, outgoing.numel())],
            receives=[Receive(source, own.numel(), own.dtype)],
        )
    # Start with the chunk of rank 0: the order of additions must not depend on the owner.
    total = parts[0]
    for rank in range(1, team.size):
        total.add_(parts[rank])
    return own if total is own else own.copy_(total)


def _all_gather(worker: Worker, chunks: list[Tensor]) -> Program[None]:
    """Passes chunks around a ring until every worker has all of them."""
    team = whole_team(worker)
    for step in range(team.size - 1):
        outgoing, incoming = chunks[team.at(-step)], chunks[team.at(-step - 1)]
        yield Exchange(
            sends=[Send(team.rank(1), outgoing, outgoing.numel())],
            receives=[Receive(team.rank(-1), incoming.numel(), incoming.dtype, incoming)],
        )
