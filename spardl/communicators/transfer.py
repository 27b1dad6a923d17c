"""Sparse blocks on their way between workers: packed, exchanged and unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spardl.communicators.bruck import all_gather
from spardl.packing import Slot, message_bytes, message_words, pack, unpack
from spardl.programs import Exchange, Phase, Program, Receive, Send, Team
from spardl.sparse import SparseVector

__all__ = [
    "all_gather_counted",
    "all_gather_counts",
    "all_gather_sparse",
    "exchange_sparse",
    "receiving",
    "sending",
]


def exchange_sparse(
    to: int,
    blocks: Sequence[SparseVector],
    slots: Sequence[Slot],
    source: int,
    coming: Sequence[Slot],
    dtype: torch.dtype,
) -> Program[list[SparseVector]]:
    """Sends a bag of blocks in one message to one worker, and receives one from another.

    Args:
        to: rank of the receiver.
        blocks: what is sent.
        slots: the room of each block that is sent.
        source: rank of the sender of what is received.
        coming: the room of each block that is received.
        dtype: type of the values on the wire.

    Returns:
        The received blocks, one per slot in ``coming``.
    """
    yield Phase.PACK
    arrived = yield Exchange([sending(to, blocks, slots, dtype)], [receiving(source, coming, dtype)])
    received = unpack(arrived[0], coming, dtype)
    yield Phase.MERGE
    return received


def sending(to: int, blocks: Sequence[SparseVector], slots: Sequence[Slot], dtype: torch.dtype) -> Send:
    """One message with a bag of blocks, packed."""
    return Send(to, pack(blocks, slots, dtype), message_words(slots))


def receiving(source: int, slots: Sequence[Slot], dtype: torch.dtype) -> Receive:
    """What ``sending`` with the same slots looks like at the other end."""
    return Receive(source, message_bytes(slots, dtype), torch.uint8)


def all_gather_sparse(team: Team, block: SparseVector, slots: Sequence[Slot]) -> Program[list[SparseVector]]:
    """Gives every member the sparse blocks of all members.

    Args:
        team: who takes part.
        block: this member's; fits ``slots[team.position]``.
        slots: the room of each member's block, by position.

    Returns:
        The blocks, by position in the team.
    """
    yield Phase.PACK
    dtype = block.values.dtype
    message = pack([block], [slots[team.position]], dtype)
    sizes = [message_bytes([slot], dtype) for slot in slots]
    words = [message_words([slot]) for slot in slots]
    gathered = yield from all_gather(team, message, sizes, words)
    blocks = [unpack(part, [slot], dtype)[0] for part, slot in zip(gathered, slots, strict=True)]
    yield Phase.MERGE
    return blocks


def all_gather_counts(team: Team, counts: Sequence[int], device: torch.device) -> Program[list[list[int]]]:
    """Gives every member the whole numbers of all members: for messages whose size only the sender knows.

    Args:
        team: who takes part.
        counts: this member's; all members have as many.
        device: where messages live.

    Returns:
        The numbers, by position in the team.
    """
    sizes = [len(counts)] * team.size
    gathered = yield from all_gather(team, torch.tensor(counts, dtype=torch.int64, device=device), sizes, sizes)
    return [row.tolist() for row in gathered]


def all_gather_counted(team: Team, block: SparseVector, lengths: Sequence[int]) -> Program[list[SparseVector]]:
    """Gives every member the sparse blocks of all members, whose numbers of entries only their owners know.

    Args:
        team: who takes part.
        block: this member's.
        lengths: length of each member's block, by position.

    Returns:
        The blocks, by position in the team.
    """
    counts = yield from all_gather_counts(team, [len(block)], block.indices.device)
    slots = [Slot(count, length) for (count,), length in zip(counts, lengths, strict=True)]
    return (yield from all_gather_sparse(team, block, slots))
