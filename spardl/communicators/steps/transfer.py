"""Sparse blocks on their way between workers: packed, exchanged and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.communicators.steps.bruck import all_gather, all_gather_around
from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.messages import Form
from spardl.vector.packing import Slot, message_words
from spardl.vector.sparse import SparseVector

__all__ = ["Courier", "all_gather_counts"]


class Courier(NamedTuple):
    """Carries sparse vectors.

    Attributes:
        form: of its messages.
    """

    form: Form

    @classmethod
    def of(cls, accumulated: Accumulator) -> Courier:
        """For what is taken out of a worker's vector, ``accumulated``."""
        return cls(accumulated.form)

    def send(self, to: int, vector: SparseVector, slot: Slot) -> Send:
        """One message, packed.

        Args:
            to: rank of the receiver.
            vector: fits the slot; its values are what rounding made of them, see ``Wire.rounded``.
            slot: the room; the receiver must know the same.

        Returns:
            The message, for an ``Exchange``.
        """
        return Send(to, self.form.pack(vector, slot), message_words(slot))

    def receive(self, source: int, slot: Slot) -> Receive:
        """What the rank ``source`` sends with an equal ``slot``, at the other end."""
        return Receive(source, self.form.size(slot), torch.uint8)

    def open(self, message: Tensor, slot: Slot) -> SparseVector:
        """The vector in a message that arrived.

        Args:
            message: uint8, shape (form.size(slot),).
            slot: its room.

        Returns:
            Values of the type in memory.
        """
        return self.form.open(message, [slot])

    def exchange(self, to: int, vector: SparseVector, slot: Slot, source: int, coming: Slot) -> Program[SparseVector]:
        """Sends one vector to one worker, and receives another from one.

        Args:
            to: rank of the receiver.
            vector: what is sent.
            slot: its room.
            source: rank of the sender of what is received.
            coming: the room of what is received.

        Returns:
            What was received.
        """
        yield Phase.PACK
        (message,) = yield Exchange([self.send(to, vector, slot)], [self.receive(source, coming)])
        received = self.open(message, coming)
        yield Phase.MERGE
        return received

    def all_gather(self, team: Team, block: SparseVector, slots: Sequence[Slot]) -> Program[list[SparseVector]]:
        """Gives every member the sparse blocks of all members.

        Args:
            team: who takes part.
            block: this member's; fits ``slots[team.position]``.
            slots: the room of each member's block, by position.

        Returns:
            The blocks, by position in the team.
        """
        yield Phase.PACK
        gathered = yield from all_gather(team, *self._packed(block, slots, team.position))
        blocks = [self.open(message, slot) for message, slot in zip(gathered, slots, strict=True)]
        yield Phase.MERGE
        return blocks

    def all_gather_joined(self, team: Team, block: SparseVector, slots: Sequence[Slot]) -> Program[SparseVector]:
        """Gives every member the sparse blocks of all members, as one vector.

        Args:
            team: who takes part.
            block: this member's; fits ``slots[team.position]``.
            slots: the room of each member's block, by position.

        Returns:
            The blocks end to end, by position in the team.
        """
        yield Phase.PACK
        message, sizes, words = self._packed(block, slots, team.position)
        around = yield from all_gather_around(team, message, sizes, words)
        # From this member's block on, and then those of the members before it; read at once where they are turned back.
        turn = sum(sizes[team.position :])
        joined = self.form.open(torch.cat((around[turn:], around[:turn])) if team.position else around, slots)
        yield Phase.MERGE
        return joined

    def _packed(
        self, block: SparseVector, slots: Sequence[Slot], position: int
    ) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """This member's message, and the sizes of all, in bytes and in words."""
        return self.form.pack(block, slots[position]), *_sizes(self.form, tuple(slots))

    def slots_of(self, team: Team, block: SparseVector, lengths: Sequence[int]) -> Program[list[Slot]]:
        """Tells all members how many entries each one's block has: its room, for a gather.

        Args:
            team: who takes part.
            block: this member's.
            lengths: length of each member's block, by position.

        Returns:
            The room of each member's block, by position.
        """
        counts = yield from all_gather_counts(team, [len(block)], block.indices.device)
        return [Slot(count, length) for (count,), length in zip(counts, lengths, strict=True)]


@lru_cache(maxsize=256)
def _sizes(form: Form, slots: tuple[Slot, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of messages, in bytes and in words: once for all workers that a process plays."""
    return tuple(map(form.size, slots)), tuple(map(message_words, slots))


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
