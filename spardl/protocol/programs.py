"""The vocabulary of communication programs.

An all-reduce algorithm is a generator. It yields what it wants done (an ``Exchange`` of messages, or a collective
of the backend's own), or what it is at: a ``Phase`` says what its next seconds are spent on, a ``Boundary`` that it is
half done, a ``Step`` which step it belongs to. It is resumed with the tensors that arrived. It touches no process
group, no socket and no clock; a cluster drives it, and may let it rest at a boundary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from spardl.vector.layout import Layout
from spardl.vector.sparse import Sum

__all__ = [
    "AllGather",
    "AllReduce",
    "Boundary",
    "Bounds",
    "Collective",
    "Combination",
    "Context",
    "Cost",
    "Exchange",
    "Phase",
    "Program",
    "Receive",
    "ReduceScatter",
    "Request",
    "Send",
    "State",
    "Step",
    "Team",
    "Worker",
    "copied",
    "derive_seed",
    "described",
    "log2_ceil",
    "same_kind",
    "seeded_generator",
    "whole_team",
]


# Which parts make a method: declared in the file of one of them, by name, since most parts are in other files.


@dataclass(frozen=True)
class Combination:
    """A method by name. A compressor's or a communicator's file lists those that it brings as ``METHODS``.

    Args:
        name: of the method, for ``spardl.attach(model, "NAME")`` and ``train.py compressor=NAME``.
        compressor: what one worker sends, by name, like the other parts.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.
        dense_steps: synchronizations that are dense at first.
        compressor_options: those that differ from the compressor's own defaults.
        communicator_options: those that differ from the communicator's own defaults.
        faster: another communicator, which adds up in an order of its own; handles use it unless they are given one.
    """

    name: str
    compressor: str
    communicator: str
    residual: str
    momentum: str = "optimizer"
    dense_steps: int = 0
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    communicator_options: Mapping[str, Any] = field(default_factory=dict)
    faster: str | None = None


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


# What every part of a method may know about the synchronization it takes part in.


class Context(NamedTuple):
    """One synchronization, seen by one worker.

    Attributes:
        worker: who looks.
        layout: the tensors in the vector.
        step: synchronizations with this method before this one (dense warm-up not counted); equal on all workers.
    """

    worker: Worker
    layout: Layout
    step: int


# What a synchronization costs, before it runs: rounds and words per worker, as the papers' formulas have them.
#
# The simulated cluster counts the same, so every formula here is checked against what is really sent.


class Bounds(NamedTuple):
    """A whole number of which only the limits may be known beforehand.

    Attributes:
        low: the least, over all workers.
        high: the most, over all workers.
    """

    low: int
    high: int

    @classmethod
    def exactly(cls, number: int) -> Bounds:
        """A ``number`` that is known."""
        return cls(number, number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.low <= number <= self.high


class Cost(NamedTuple):
    """The cost of one synchronization for one worker.

    Attributes:
        rounds: exchanges that wait for one another.
        words: indices, values and counts sent, one word each; of codes, 32 bits are one word.
    """

    rounds: Bounds
    words: Bounds

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """Several ``costs``, one after the other."""
        rounds, words = zip(*costs, strict=True)
        return cls(*(Bounds(*map(sum, zip(*bounds, strict=True))) for bounds in (rounds, words)))


def log2_ceil(count: int) -> int:
    """Rounds in which something that doubles reaches ``count`` (at least 1): the logarithm to base 2, rounded up."""
    return (count - 1).bit_length()


# Random numbers that depend on nothing but what they are for: no state of theirs needs to be saved.


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for a purpose, such as ``derive_seed(seed, "order", epoch)``."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator with such a seed: the same on every worker that asks for the same, and after a restart.

    Args:
        *parts: what the numbers are for, such as a seed, the number of a step, and a rank where workers should differ.

    Returns:
        The generator; nobody else has it.
    """
    return torch.Generator().manual_seed(derive_seed(*parts))


# State that lasts from step to step: owned by the caller, saved and loaded as plain data.


@dataclass
class State:
    """Base of all per-worker state: a dataclass whose fields are numbers, booleans, strings or tensors.

    An operator without state uses this class itself.
    """

    def rescale(self, factor: float) -> None:
        """Follows gradients that are multiplied by ``factor`` from here on; tensors are replaced, not changed."""

    def state_dict(self) -> dict[str, Any]:
        """The fields by name. Tensors are shared, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, values: Mapping[str, Any]) -> None:
        """Accepts ``values`` that ``load_state_dict`` can set; changes nothing.

        Raises:
            KeyError: if the names differ from this state's own.
            ValueError: if a value is of another kind or a tensor of another shape; empty tensors fit all shapes.
        """
        names = {field.name for field in fields(self)}
        if names != set(values):
            raise KeyError(f"state of {type(self).__name__} has {sorted(names)}, got {sorted(values)}")
        for name, value in values.items():
            mine = getattr(self, name)
            if not same_kind(value, mine):
                raise ValueError(f"{name} is {described(value)}, expected {described(mine)}")
            if isinstance(mine, Tensor) and value.shape != mine.shape and mine.numel() and value.numel():
                raise ValueError(f"{name} is {described(value)}, expected {described(mine)}")

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Sets every field from ``values``.

        Raises:
            KeyError: as ``check``.
            ValueError: as ``check``.
        """
        self.check(values)
        for name, value in values.items():
            mine = getattr(self, name)
            same = isinstance(mine, Tensor) and isinstance(value, Tensor)
            # Where it was saved is not always where it is needed.
            setattr(self, name, value.to(mine.device) if same else value)


def copied(values: Any) -> Any:
    """Plain data whose tensors share no memory with those given."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, Mapping):
        return {name: copied(value) for name, value in values.items()}
    if isinstance(values, list):
        return [copied(value) for value in values]
    return values


def same_kind(value: Any, mine: Any) -> bool:
    """Whether a saved ``value`` can take the place of ``mine``: a number of its kind, or a tensor of its type."""
    if isinstance(mine, Tensor):
        fits = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        return fits and (value.dtype, value.dim()) == (mine.dtype, mine.dim())
    if isinstance(mine, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(mine)


def described(value: Any) -> str:
    """A saved value in a few words, for error messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:60]
