"""The vocabulary of communication programs.

An all-reduce algorithm is a generator. It yields what it wants done (an ``Exchange`` of messages, or a collective
of the backend's own), or what it is at: a ``Phase`` says what its next seconds are spent on, a ``Boundary`` that it is
half done, a ``Step`` which step it belongs to. It is resumed with the tensors that arrived. It touches no process
group, no socket and no clock; a cluster drives it, and may let it rest at a boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from spardl.vector.sparse import Sum

__all__ = [
    "AllGather",
    "AllReduce",
    "Boundary",
    "Collective",
    "Exchange",
    "Phase",
    "Program",
    "Receive",
    "ReduceScatter",
    "Request",
    "Send",
    "Step",
    "Team",
    "Worker",
    "whole_team",
]

T = TypeVar("T")


class Phase(Enum):
    """What a worker's seconds are spent on."""

    COMPUTE = "compute"
    SELECT = "select"
    PACK = "pack"
    COMMUNICATE = "communicate"
    MERGE = "merge"
    UPDATE = "update"
    WAIT = "wait"


class Send(NamedTuple):
    """A message to another worker.

    Attributes:
        to: rank of the receiver.
        payload: shape (m,), on the gradient's device. It may be changed once the exchange is over.
        words: its length in the papers' unit (an index or a value is one word).
    """

    to: int
    payload: Tensor
    words: int


class Receive(NamedTuple):
    """A message expected from another worker: the receiver knows its size beforehand.

    Attributes:
        source: rank of the sender.
        size: number of elements.
        dtype: their type.
        into: where it is to be written, shape (size,); new memory if missing. Nothing else may touch it during the
            exchange.
    """

    source: int
    size: int
    dtype: torch.dtype
    into: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round: all messages at once. The reply holds what arrived, in the order of ``receives``.

    Attributes:
        sends: messages to others.
        receives: messages from others.
        meanwhile: what this worker does while they are under way, if anything. It must touch neither what is sent nor
            where anything is received.
    """

    sends: Sequence[Send]
    receives: Sequence[Receive]
    meanwhile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A dense sum over all workers by the backend's own collective, in place. The reply holds the tensor.

    Attributes:
        tensor: shape (m,).
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """The first half of ``AllReduce``. The reply holds chunk ``rank`` of ``tensor.tensor_split(P)``, summed.

    Attributes:
        tensor: shape (m,).
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AllGather:
    """The second half: every worker's chunk of ``tensor.tensor_split(P)`` replaces the others'; in place.

    Attributes:
        tensor: shape (m,).
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Boundary:
    """The middle of an all-reduce: every entry of the sum is known to one worker.

    What follows only tells the others, and may wait until they need it.

    Attributes:
        shard: the entries of the sum that this worker is to count as its own, so that each is counted once.
    """

    shard: Sum


@dataclass(frozen=True, slots=True)
class Step:
    """What follows is part of a step of the method. For who watches; nothing is to be done.

    Attributes:
        number: of the step, counted from 1.
    """

    number: int


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather
Request: TypeAlias = Exchange | Collective | Boundary | Phase | Step
Program: TypeAlias = Generator[Request, list[Tensor], T]
"""What one worker runs: it yields requests, is resumed with the tensors that arrived, and returns a result."""


class Worker(NamedTuple):
    """One of P workers.

    Attributes:
        rank: its number, from 0.
        size: P, the number of workers.
    """

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Team:
    """Some workers in a fixed order, seen by one of them.

    Attributes:
        members: ranks; the position of a member is its place in this order.
        position: the place of the worker that looks, in this order.
    """

    members: Sequence[int]
    position: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def at(self, offset: int) -> int:
        """The position that is ``offset`` places after this worker's, counted around."""
        return (self.position + offset) % self.size

    def rank(self, offset: int) -> int:
        """The rank of the member that is ``offset`` places after this worker, counted around."""
        return self.members[self.at(offset)]


def whole_team(worker: Worker) -> Team:
    """All workers, by rank, as ``worker`` sees them."""
    return Team(range(worker.size), worker.rank)
