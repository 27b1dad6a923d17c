"""Sparse blocks on their way between workers: packed, exchanged and unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.packing import Slot, message_words
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Form

__all__ = ["Courier", "Use", "all_gather", "all_gather_around", "all_gather_counts"]


# All-gather in ceil(log2 m) rounds for any number of workers.
#
# Source: Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, IEEE
# TPDS 1997.


Use: TypeAlias = Callable[[int, Tensor], None]
"""Is told the position of a member, and its item, shape (m,)."""


def all_gather(team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int]) -> Program[list[Tensor]]:
    """Gives every member the items of all members.

    Args:
        team: who takes part.
        item: this member's, shape (m,).
        sizes: number of elements of each member's item, by position.
        words: the same in the papers' unit.

    Returns:
        The items, shape (sizes[position],) each, by position in the team.
    """
    around = yield from all_gather_around(team, item, sizes, words)
    held = around.split([sizes[team.at(j)] for j in range(team.size)])
    return [held[(position - team.position) % team.size] for position in range(team.size)]


def all_gather_around(
    team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int], use: Use | None = None
) -> Program[Tensor]:
    """The same; all items end to end, this member's first, then those of the members after it, counted around.

    In the round with distance g a member holds the items of itself and the g - 1 members after it, and sends as many
    of them as are missing g places before it. What arrives is received where it belongs.

    Args:
        team: who takes part.
        item: this member's, shape (m,).
        sizes: number of elements of each member's item, by position.
        words: the same in the papers' unit.
        use: is told each item once, this member's first: all but the last ones while others are under way.

    Returns:
        Shape (sum of sizes,).
    """
    ends, words_to = _Around(sizes, team.position), _Around(words, team.position)
    around = item.new_empty(ends.at(team.size))
    around[: ends.at(1)] = item

    def tell(start: int, stop: int) -> None:
        if use is not None:
            for j in range(start, stop):
                use(team.at(j), around[ends.at(j) : ends.at(j + 1)])

    told, gap = 0, 1
    while gap < team.size:
        count = min(gap, team.size - gap)
        outgoing, incoming = around[: ends.at(count)], around[ends.at(gap) : ends.at(gap + count)]
        yield Exchange(
            sends=[Send(team.rank(-gap), outgoing, words_to.at(count))],
            receives=[Receive(team.rank(gap), incoming.numel(), item.dtype, incoming)],
            meanwhile=partial(tell, told, gap) if use is not None else None,
        )
        told, gap = gap, gap + count
    tell(told, team.size)
    return around


class _Around:
    """Where items end that lie end to end, counted around from one position on.

    Args:
        sizes: of each item, by position.
        position: of the first one.
    """

    def __init__(self, sizes: Sequence[int], position: int) -> None:
        self._sums, self._first = _sums_of_two(tuple(sizes)), position

    def at(self, count: int) -> int:
        """The sum of the first ``count`` sizes."""
        return self._sums[self._first + count] - self._sums[self._first]


@lru_cache(maxsize=256)
def _sums_of_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sums from the first on, twice around: once for all workers that a process plays."""
    return tuple(accumulate(sizes * 2, initial=0))


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
