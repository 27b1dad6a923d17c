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
    """Form in which a compressor outputs a gradient; a communicator must be able to sum it."""

    DENSE = "dense tensors that add up entry by entry"
    AT_MOST_K = "a sorted sparse vector of at most k entries"
    ABOUT_K = "a sorted sparse vector of about k entries"
    ANY_COUNT = "a sorted sparse vector of any number of entries"
    CODES = "codes that must be decoded before they are added"


class Mass(Enum):
    """What happens to the part of a gradient that is not sent."""

    KEPT = "nothing"
    LEFT = "stays with the worker, and a residual can keep it"
    OWED = "is sent later by the compressor itself"
    UNBIASED = "becomes noise with zero mean"
    CLIPPED = "becomes noise with zero mean, and clipped amounts are lost"
    ROUNDED = "rounding errors, which are lost"


class Compressor(ABC):
    """Base class of compressors, which determine which part of a vector (gradient plus residual) a worker sends.

    Attributes:
        name: Name of the compressor in configurations.
        output: Form of a compressed gradient; the communicator must be able to sum it.
        mass: What happens to the unsent part in the worst case over all options; ``own_mass`` is for the given options.
        sparsifies: Whether some entries are sent unchanged, and the others not at all.
        by_matrix: Whether tensors are compressed as matrices, so that the number of sent entries depends on their
            shapes.
        absolute: Whether entries are compared with a fixed threshold, so that multiplying a gradient changes the
            selection.
        needs_weights: Whether vectors are compared with the weights in the context. They must then be changes of
            weights, or updates with step sizes in the context, and weights must have at least 32 bits.
    """

    name: ClassVar[str]
    output: ClassVar[Output]
    mass: ClassVar[Mass]
    sparsifies: ClassVar[bool] = False
    by_matrix: ClassVar[bool] = False
    absolute: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False

    @property
    def own_mass(self) -> Mass:
        """What happens to the unsent part with the given options, which may lose less than ``mass`` states."""
        return self.mass

    @property
    def smooths(self) -> bool:
        """Whether averages are running means over several steps, so that the optimizer should use no momentum."""
        return False

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> State:
        """Returns the initial state of a worker for gradients of this ``layout``, ``dtype`` and ``device``."""
        return State()

    def parts(self, context: Context) -> list[Range]:
        """Returns the ranges of the vector in ``context``; ``k`` of each is the number of entries to send unchanged.

        By default, there is one range with all entries; compressors that sparsify override this method.
        """
        return [Range(0, context.layout.length, context.layout.length)]

    def count(self, context: Context) -> int:
        """Returns the total number of entries to send unchanged in ``context``."""
        return sum(part.k for part in self.parts(context))


class SparseCompressor(Compressor):
    """Base class of compressors that select entries of a vector.

    Attributes:
        fills: Whether the compressor always selects exactly the requested number of entries of a range, so that their
            number need not be read from a GPU.
    """

    mass = Mass.LEFT
    sparsifies = True
    fills: ClassVar[bool] = False

    def capacity(self, context: Context) -> int | None:
        """Returns the maximum number of selected entries in ``context``; ``None`` if it depends on the values."""
        return self.count(context) if self.output is Output.AT_MOST_K else None

    def whole(self, context: Context) -> Range:
        """Returns the whole vector as one range, with the number of entries to send in ``context``."""
        return Range(0, context.layout.length, self.count(context))

    @property
    def index_step(self) -> int:
        """Granularity of index sizes in messages: the number of low bits (Elias-Fano coding) is a multiple of it."""
        return NIBBLE

    @abstractmethod
    def selector(self, context: Context, state: State) -> Select:
        """Returns the selection function of one worker.

        Args:
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            ``select(accumulator, parts)``, which returns the positions of selected entries in the given ranges: at
            most, or about, k of each range, as ``output`` states.
        """


class DenseCompressor(Compressor):
    """Base class of compressors whose output is dense tensors that can be summed directly.

    Attributes:
        one_sum: Whether the result is computed entry by entry from a single sum, so that any consecutive entries of the
            sum give the corresponding entries of the result.
    """

    output = Output.DENSE
    one_sum: ClassVar[bool] = False

    @abstractmethod
    def sizes(self, context: Context) -> list[int]:
        """Returns the number of entries of each tensor that ``rounds`` sums in ``context``, in order."""

    @abstractmethod
    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums the compressed vectors of all workers; calls ``total`` once per dense sum.

        This is a generator that requests the messages of one worker (see ``spardl.protocol.programs``).

        Args:
            accumulated: Gradient plus residual. If ``mass`` is ``LEFT``, this worker's contribution is removed from it.
            context: Context of this synchronization.
            total: Function that sums a dense tensor over all workers.
            state: State of this worker.

        Returns:
            The (approximate) sum, bit-identical on all workers; a dense sum has shape (n,).
        """

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which vectors of type ``dtype`` are summed and sent."""
        return dtype

    def entries(self, part: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Converts consecutive entries of the single sum to those of the result; called only if ``one_sum``.

        Args:
            part: Consecutive entries of the sum, shape (m,).
            context: Context of this synchronization.
            dtype: Dtype of the result.

        Returns:
            Corresponding entries of the result, shape (m,).
        """
        return part


class CodeCompressor(Compressor):
    """Base class of compressors whose output is a message of known size, which must be decoded before summing."""

    output = Output.CODES

    @property
    def lessens(self) -> bool:
        """Whether no compression error exceeds the largest magnitude in the vector, apart from rounding."""
        return False

    @abstractmethod
    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Returns the size of a message in ``context`` in bytes, for vectors and scales of type ``dtype``."""

    @abstractmethod
    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes a worker's vector as a message.

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
            dtype: Dtype of the result.

        Returns:
            Decoded vector of shape (n,).
        """

    def take(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes a worker's vector as a message, and subtracts the decoded message from the vector.

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
