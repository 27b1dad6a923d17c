"""Transfer of tensors and sparse blocks between workers: all-gathers and point-to-point messages.

Functions that return a ``Program`` are generators that yield the send and receive requests of one member of a team (the
workers that exchange messages with each other). A *slot* describes a sparse vector in a message: the length of the
vector and the maximum number of its entries. *Words* are the unit of costs in the papers: an index or a value is one
word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.bits import integers_on
from spardl.vector.packing import Slot, message_words
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Form

__all__ = ["BlockExchange", "Use", "all_gather", "all_gather_around", "all_gather_counts"]


# All-gather in ceil(log2 m) rounds for any number of workers.
#
# Source: Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, IEEE
# TPDS 1997.


Use: TypeAlias = Callable[[int, Tensor], None]
"""Callback that receives the position of a member and its item, shape (m,)."""


def all_gather(team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int]) -> Program[list[Tensor]]:
    """Gathers one tensor (item) of each member at all members.

    Args:
        team: Members in a fixed order.
        item: Item of this member, shape (m,).
        sizes: Number of elements of each member's item, by position.
        words: Number of words of each member's item, by position.

    Returns:
        The items by position in the team, shape (sizes[position],) each.
    """
    around = yield from all_gather_around(team, item, sizes, words)
    held = around.split([sizes[team.at(j)] for j in range(team.size)])
    return [held[(position - team.position) % team.size] for position in range(team.size)]


def all_gather_around(
    team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int], use: Use | None = None
) -> Program[Tensor]:
    """Gathers the tensors (items) of all members into one tensor that starts with the item of this member.

    Args:
        team: Members in a fixed order.
        item: Item of this member, shape (m,).
        sizes: Number of elements of each member's item, by position.
        words: Number of words of each member's item, by position.
        use: Callback that is called with each item, starting with that of this member, while later items are still in
            flight; ``None`` for none.

    Returns:
        All items, concatenated in cyclic order of positions from this member on, shape (sum of sizes,).
    """
    ends, words_to = _CyclicOffsets(sizes, team.position), _CyclicOffsets(words, team.position)
    # In cyclic order, the items that a member holds are always contiguous, so they are sent without a copy, and what
    # arrives is received in its final place.
    around = item.new_empty(ends.at(team.size))
    around[: ends.at(1)] = item

    def call_use(start: int, stop: int) -> None:
        if use is not None:
            for j in range(start, stop):
                use(team.at(j), around[ends.at(j) : ends.at(j + 1)])

    used, gap = 0, 1
    # A member holds the items of itself and the ``gap - 1`` members after it. It sends the ones that are missing
    # ``gap`` places before it, so the number of items doubles in every round.
    while gap < team.size:
        count = min(gap, team.size - gap)
        outgoing, incoming = around[: ends.at(count)], around[ends.at(gap) : ends.at(gap + count)]
        yield Exchange(
            sends=[Send(team.rank(-gap), outgoing, words_to.at(count))],
            receives=[Receive(team.rank(gap), incoming.numel(), item.dtype, incoming)],
            meanwhile=partial(call_use, used, gap) if use is not None else None,
        )
        used, gap = gap, gap + count
    call_use(used, team.size)
    return around


class _CyclicOffsets:
    """End offsets of items that lie one after the other in cyclic order.

    Args:
        sizes: Size of each item, by position.
        position: Position of the first item.
    """

    def __init__(self, sizes: Sequence[int], position: int) -> None:
        self._sums, self._first = _sums_of_two(tuple(sizes)), position

    def at(self, count: int) -> int:
        """Returns the sum of the first ``count`` sizes."""
        return self._sums[self._first + count] - self._sums[self._first]


@lru_cache(maxsize=256)
def _sums_of_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    # Cached: shared by all workers that one process simulates. Two rounds, so that every cyclic sum is one difference.
    return tuple(accumulate(sizes * 2, initial=0))


class BlockExchange(NamedTuple):
    """Sends and receives sparse vectors, as messages of a given format.

    Attributes:
        form: Format of the messages.
        full: Whether every vector has as many entries as its slot allows.
    """

    form: Form
    full: bool = False

    @classmethod
    def of(cls, accumulated: Accumulator, *, full: bool = False) -> BlockExchange:
        """Returns an exchange with the message format of a worker's vector.

        Args:
            accumulated: Vector of the worker.
            full: Whether every vector has as many entries as its slot allows.

        Returns:
            The exchange.
        """
        return cls(accumulated.form, full)

    def send(self, to: int, vector: SparseVector, slot: Slot) -> Send:
        """Packs a vector into a message.

        Args:
            to: Rank of the receiver.
            vector: Vector that fits the slot, with values that are already rounded, see ``Wire.rounded``.
            slot: Length and maximum number of entries of the vector, which the receiver must know.

        Returns:
            The message, for an ``Exchange``.
        """
        return Send(to, self.form.pack(vector, slot), message_words(slot))

    def receive(self, source: int, slot: Slot) -> Receive:
        """Returns the request for a message that rank ``source`` sends with an equal ``slot``."""
        return Receive(source, self.form.size(slot), torch.uint8)

    def open(self, message: Tensor, slot: Slot) -> SparseVector:
        """Unpacks the vector in a received message.

        Args:
            message: Bytes of the message: uint8, shape (form.size(slot),).
            slot: Slot of the message.

        Returns:
            The vector, with values in the gradient's dtype.
        """
        return self.form.open(message, [slot], full=self.full)

    def exchange(self, to: int, vector: SparseVector, slot: Slot, source: int, coming: Slot) -> Program[SparseVector]:
        """Sends a vector to one worker and receives another vector from one worker.

        Args:
            to: Rank of the receiver.
            vector: Vector to send.
            slot: Length and maximum number of entries of the sent vector.
            source: Rank of the sender of the received vector.
            coming: Length and maximum number of entries of the received vector.

        Returns:
            The received vector.
        """
        yield Phase.PACK
        (message,) = yield Exchange([self.send(to, vector, slot)], [self.receive(source, coming)])
        received = self.open(message, coming)
        yield Phase.MERGE
        return received

    def all_gather(self, team: Team, block: SparseVector, slots: Sequence[Slot]) -> Program[list[SparseVector]]:
        """Gathers the sparse blocks of all members.

        Args:
            team: Members in a fixed order.
            block: Block of this member; fits ``slots[team.position]``.
            slots: Slot of each member's block, by position.

        Returns:
            The blocks, by position in the team.
        """
        yield Phase.PACK
        gathered = yield from all_gather(team, *self._packed(block, slots, team.position))
        blocks = [self.open(message, slot) for message, slot in zip(gathered, slots, strict=True)]
        yield Phase.MERGE
        return blocks

    def all_gather_joined(self, team: Team, block: SparseVector, slots: Sequence[Slot]) -> Program[SparseVector]:
        """Gathers the sparse blocks of all members as one vector.

        Args:
            team: Members in a fixed order.
            block: Block of this member; fits ``slots[team.position]``.
            slots: Slot of each member's block, by position.

        Returns:
            The blocks, concatenated in the order of positions in the team.
        """
        yield Phase.PACK
        message, sizes, words = self._packed(block, slots, team.position)
        around = yield from all_gather_around(team, message, sizes, words)
        # The gathered messages are in cyclic order from this member on; rotate them into the order of positions.
        start = sum(sizes[team.position :])
        rotated = torch.cat((around[start:], around[:start])) if team.position else around
        joined = self.form.open(rotated, slots, full=self.full)
        yield Phase.MERGE
        return joined

    def _packed(
        self, block: SparseVector, slots: Sequence[Slot], position: int
    ) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """Packs this member's message; returns it with the sizes of all messages, in bytes and in words."""
        return self.form.pack(block, slots[position]), *_sizes(self.form, tuple(slots))

    def slots_of(self, team: Team, block: SparseVector, lengths: Sequence[int]) -> Program[list[Slot]]:
        """Gathers the number of entries of each member's block, and makes slots of these sizes for an all-gather.

        Args:
            team: Members in a fixed order.
            block: Block of this member.
            lengths: Length of each member's block, by position.

        Returns:
            The slot of each member's block, by position.
        """
        counts = yield from all_gather_counts(team, [len(block)], block.indices.device)
        return [Slot(count, length) for (count,), length in zip(counts, lengths, strict=True)]


@lru_cache(maxsize=256)
def _sizes(form: Form, slots: tuple[Slot, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of messages in bytes and in words."""
    return tuple(map(form.size, slots)), tuple(map(message_words, slots))


def all_gather_counts(team: Team, counts: Sequence[int] | Tensor, device: torch.device) -> Program[list[list[int]]]:
    """Gathers integers of all members, for example sizes that only the sender of a message knows.

    Args:
        team: Members in a fixed order.
        counts: Numbers of this member; equally many on all members. An int64 tensor of shape (m,) may be on a device.
        device: Device of the messages.

    Returns:
        The numbers of each member, by position in the team.
    """
    sizes = [len(counts)] * team.size
    own = counts if isinstance(counts, Tensor) else integers_on(device, counts)
    # The host waits once, for all numbers together.
    rows = (yield from all_gather_around(team, own, sizes, sizes)).view(team.size, -1).tolist()
    return [rows[(position - team.position) % team.size] for position in range(team.size)]
