"""Two building blocks for sparse vectors: split and reduce, and the balancing of blocks.

In split and reduce, every worker sends the entries of each region straight to the worker that owns the region.

Source: Renggli et al., SparCML, SC 2019 (split phase); Li and Hoefler, Ok-Topk, PPoPP 2022, section 3 (destination
rotation, bucketing). P-1 messages per worker, 2k(P-1)/P words if regions hold equal shares of the entries. Only the
sender knows the number of entries, so counts are exchanged first: ceil(log2 P) rounds of at most P/2 words each.

Functions that return a ``Program`` are generators that request the messages of one member of a team.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spardl.communicators.steps.transfer import BlockExchange
from spardl.protocol.programs import Bounds, Cost, Exchange, Phase, Program, Receive, Send, Team, log2_ceil
from spardl.vector.bits import integers_on
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, merge

__all__ = [
    "balance",
    "cut_apart",
    "equal_regions",
    "joined",
    "split_and_reduce",
    "split_cost",
    "swap_counts",
    "swap_words",
]


def equal_regions(length: int, count: int) -> list[int]:
    """Returns the borders of ``count`` regions of nearly equal length: ``count + 1`` positions from 0 to ``length``."""
    return [region * length // count for region in range(count + 1)]


def split_and_reduce(
    team: Team, own: SparseVector, borders: Sequence[int], bucket: int, transport: BlockExchange
) -> Program[SparseVector]:
    """Sums each region of a sparse vector at its owner.

    Args:
        team: Members in a fixed order.
        own: Entries of this member.
        borders: Region i is ``[borders[i], borders[i + 1])`` and belongs to the member at position i.
        bucket: Number of peers that a member sends to in one round.
        transport: Sends and receives sparse vectors.

    Returns:
        The sum of all members' entries in this member's region, added in the order of members, with indices relative to
        the start of the region.
    """
    yield Phase.PACK
    cuts = _cuts(own, borders)
    swapped = yield from _swapped(team, cuts.diff())
    # The host waits once, for both.
    read = torch.cat([swapped, cuts]).tolist()
    counts, regions = _by_position(team, read), _between(own, borders, read[team.size :])
    length = regions[team.position].length
    parts = [regions[team.position]] * team.size
    # Destination rotation: in each round, all members send to different peers, so no receiver is a bottleneck.
    for first in range(1, team.size, bucket):
        offsets = range(first, min(first + bucket, team.size))
        slots = [Slot(counts[team.at(-offset)], length) for offset in offsets]
        arrived = yield _bucket_exchange(team, regions, offsets, slots, transport)
        for offset, slot, message in zip(offsets, slots, arrived, strict=True):
            parts[team.at(-offset)] = transport.open(message, slot)
    yield Phase.MERGE
    return merge(parts)


def split_cost(workers: int, entries: int, bucket: int) -> Cost:
    """Returns the cost of ``split_and_reduce`` for a worker with at most ``entries`` entries."""
    counts = swap_words(workers)
    rounds = log2_ceil(workers) + -(-(workers - 1) // bucket)
    return Cost(Bounds.exactly(rounds), Bounds(counts, counts + 2 * entries * (workers > 1)))


def swap_words(workers: int) -> int:
    """Returns the number of words that a member sends in ``swap_counts``."""
    # A number with distance d to its receiver is sent once per set bit of d.
    return sum(distance.bit_count() for distance in range(workers))


def _bucket_exchange(
    team: Team,
    regions: Sequence[SparseVector],
    offsets: Sequence[int],
    coming: Sequence[Slot],
    transport: BlockExchange,
) -> Exchange:
    sends = []
    for offset in offsets:
        region = regions[team.at(offset)]
        sends.append(transport.send(team.rank(offset), region, Slot(len(region), region.length)))
    receives = [transport.receive(team.rank(-offset), slot) for offset, slot in zip(offsets, coming, strict=True)]
    return Exchange(sends, receives)


def cut_apart(vector: SparseVector, borders: Sequence[int]) -> list[SparseVector]:
    """Splits a vector at increasing ``borders`` into vectors whose indices are relative to their starts."""
    return _between(vector, borders, _cuts(vector, borders).tolist())


def _cuts(vector: SparseVector, borders: Sequence[int]) -> Tensor:
    """Number of entries before each border: int64, shape (borders,)."""
    # A copy to a device that does not wait for it.
    return torch.searchsorted(vector.indices, integers_on(vector.indices.device, borders))


def _between(vector: SparseVector, borders: Sequence[int], cuts: Sequence[int]) -> list[SparseVector]:
    return [
        SparseVector(vector.indices[low:high] - start, vector.values[low:high], stop - start)
        for low, high, start, stop in zip(cuts, cuts[1:], borders, borders[1:], strict=False)
    ]


def swap_counts(team: Team, counts: Sequence[int], device: torch.device) -> Program[list[int]]:
    """Exchanges one integer per pair of members, in ceil(log2 m) rounds.

    Source: Bruck et al., IEEE TPDS 1997, the index operation.

    Args:
        team: Members in a fixed order.
        counts: Number to send to each member, by position in the team.
        device: Device of the messages.

    Returns:
        The number that each member sent to this one, by position in the team.
    """
    return _by_position(team, (yield from _swapped(team, integers_on(device, counts))).tolist())


def _swapped(team: Team, counts: Tensor) -> Program[Tensor]:
    """Swaps counts of shape (m,), by position; returns those of this member, by distance of the sender."""
    device, held = counts.device, counts.roll(-team.position)
    # Store and forward: a number with distance d to its receiver takes one hop per set bit of d.
    for level in range((team.size - 1).bit_length()):
        distances = [distance for distance in range(team.size) if distance >> level & 1]
        moving = integers_on(device, distances)
        send = Send(team.rank(1 << level), held[moving], moving.numel())
        arrived = yield Exchange([send], [Receive(team.rank(-(1 << level)), moving.numel(), torch.int64)])
        held[moving] = arrived[0]
    return held


def _by_position(team: Team, numbers: Sequence[int]) -> list[int]:
    return [numbers[(team.position - position) % team.size] for position in range(team.size)]


# Balancing: entries move between workers until all blocks hold equally many.
#
# Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
# (data balancing before the all-gather). One round; at most 2S(P-1)/P words per worker for S entries in total, since a
# worker sends only the entries outside its new block.


def balance(team: Team, own: SparseVector, counts: Sequence[int], transport: BlockExchange) -> Program[SparseVector]:
    """Redistributes the entries of all members, in the same order, into blocks with nearly equal numbers of entries.

    Args:
        team: Members in a fixed order.
        own: Entries of this member; all its indices are above those of the members before it.
        counts: Number of entries of each member, by position.
        transport: Sends and receives sparse vectors.

    Returns:
        This member's new block, a sparse vector with the ``length`` of ``own``; the numbers of entries of all blocks
        differ by at most one.
    """
    yield Phase.PACK
    # Borders of the old and of the new blocks, in entries counted over all members.
    held = list(accumulate(counts, initial=0))
    wanted = equal_regions(held[-1], team.size)
    me, first = team.position, held[team.position]
    outgoing = [_entries(own, *_overlap(held, me, wanted, other), first) for other in range(team.size)]
    slots = [_slot(_overlap(held, other, wanted, me), own.length) for other in range(team.size)]
    others = [position for position in range(team.size) if position != me]
    # Both sides compute the overlaps from the same counts, so empty messages need not be sent.
    sources = [position for position in others if slots[position].capacity]
    arrived = yield Exchange(
        [
            transport.send(team.members[position], outgoing[position], Slot(len(outgoing[position]), own.length))
            for position in others
            if len(outgoing[position])
        ],
        [transport.receive(team.members[position], slots[position]) for position in sources],
    )
    blocks = {me: outgoing[me]}
    for position, message in zip(sources, arrived, strict=True):
        blocks[position] = transport.open(message, slots[position])
    yield Phase.MERGE
    return joined([blocks[position] for position in sorted(blocks)])


def joined(vectors: Sequence[SparseVector]) -> SparseVector:
    """Returns the sum of sparse vectors of the same length, whose indices increase from each vector to the next."""
    indices, values = torch.cat([v.indices for v in vectors]), torch.cat([v.values for v in vectors])
    return SparseVector(indices, values, vectors[0].length)


def _overlap(held: Sequence[int], source: int, wanted: Sequence[int], target: int) -> tuple[int, int]:
    """Returns the range of entries, numbered over all members, that move from ``source`` to ``target``."""
    low = max(held[source], wanted[target])
    return low, max(low, min(held[source + 1], wanted[target + 1]))


def _entries(own: SparseVector, low: int, high: int, first: int) -> SparseVector:
    return SparseVector(own.indices[low - first : high - first], own.values[low - first : high - first], own.length)


def _slot(entries: tuple[int, int], length: int) -> Slot:
    return Slot(entries[1] - entries[0], length)
