"""What every compressor declares, so that parts fit together by declaration and not by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, TypeAlias

from torch import Tensor

from spardl.accumulator import Select
from spardl.programs import Program
from spardl.state import State

__all__ = ["Compressor", "DenseCompressor", "Output", "SparseCompressor", "Total"]

Total: TypeAlias = Callable[[Tensor], Program[Tensor]]
"""``yield from total(tensor)``: the sum of a dense tensor over all workers."""


class Output(Enum):
    """What a compressor makes of a gradient."""

    DENSE = "a dense vector"
    SPARSE = "a sorted sparse vector"


class Compressor(ABC):
    """What one worker keeps of a gradient.

    Attributes:
        name: how configurations call it.
        output: what it makes of a gradient; a communicator must be able to sum that.
        discards: whether it leaves mass behind, which a residual can keep.
    """

    name: ClassVar[str]
    output: ClassVar[Output]
    discards: ClassVar[bool]

    def init_state(self) -> State:
        """A fresh state for one worker."""
        return State()


class SparseCompressor(Compressor):
    """Keeps some entries of a vector."""

    output = Output.SPARSE
    discards = True

    @abstractmethod
    def count(self, length: int) -> int:
        """How many entries of a vector of this length are kept: in ``[min(1, length), length]``."""

    @abstractmethod
    def selector(self, state: State) -> Select:
        """The selection, bound to one worker's state.

        Returns:
            ``select(values, k, start)``: sorted local positions of exactly ``min(k, len(values))`` entries of
            the block of the whole vector that begins at ``start``.
        """


class DenseCompressor(Compressor):
    """Turns a vector into dense tensors that can be summed as they are."""

    @abstractmethod
    def rounds(self, vector: Tensor, total: Total, state: State) -> Program[Tensor]:
        """Sums a vector over all workers, calling ``total`` once per round of communication.

        Args:
            vector: shape (n,); may be changed.
            total: sums a dense tensor over all workers.
            state: this worker's.

        Returns:
            The (approximate) sum, shape (n,).
        """
