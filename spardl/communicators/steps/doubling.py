"""Recursive doubling of sparse blocks; every round cuts the sum to its largest entries.

Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks, ICDCS 2019, for a whole vector; Zhao et al., SparDL, ICDE 2024, R-SAG, for one block. Among m members, a power
of two, with blocks of at most c entries: log2 m rounds and 2c log2 m words per member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spardl.communicators.steps.transfer import BlockExchange
from spardl.protocol.programs import Program, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.norms import host_reads
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, merge, merge_padded, top_padded

__all__ = ["Target", "recursive_doubling"]


class Target(NamedTuple):
    """A range of the vector that is summed over workers; each worker contributes one sparse block (its entries there).

    Attributes:
        accumulated: Vector of this worker (gradient plus residual).
        start: First position of the range.
        slot: Length of the range, and the maximum number of entries in a sum.
        full: Whether every block has this maximum number of entries.
    """

    accumulated: Accumulator
    start: int
    slot: Slot
    full: bool = False

    @property
    def transport(self) -> BlockExchange:
        """Exchange that sends and receives the blocks."""
        return BlockExchange.of(self.accumulated, full=self.full)

    def add_up(self, blocks: Sequence[SparseVector], holders: int) -> SparseVector:
        """Returns the largest entries of the sum of two blocks, rounded to the wire format.

        This worker's share of the dropped entries and of the rounding errors is added to its vector.

        Args:
            blocks: Two blocks, both of the length of the range.
            holders: Number of workers that compute the same sum and share its dropped entries; a power of two, so that
                the division is exact.
        """
        if self.full and not host_reads(blocks[0].values):
            kept, dropped = top_padded(merge_padded(blocks), self.slot.capacity)
        else:
            kept, dropped = merge(blocks).top(self.slot.capacity)
        self.accumulated.add(self.start, dropped.divided(holders))
        return self.accumulated.rounded(self.start, kept, holders)


def recursive_doubling(team: Team, own: SparseVector, target: Target) -> Program[SparseVector]:
    """Sums one block of each member and cuts the sum in every round.

    After round j, 2^(j+1) members hold the same sum and have dropped the same entries.

    Args:
        team: Members in a fixed order; a power of two.
        own: Block of this member; fits the slot of ``target``.
        target: Range of the vector that holds the block.

    Returns:
        The sum, bit-identical on all members.
    """
    merged, transport = own, target.transport
    for level in range((team.size - 1).bit_length()):
        partner = team.members[team.position ^ (1 << level)]
        arrived = yield from transport.exchange(partner, merged, target.slot, partner, target.slot)
        # The partner adds the same two summands in the other order: floating-point addition is commutative.
        merged = target.add_up([merged, arrived], holders=2 << level)
    return merged
