"""Base classes of compressors, and the properties that they declare so that methods can combine them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from spardl.protocol.programs import Context, Program, State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Layout, Range
from spardl.vector.packing import NIBBLE
from spardl.vector.sparse import Sum

__all__ = ["CodeCompressor", "Compressor", "DenseCompressor", "Mass", "Output", "SparseCompressor", "Total"]

Total: TypeAlias = Callable[[Tensor], Program[Tensor]]
"""``yield from total(tensor)``: sum of a dense 1-D tensor over all workers; the argument may be overwritten."""


class Output(Enum):
    """Form of a compressed gradient."""

    DENSE = "dense tensors that add up entry by entry"
    AT_MOST_K = "a sorted sparse vector of at most k entries"
    ABOUT_K = "a sorted sparse vector of about k entries"
    ANY_COUNT = "a sorted sparse vector of any number of entries"
    CODES = "codes that must be decoded before they are added"


class Mass(Enum):
    """Treatment of the part of a gradient that is not sent."""

    KEPT = "nothing"
    LEFT = "stays with the worker, and a residual can keep it"
    OWED = "is sent later by the compressor itself"
    UNBIASED = "becomes noise with zero mean"
    CLIPPED = "becomes noise with zero mean, and clipped amounts are lost"
    ROUNDED = "rounding errors, which are lost"


class Compressor(ABC):
    """Base class of compressors, which determine what a worker sends of its gradient.

    Attributes:
        name: Name in configurations.
        output: Form of a compressed gradient; the communicator must be able to sum it.
        mass: Treatment of the unsent part that holds for all options; ``own_mass`` depends on the options.
        sparsifies: Whether it sends some entries unchanged and nothing of the others.
        by_matrix: Whether the amount sent depends on the shapes of the tensors, which are treated as matrices.
        absolute: Whether it compares gradients with a fixed number, so that their scale matters.
    """

    name: ClassVar[str]
    output: ClassVar[Output]
    mass: ClassVar[Mass]
    sparsifies: ClassVar[bool] = False
    by_matrix: ClassVar[bool] = False
    absolute: ClassVar[bool] = False

    @property
    def own_mass(self) -> Mass:
        """Treatment of the unsent part with this compressor's options; may be better than ``mass``."""
        return self.mass

    @property
    def smooths(self) -> bool:
        """Whether averages are running means of gradients, so that the optimizer should not use momentum."""
        return False

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> State:
        """Creates the initial state of a worker for gradients of this ``layout``, ``dtype`` and ``device``."""
        return State()

    def parts(self, context: Context) -> list[Range]:
        """Ranges of the vector, and the number of entries to send unchanged from each, in ``context``.

        All entries, unless the compressor sparsifies.
        """
        return [Range(0, context.layout.length, context.layout.length)]

    def count(self, context: Context) -> int:
        """Total number of entries to send unchanged in ``context``."""
        return sum(part.k for part in self.parts(context))


class SparseCompressor(Compressor):
    """Base class of compressors that select entries of a vector."""

    mass = Mass.LEFT
    sparsifies = True

    def capacity(self, context: Context) -> int | None:
        """Maximum number of selected entries in ``context``; ``None`` if it is known only after the selection."""
        return self.count(context) if self.output is Output.AT_MOST_K else None

    def whole(self, context: Context) -> Range:
        """The whole vector as one range, with the number of entries to send in ``context``."""
        return Range(0, context.layout.length, self.count(context))

    @property
    def index_step(self) -> int:
        """Number of bits that the low bits of an index are a multiple of (see ``Slot``)."""
        return NIBBLE

    @abstractmethod
    def selector(self, context: Context, state: State) -> Select:
        """Returns the selection function of one worker.

        Args:
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            ``select(accumulator, parts)``, which selects entries of some ranges: at most, or about, k of each, as
            ``output`` states.
        """


class DenseCompressor(Compressor):
    """Base class of compressors whose output is dense tensors that can be summed directly.

    Attributes:
        one_sum: Whether it needs a single sum, over entries of the vector, so that a slice of the sum gives a slice of
            the result.
    """

    output = Output.DENSE
    one_sum: ClassVar[bool] = False

    @abstractmethod
    def sizes(self, context: Context) -> list[int]:
        """Number of entries of each tensor that ``rounds`` sums in ``context``, in order."""

    @abstractmethod
    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums a vector over all workers, with one call of ``total`` per round of communication.

        Args:
            accumulated: Gradient plus residual. If ``mass`` is ``LEFT``, this worker's contribution is removed from it.
            context: Context of this synchronization.
            total: Function that sums a dense tensor over all workers.
            state: State of this worker.

        Returns:
            The (approximate) sum, bit-identical on all workers; a dense sum has shape (n,).
        """

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which vectors of type ``dtype`` are summed and sent."""
        return dtype

    def entries(self, part: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Converts a slice of the single sum to a slice of the result; called only if ``one_sum``.

        Args:
            part: Slice of the sum, shape (m,).
            context: Context of this synchronization.
            dtype: Type of the result.

        Returns:
            Slice of the result, shape (m,).
        """
        return part


class CodeCompressor(Compressor):
    """Base class of compressors whose output is a message of known size that must be decoded before it is summed."""

    output = Output.CODES

    @property
    def lessens(self) -> bool:
        """Whether compression errors never exceed the vector's largest magnitude, apart from rounding."""
        return False

    @abstractmethod
    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Size in bytes of a message in ``context``, for vectors (and thus scales) of type ``dtype``."""

    @abstractmethod
    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes a worker's message.

        Args:
            vector: Vector of shape (n,), not modified.
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            uint8 tensor of shape (size(context, vector.dtype),).
        """

    @abstractmethod
    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Decodes a message; the result is the same on every worker.

        Args:
            message: uint8 tensor of shape (size(context, dtype),).
            context: Context of this synchronization.
            dtype: Type of the result.

        Returns:
            Decoded vector of shape (n,).
        """

    def take(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes a worker's message, and subtracts the decoded message from the vector.

        The result has the same bits as ``encode`` followed by a subtraction of ``decode``.

        Args:
            vector: Contiguous vector of shape (n,); holds the compression error afterwards.
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            uint8 tensor of shape (size(context, vector.dtype),).
        """
        message = self.encode(vector, context, state)
        vector.sub_(self.decode(message, context, vector.dtype))
        return message

    def decode_into(self, vector: Tensor, message: Tensor, context: Context, *, add: bool = False) -> None:
        """Decodes a message into a vector; the result has the same bits as that of ``decode``.

        Args:
            vector: Contiguous vector of shape (n,) to write to.
            message: uint8 tensor of shape (size(context, vector.dtype),).
            context: Context of this synchronization.
            add: Whether to add to ``vector`` instead of overwriting it.
        """
        decoded = self.decode(message, context, vector.dtype)
        if add:
            vector.add_(decoded)
        else:
            vector.copy_(decoded)
