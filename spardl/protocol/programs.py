"""Types that communication algorithms share: programs and their requests, costs, random seeds and states.

An all-reduce algorithm is a *program*: a generator that each worker runs (``Program``). It yields requests: an
``Exchange`` of messages, or a collective of the backend. It also yields annotations: ``Phase`` (what the following time
is spent on), ``Boundary`` (the middle of the all-reduce) and ``Step`` (the step that follows). The generator is resumed
with the tensors received. It uses no process group, socket or clock: a cluster drives it, and may suspend it at a
boundary.
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
    "clone_data",
    "derive_seed",
    "describe",
    "is_compatible",
    "log2_ceil",
    "seeded_generator",
    "whole_team",
]


@dataclass(frozen=True)
class Combination:
    """A named method: the parts that it consists of.

    The module of a compressor or communicator lists its combinations as ``METHODS``. Parts are given by name because
    most of them are defined in other modules.

    Args:
        name: Name of the method, as in ``spardl.attach(model, "NAME")`` and ``train.py compressor=NAME``.
        compressor: Name of the compressor, which selects what each worker sends.
        communicator: Name of the communicator, which sums the messages.
        residual: Name of the residual rule, which determines the unsent entries to add to the next gradient.
        momentum: Name of the momentum rule, which determines the compressed vector.
        dense_steps: Number of dense synchronizations at the start.
        compressor_options: Options that differ from the compressor's defaults.
        communicator_options: Options that differ from the communicator's defaults.
        faster: Name of a faster communicator, which sums in another order. Handles (``attach`` and others) use it
            unless the caller names a communicator; ``None`` if there is none.
        muon_options: Options that replace the defaults in handles whose ``optimizer=`` contains Muon.
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
    muon_options: Mapping[str, Any] = field(default_factory=dict)


T = TypeVar("T")


class Phase(Enum):
    """Activity that a worker spends the following time on.

    Computing gradients, selecting entries, packing or unpacking messages, communicating, summing (merging) received
    entries, updating weights, or waiting.
    """

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
        to: Rank of the receiver.
        payload: Tensor of shape (m,), on the gradient's device. It may be modified once the exchange is complete.
        words: Length in the papers' unit (an index or a value is one word).
    """

    to: int
    payload: Tensor
    words: int


class Receive(NamedTuple):
    """A message expected from another worker; the receiver knows its size in advance.

    Attributes:
        source: Rank of the sender.
        size: Number of elements.
        dtype: Type of the elements.
        into: Tensor of shape (size,) to receive into; ``None`` allocates one. Nothing else may access it during the
            exchange.
    """

    source: int
    size: int
    dtype: torch.dtype
    into: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One communication round of a worker: all of its messages are in flight at once.

    The program is resumed with the received tensors, in the order of ``receives``.

    Attributes:
        sends: Messages to other workers.
        receives: Messages from other workers.
        meanwhile: Local work to overlap with the messages, if any. It must not access the payloads or the receive
            buffers.
        inside: Whether all messages stay inside a node; ledgers and emulated networks do not count them.
    """

    sends: Sequence[Send]
    receives: Sequence[Receive]
    meanwhile: Callable[[], None] | None = None
    inside: bool = False


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A dense all-reduce (sum) by the backend's collective, in place. The program is resumed with the tensor.

    Attributes:
        tensor: Tensor of shape (m,), overwritten with the sum.
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """The first half of an all-reduce over P workers.

    On each rank, the program is resumed with chunk ``rank`` of the sum, as divided by ``tensor.tensor_split(P)``.

    Attributes:
        tensor: Tensor of shape (m,).
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AllGather:
    """The second half of an all-reduce over P workers, in place.

    Gathers the chunks of ``tensor.tensor_split(P)``: chunk r from rank r.

    Attributes:
        tensor: Tensor of shape (m,), in which this worker's chunk is set.
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Boundary:
    """Annotation: the middle of an all-reduce, where each entry of the sum is known to one worker.

    The rest of the program only distributes the sum, so it can wait until the sum is needed.

    Attributes:
        shard: Entries of the sum that this worker holds, sparse or dense; each entry is held by one worker.
    """

    shard: Sum


@dataclass(frozen=True, slots=True)
class Step:
    """Annotation: the following requests belong to a step of the method. Clusters need not act on it.

    Attributes:
        number: Number of the step, counted from 1.
    """

    number: int


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather
Request: TypeAlias = Exchange | Collective | Boundary | Phase | Step
Program: TypeAlias = Generator[Request, list[Tensor], T]
"""Program of one worker: yields requests, is resumed with the tensors received, and returns a result."""


class Worker(NamedTuple):
    """One of P workers.

    Attributes:
        rank: Rank of the worker, from 0.
        size: Number of workers, P.
    """

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Team:
    """An ordered group of workers that communicate with each other, as seen by one member.

    Attributes:
        members: Ranks of the members, in order.
        position: Position of this worker in ``members``.
    """

    members: Sequence[int]
    position: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def at(self, offset: int) -> int:
        """Returns the position of the member ``offset`` places after this worker, cyclically."""
        return (self.position + offset) % self.size

    def rank(self, offset: int) -> int:
        """Returns the rank of the member ``offset`` places after this worker, cyclically."""
        return self.members[self.at(offset)]


def whole_team(worker: Worker) -> Team:
    """Returns the team of all workers in rank order, as seen by ``worker``."""
    return Team(range(worker.size), worker.rank)


class Context(NamedTuple):
    """One synchronization, as seen by one worker: the input of every part of a method.

    Attributes:
        worker: Rank of the local worker, and number of workers.
        layout: Shapes and positions of the tensors in the vector.
        step: Number of earlier synchronizations with this method, without dense warm-up; equal on all workers.
        weights: Weights that the vector would be subtracted from, shape (n,), equal on all workers; ``None`` if the
            compressor does not need them or the caller has none.
        step_sizes: Factors of the vector's entries before they are subtracted from the weights, shape (n,); ``None`` if
            all are 1.
    """

    worker: Worker
    layout: Layout
    step: int
    weights: Tensor | None = None
    step_sizes: Tensor | None = None


# Costs per worker, in the units of the papers' formulas. The simulated cluster counts in the same units, so tests check
# every formula against the messages actually sent.


class Bounds(NamedTuple):
    """Lower and upper bound, valid for all workers, of a number that may not be known exactly in advance.

    Attributes:
        low: Minimum number over all workers.
        high: Maximum number over all workers.
    """

    low: int
    high: int

    @classmethod
    def exactly(cls, number: int) -> Bounds:
        """Returns bounds whose lower and upper values are both ``number``."""
        return cls(number, number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.low <= number <= self.high


class Cost(NamedTuple):
    """Communication cost of one synchronization for one worker.

    Attributes:
        rounds: Number of exchanges in sequence: each starts after the previous one.
        words: Number of words sent: one per index, value or count; 32 bits of codes are one word.
    """

    rounds: Bounds
    words: Bounds

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """Returns the sum of several ``costs``, which are incurred in sequence."""
        rounds, words = zip(*costs, strict=True)
        return cls(*(Bounds(*map(sum, zip(*bounds, strict=True))) for bounds in (rounds, words)))


def log2_ceil(count: int) -> int:
    """Returns the base-2 logarithm of ``count`` (at least 1), rounded up: the rounds of a doubling algorithm."""
    return (count - 1).bit_length()


# Stateless random numbers: seeds are derived from the purpose, so checkpoints need not store any generator state.


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2^63) that depends only on ``parts``, as in ``derive_seed(seed, "order", epoch)``."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded_generator(*parts: int | str) -> torch.Generator:
    """Creates a CPU generator seeded by ``derive_seed``, so that equal ``parts`` give equal numbers on all workers.

    Args:
        *parts: Purpose of the numbers, such as a seed, a step number, and a rank where workers should differ.

    Returns:
        A new generator.
    """
    return torch.Generator().manual_seed(derive_seed(*parts))


@dataclass
class State:
    """Base class of per-worker state that persists across steps; the caller owns, saves and loads it.

    Subclasses are dataclasses whose fields are numbers, booleans, strings or tensors. Compressors and communicators
    without state use this class directly.
    """

    def rescale(self, factor: float) -> None:
        """Adapts the state to gradients that are multiplied by ``factor`` from now on; does nothing by default.

        Overrides replace tensors instead of changing them in place, because saved states may share their memory.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields by name. Tensors are shared, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, values: Mapping[str, Any]) -> None:
        """Checks that ``load_state_dict`` accepts ``values``, without changing anything.

        Raises:
            KeyError: If the names differ from the fields of this state.
            ValueError: If a value has another type, or a tensor another shape; empty tensors match all shapes.
        """
        names = {field.name for field in fields(self)}
        if names != set(values):
            raise KeyError(f"{type(self).__name__} must have the fields {sorted(names)}, got {sorted(values)}")
        for name, value in values.items():
            mine = getattr(self, name)
            if not is_compatible(value, mine):
                raise ValueError(f"{name} must have the type of {describe(mine)}, got {describe(value)}")
            if isinstance(mine, Tensor) and value.shape != mine.shape and mine.numel() and value.numel():
                raise ValueError(f"{name} must be {describe(mine)}, got {describe(value)}")

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Sets every field from ``values``.

        Raises:
            KeyError: If the names differ from the fields of this state.
            ValueError: If a value has another type, or a tensor another shape.
        """
        self.check(values)
        for name, value in values.items():
            mine = getattr(self, name)
            same = isinstance(mine, Tensor) and isinstance(value, Tensor)
            # The checkpoint may come from another device.
            setattr(self, name, value.to(mine.device) if same else value)


def clone_data(values: Any) -> Any:
    """Returns a copy of plain data (nested dicts and lists), whose tensors share no memory with the original."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, Mapping):
        return {name: clone_data(value) for name, value in values.items()}
    if isinstance(values, list):
        return [clone_data(value) for value in values]
    return values


def is_compatible(value: Any, mine: Any) -> bool:
    """Returns whether a saved ``value`` can replace ``mine``.

    A tensor must have the same dtype and number of dimensions, any other value the same type; an int can replace a
    float.
    """
    if isinstance(mine, Tensor):
        # Sparse and meta tensors have no values that a field could hold.
        fits = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        return fits and (value.dtype, value.dim()) == (mine.dtype, mine.dim())
    if isinstance(mine, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    # Strict, because True is an int and loading it as a count would hide a damaged checkpoint.
    return type(value) is type(mine)


def describe(value: Any) -> str:
    """Returns a short description of a saved value, for error messages."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:60]
