"""What every compressor declares, so that parts fit together by declaration and not by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from spardl.protocol.programs import Context, Program, State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Layout, Part
from spardl.vector.packing import NIBBLE
from spardl.vector.sparse import Sum

__all__ = ["CodeCompressor", "Compressor", "DenseCompressor", "Mass", "Output", "SparseCompressor", "Total"]

Total: TypeAlias = Callable[[Tensor], Program[Tensor]]
"""``yield from total(tensor)``: the sum of a dense 1-D tensor over all workers; the argument may be overwritten."""


class Output(Enum):
    """What a compressor makes of a gradient."""

    DENSE = "dense tensors that add up entry by entry"
    AT_MOST_K = "a sorted sparse vector of at most k entries"
    ABOUT_K = "a sorted sparse vector of about k entries"
    ANY_COUNT = "a sorted sparse vector of any number of entries"
    CODES = "codes that must be decoded before they are added"


class Mass(Enum):
    """What becomes of the part of a gradient that is not sent."""

    KEPT = "there is none"
    LEFT = "it stays with the worker, and a residual can keep it"
    OWED = "the compressor itself sends it later"
    UNBIASED = "noise, zero on average"
    CLIPPED = "noise, and what is clipped, lost"
    ROUNDED = "rounding errors, lost"


class Compressor(ABC):
    """What one worker sends of a gradient.

    Attributes:
        name: how configurations call it.
        output: what it makes of a gradient; a communicator must be able to sum that.
        mass: what becomes of the rest, whatever the options are; see ``own_mass``.
        sparsifies: whether it sends some entries at their own value and nothing of the others.
        by_matrix: whether how much it sends depends on the shapes of the tensors, which it takes for matrices.
        absolute: whether it compares gradients with a number of its own, so that their scale matters.
    """

    name: ClassVar[str]
    output: ClassVar[Output]
    mass: ClassVar[Mass]
    sparsifies: ClassVar[bool] = False
    by_matrix: ClassVar[bool] = False
    absolute: ClassVar[bool] = False

    @property
    def own_mass(self) -> Mass:
        """What becomes of the rest with this one's options, which may do better than ``mass`` promises."""
        return self.mass

    @property
    def smooths(self) -> bool:
        """Whether averages are running means of gradients, so that the optimizer should have no momentum."""
        return False

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> State:
        """A fresh state for one worker, for gradients of this ``layout``, ``dtype`` and ``device``."""
        return State()

    def parts(self, context: Context) -> list[Part]:
        """How many entries of which ranges are meant to be sent in ``context`` at their own value.

        All, unless it sparsifies.
        """
        return [Part(0, context.layout.length, context.layout.length)]

    def count(self, context: Context) -> int:
        """How many entries that are in all in ``context``."""
        return sum(part.k for part in self.parts(context))


class SparseCompressor(Compressor):
    """Keeps some entries of a vector."""

    mass = Mass.LEFT
    sparsifies = True

    def capacity(self, context: Context) -> int | None:
        """The most entries that a selection can have in ``context``; ``None``: only the selection tells."""
        return self.count(context) if self.output is Output.AT_MOST_K else None

    def whole(self, context: Context) -> Part:
        """The whole vector as one range, with all entries that are meant to be sent in ``context``."""
        return Part(0, context.layout.length, self.count(context))

    @property
    def index_step(self) -> int:
        """Bits that the low ones of an index are a multiple of, see ``Slot``."""
        return NIBBLE

    @abstractmethod
    def selector(self, context: Context, state: State) -> Select:
        """The selection, bound to one worker's state.

        Args:
            context: of this synchronization.
            state: this worker's.

        Returns:
            ``select(accumulated, parts)``: what to keep of some ranges of the vector: at most, or about, their k
            entries, as ``output`` says.
        """


class DenseCompressor(Compressor):
    """Turns a vector into dense tensors that can be summed as they are.

    Attributes:
        one_sum: whether it asks for a single sum, of entries of the vector, so that a part of that sum is a part of
            the result.
    """

    output = Output.DENSE
    one_sum: ClassVar[bool] = False

    @abstractmethod
    def sizes(self, context: Context) -> list[int]:
        """Entries of each tensor that ``rounds`` sums in ``context``, in order."""

    @abstractmethod
    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums a vector over all workers, calling ``total`` once per round of communication.

        Args:
            accumulated: gradient plus residual. If ``mass`` is left behind, what this worker contributed is
                taken out of it.
            context: of this synchronization.
            total: sums a dense tensor over all workers.
            state: this worker's.

        Returns:
            The (approximate) sum, bit-identical on all workers; a dense one has shape (n,).
        """

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which vectors of type ``dtype`` are summed, and sent."""
        return dtype

    def entries(self, part: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Entries of the result from the same part of its one sum; called if ``one_sum``.

        Args:
            part: of the sum, shape (m,).
            context: of this synchronization.
            dtype: type of the result.

        Returns:
            Shape (m,).
        """
        return part


class CodeCompressor(Compressor):
    """Turns a vector into a message of known size that only decoding makes numbers of again."""

    output = Output.CODES

    @property
    def lessens(self) -> bool:
        """Whether what a message lacks is never above the vector's largest magnitude, but for what its type rounds."""
        return False

    @abstractmethod
    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a message in ``context``, for vectors of type ``dtype``: scales among the codes have it, too."""

    @abstractmethod
    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Writes a worker's message.

        Args:
            vector: shape (n,), not changed.
            context: of this synchronization.
            state: this worker's.

        Returns:
            uint8, shape (size(context, vector.dtype),).
        """

    @abstractmethod
    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """What a message stands for, the same on every worker that decodes it.

        Args:
            message: uint8, shape (size(context, dtype),).
            context: of this synchronization.
            dtype: type of the result.

        Returns:
            Shape (n,).
        """

    def take(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Writes a worker's message, and takes what it stands for out of the vector, to the same bits as in two steps.

        Args:
            vector: shape (n,), contiguous; what the message lacks is left.
            context: of this synchronization.
            state: this worker's.

        Returns:
            uint8, shape (size(context, vector.dtype),).
        """
        message = self.encode(vector, context, state)
        vector.sub_(self.decode(message, context, vector.dtype))
        return message

    def decode_into(self, vector: Tensor, message: Tensor, context: Context, *, add: bool = False) -> None:
        """Writes what a message stands for into a vector, or adds it, to the same bits as in two steps.

        Args:
            vector: shape (n,), contiguous.
            message: uint8, shape (size(context, vector.dtype),).
            context: of this synchronization.
            add: whether it is added.
        """
        decoded = self.decode(message, context, vector.dtype)
        if add:
            vector.add_(decoded)
        else:
            vector.copy_(decoded)
