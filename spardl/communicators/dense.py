"""Dense ring all-reduce, written as a program: counted round by round, the same bits in every cluster.

Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.
2(P-1) rounds and 2n(P-1)/P words per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spardl.communicators.base import DenseCommunicator
from spardl.costs import Bounds, Cost
from spardl.programs import Exchange, Phase, Program, Receive, Send, Team, Worker, whole_team

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(DenseCommunicator):
    """Sums dense vectors around a ring: every chunk visits one worker after the other."""

    name = "dense"

    def total_cost(self, workers: int, length: int) -> Cost:
        """Each worker sends all chunks but one, twice; chunks differ by one entry where P does not divide n."""
        low, high = (2 * (length - chunk) for chunk in (-(-length // workers), length // workers))
        return Cost(Bounds.exactly(2 * (workers - 1)), Bounds(low, high))

    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Reduce-scatter, then all-gather, in place; worker r ends the first half owning chunk r + 1."""
        team = whole_team(worker)
        chunks = tensor.tensor_split(team.size)
        yield Phase.MERGE
        for step in range(team.size - 1):
            arrived = yield _hand_on(team, chunks, -step)
            chunks[team.at(-step - 1)].add_(arrived[0])
        for step in range(team.size - 1):
            arrived = yield _hand_on(team, chunks, 1 - step)
            chunks[team.at(-step)].copy_(arrived[0])
        return tensor


def _hand_on(team: Team, chunks: Sequence[Tensor], offset: int) -> Exchange:
    """Sends the chunk at an offset to the next worker, and receives the one before it."""
    outgoing, incoming = chunks[team.at(offset)], chunks[team.at(offset - 1)]
    return Exchange(
        sends=[Send(team.rank(1), outgoing, outgoing.numel())],
        receives=[Receive(team.rank(-1), incoming.numel(), incoming.dtype)],
    )
