"""Split and reduce: every worker sends each region's entries straight to the worker that owns the region.

Source: Renggli et al., SparCML, SC 2019 (split phase); Li and Hoefler, Ok-Topk, PPoPP 2022, section 3 (destination
rotation, bucketing). Entries travel in P-1 messages per worker, 2k(P-1)/P words where regions hold equal shares.
Their numbers travel first, since only the sender knows them: ceil(log2 P) rounds, at most P/2 words each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from spardl.communicators.steps.transfer import Courier
from spardl.protocol.programs import Bounds, Cost, Exchange, Phase, Program, Receive, Send, Team, log2_ceil
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
    """The borders of ``count`` regions of nearly equal length: ``count + 1`` positions from 0 to ``length``."""
    return [region * length // count for region in range(count + 1)]


def split_and_reduce(
    team: Team, own: SparseVector, borders: Sequence[int], bucket: int, courier: Courier
) -> Program[SparseVector]:
    """Adds up each region of a sparse vector at its owner.

    In the same round every member sends to another one (destination rotation), ``bucket`` messages at a time.

    Args:
        team: who takes part.
        own: this member's entries.
        borders: region i is ``[borders[i], borders[i + 1])`` and belongs to the member at position i.
        bucket: peers that are sent to in one round.
        courier: of sparse vectors.

    Returns:
        The sum of all members' entries in this member's region, added up by position; indices are local to the region.
    """
    yield Phase.PACK
    regions = cut_apart(own, borders)
    counts = yield from swap_counts(team, [len(region) for region in regions], own.indices.device)
    length = regions[team.position].length
    parts = [regions[team.position]] * team.size
    for first in range(1, team.size, bucket):
        offsets = range(first, min(first + bucket, team.size))
        slots = [Slot(counts[team.at(-offset)], length) for offset in offsets]
        arrived = yield _bucket_exchange(team, regions, offsets, slots, courier)
        for offset, slot, message in zip(offsets, slots, arrived, strict=True):
            parts[team.at(-offset)] = courier.open(message, slot)
    yield Phase.MERGE
    return merge(parts)


def split_cost(workers: int, entries: int, bucket: int) -> Cost:
    """What ``split_and_reduce`` costs a worker that has at most so many entries."""
    counts = swap_words(workers)
    rounds = log2_ceil(workers) + -(-(workers - 1) // bucket)
    return Cost(Bounds.exactly(rounds), Bounds(counts, counts + 2 * entries * (workers > 1)))


def swap_words(workers: int) -> int:
    """Words of ``swap_counts``: what travels d places is sent once per binary digit of d that is set."""
    return sum(distance.bit_count() for distance in range(workers))


def _bucket_exchange(
    team: Team, regions: Sequence[SparseVector], offsets: Sequence[int], coming: Sequence[Slot], courier: Courier
) -> Exchange:
    sends = []
    for offset in offsets:
        region = regions[team.at(offset)]
        sends.append(courier.send(team.rank(offset), region, Slot(len(region), region.length)))
    receives = [courier.receive(team.rank(-offset), slot) for offset, slot in zip(offsets, coming, strict=True)]
    return Exchange(sends, receives)


def cut_apart(vector: SparseVector, borders: Sequence[int]) -> list[SparseVector]:
    """The parts of a vector between borders that increase, each with indices of its own."""
    cuts = torch.searchsorted(vector.indices, torch.tensor(borders, device=vector.indices.device)).tolist()
    return [
        SparseVector(vector.indices[low:high] - start, vector.values[low:high], stop - start)
        for low, high, start, stop in zip(cuts, cuts[1:], borders, borders[1:], strict=False)
    ]


def swap_counts(team: Team, counts: Sequence[int], device: torch.device) -> Program[list[int]]:
    """An all-to-all of one whole number per pair, in ceil(log2 m) rounds.

    Source: Bruck et al., IEEE TPDS 1997, the index operation: what must travel d places travels by the binary digits
    of d.

    Args:
        team: who takes part.
        counts: for each member, by position, the number it shall get from this one.
        device: where messages live.

    Returns:
        The number that each member, by position, had for this one.
    """
    held = torch.tensor([counts[team.at(offset)] for offset in range(team.size)], dtype=torch.int64, device=device)
    distances = torch.arange(team.size, device=device)
    for level in range((team.size - 1).bit_length()):
        moving = (distances >> level & 1).nonzero().squeeze(1)
        send = Send(team.rank(1 << level), held[moving], moving.numel())
        arrived = yield Exchange([send], [Receive(team.rank(-(1 << level)), moving.numel(), torch.int64)])
        held[moving] = arrived[0]
    numbers = held.tolist()
    return [numbers[(team.position - position) % team.size] for position in range(team.size)]


# Equal blocks out of unequal ones: entries move between workers until each holds as many as the others.
#
# Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
# (data balancing before the all-gather). One round; at most 2S(P-1)/P words per worker, S being the number of all
# entries: a worker sends only what lies outside its new block.


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
