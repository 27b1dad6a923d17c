"""Recursive doubling of sparse blocks, cut to their largest entries after every round.

Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks, ICDCS 2019, for a whole vector; Zhao et al., SparDL, ICDE 2024, R-SAG, for one block. Among m members, a power
of two, with blocks of at most c entries: log2 m rounds and 2c log2 m words per member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spardl.communicators.steps.transfer import Courier
from spardl.protocol.programs import Program, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, merge

__all__ = ["Target", "recursive_doubling"]


class Target(NamedTuple):
    """A range of one worker's vector, whose blocks are added up over workers.

    Attributes:
        accumulated: this worker's vector.
        start: first position of the range.
        slot: length of the range, and how many entries of it a sum may hold.
    """

    accumulated: Accumulator
    start: int
    slot: Slot

    def add_up(self, blocks: Sequence[SparseVector], holders: int) -> SparseVector:
        """The largest entries of a sum of blocks; the vector gets this worker's share of the others.

        Args:
            blocks: at least one, each of the range's length.
            holders: workers that add up the same blocks. A power of two loses no bit of the share.
        """
        kept, dropped = merge(blocks).top(self.slot.capacity)
        self.accumulated.add(self.start, dropped.divided(holders))
        return self.accumulated.rounded(self.start, kept, holders)


def recursive_doubling(team: Team, own: SparseVector, target: Target) -> Program[SparseVector]:
    """Adds up one block of each member, cutting the sum in every round.

    After round j, 2^(j+1) members hold the same sum and drop the same entries.

    Args:
        team: who takes part; a power of two.
        own: this member's block; fits the target's slot.
        target: where the block lies.

    Returns:
        The sum, bit-identical at all members.
    """
    merged, courier = own, Courier.of(target.accumulated)
    for level in range((team.size - 1).bit_length()):
        partner = team.members[team.position ^ (1 << level)]
        arrived = yield from courier.exchange(partner, merged, target.slot, partner, target.slot)
        # Two summands are added up to the same bits in either order.
        merged = target.add_up([merged, arrived], holders=2 << level)
    return merged
