"""Equal blocks out of unequal ones: entries move between workers until each holds as many as the others.

Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
(data balancing before the all-gather). One round; at most 2S(P-1)/P words per worker, S being the number of all
entries: a worker sends only what lies outside its new block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from spardl.communicators.steps.split import equal_regions
from spardl.communicators.steps.transfer import Courier
from spardl.protocol.programs import Exchange, Phase, Program, Team
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector

__all__ = ["balance", "joined"]


def balance(team: Team, own: SparseVector, counts: Sequence[int], courier: Courier) -> Program[SparseVector]:
    """Deals the entries of all members out anew, in the same order, in nearly equal blocks.

    Args:
        team: who takes part.
        own: this member's entries; all its indices are above those of the members before it.
        counts: how many entries each member has, by position.
        courier: of sparse vectors.

    Returns:
        This member's new block, of the same length as ``own``; the members' blocks differ by at most one entry.
    """
    yield Phase.PACK
    held = list(accumulate(counts, initial=0))
    wanted = equal_regions(held[-1], team.size)
    me, first = team.position, held[team.position]
    pieces = [_piece(own, *_overlap(held, me, wanted, other), first) for other in range(team.size)]
    slots = [_slot(_overlap(held, other, wanted, me), own.length) for other in range(team.size)]
    others = [position for position in range(team.size) if position != me]
    sources = [position for position in others if slots[position].capacity]
    arrived = yield Exchange(
        [
            courier.send(team.members[position], pieces[position], Slot(len(pieces[position]), own.length))
            for position in others
            if len(pieces[position])
        ],
        [courier.receive(team.members[position], slots[position]) for position in sources],
    )
    blocks = {me: pieces[me]}
    for position, message in zip(sources, arrived, strict=True):
        blocks[position] = courier.open(message, slots[position])
    yield Phase.MERGE
    return joined([blocks[position] for position in sorted(blocks)])


def joined(vectors: Sequence[SparseVector]) -> SparseVector:
    """One vector of the entries of several of the same length, each of which ends before the next begins."""
    indices, values = torch.cat([v.indices for v in vectors]), torch.cat([v.values for v in vectors])
    return SparseVector(indices, values, vectors[0].length)


def _overlap(held: Sequence[int], source: int, wanted: Sequence[int], target: int) -> tuple[int, int]:
    """Which entries, counted over all members, are one member's now and another's then."""
    low = max(held[source], wanted[target])
    return low, max(low, min(held[source + 1], wanted[target + 1]))


def _piece(own: SparseVector, low: int, high: int, first: int) -> SparseVector:
    return SparseVector(own.indices[low - first : high - first], own.values[low - first : high - first], own.length)


def _slot(span: tuple[int, int], length: int) -> Slot:
    return Slot(span[1] - span[0], length)
