"""Residual rules (error feedback): which part of a gradient a worker keeps for the next step.

The rules differ in the kinds of unsent entries that they keep (Zhao et al., SparDL, ICDE 2024, global residual
collection):

* *local*: an entry that this worker did not select.
* *end-procedure*: an entry that this worker selected, but whose index is missing from the result.
* *in-procedure*: an entry that this worker dropped from a partial sum, although its index is in the result.

LRES keeps the first kind, PRES the first two, GRES all three. If a communicator drops entries of partial sums, only
GRES conserves mass: the result and the residuals add up to the gradients. With a decay, no rule does. Compressors that
change all entries (low-rank approximation, signs) do not select any, so only LRES can keep their errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Range
from spardl.vector.sparse import SparseVector

__all__ = [
    "ErrorFeedback",
    "GlobalResidual",
    "LocalResidual",
    "NoResidual",
    "PartialResidual",
    "RescaledResidual",
    "Residual",
]


class Residual(ABC):
    """A rule for error feedback: which unsent entries (the residual) a worker adds to its next gradient.

    Attributes:
        name: Name of the rule in configurations.
        remembers: Whether the rule keeps a residual.
        needs_entries: Whether the rule distinguishes sent entries from unsent ones.
        needs_count: Whether the rule must know the number of sent entries before the selection.
        rescales: Whether ``scale`` changes the sum.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True
    needs_entries: ClassVar[bool] = False
    needs_count: ClassVar[bool] = False
    rescales: ClassVar[bool] = False

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Adds a gradient to the residual, in place.

        Args:
            memory: Residual, shape (n,); holds residual plus gradient afterwards.
            gradient: Finite gradient, shape (n,); ``None`` for a step without one.
            candidates: Positions among which the largest entries of ``memory`` are searched; updated.
            clear: Whether to set the gradient to zero.
        """
        candidates.add(memory, gradient, clear=clear)

    def scale(self, total: SparseVector, parts: Sequence[Range]) -> SparseVector:
        """Scales the sum of all workers before it is divided by P; by default it stays unchanged.

        Args:
            total: Sparse sum over all workers.
            parts: Ranges of the vector; ``k`` of each is the number of entries that were sent from it.

        Returns:
            The sparse vector to divide by P.
        """
        return total

    @abstractmethod
    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Converts the accumulated vector into the new residual, in place, after a synchronization.

        Args:
            accumulated: Gradient plus residual, changed by the synchronization: entries that this worker selected are
                removed, and entries that it dropped from partial sums are added.
            final: Indices of the final result: int64, shape (m,), strictly increasing.
        """


class NoResidual(Residual):
    """Keeps no residual: unsent entries are lost."""

    name = "none"
    remembers = False

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Overwrites the memory with the gradient, or with zeros in a step without one."""
        if gradient is None:
            memory.zero_()
        else:
            memory.copy_(gradient)
            if clear:
                gradient.zero_()
        candidates.add(memory, None)

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Does nothing, because the next gradient overwrites the memory."""


class RescaledResidual(NoResidual):
    """Keeps no residual, and multiplies sent entries by n / k.

    This makes a random choice of k out of n entries unbiased (Foroutan Eghlidi and Jaggi, Sparse Communication
    for Training Deep Networks, 2020, experiments without error feedback).
    """

    name = "rescaled"
    needs_entries = True
    needs_count = True
    rescales = True

    def scale(self, total: SparseVector, parts: Sequence[Range]) -> SparseVector:
        """Multiplies each entry by n / k of its range: its length, divided by the number of entries sent from it."""
        device, dtype = total.indices.device, total.values.dtype
        ends = torch.tensor([part.stop for part in parts], dtype=torch.int64, device=device)
        factors = torch.tensor([(part.stop - part.start) / part.k for part in parts], dtype=dtype, device=device)
        own = factors[torch.searchsorted(ends, total.indices, right=True)]
        return SparseVector(total.indices, total.values * own, total.length)


@dataclass(frozen=True)
class ErrorFeedback(Residual):
    """Base class of the rules that keep a residual.

    Args:
        decay: Share of the residual that is added to the next gradient, so that old gradients fade: an unsent entry
            never exceeds 1 / (1 - decay) times the largest gradient. ``None`` adds the whole residual, as published.
            SparseLoCo (Sarfi et al., arXiv 2508.15706) uses 0.95 in each outer step.

    Raises:
        ConfigError: If ``decay`` is not between 0 and 1.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and (not is_number(float, self.decay) or not 0 < self.decay < 1):
            raise ConfigError(f"residual.decay must be above 0 and below 1, or null, got {self.decay!r}")

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Multiplies the residual by ``decay``, if it is set, then adds the gradient, in place."""
        if self.decay is not None:
            memory.mul_(self.decay)
        super().accumulate(memory, gradient, candidates, clear=clear)


@dataclass(frozen=True)
class LocalResidual(ErrorFeedback):
    """LRES: keeps the entries that this worker did not select; the argument is that of :class:`ErrorFeedback`."""

    name = "local"

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores gradient plus residual, except that selected entries keep only their rounding errors."""
        accumulated.restore_unsettled(final, whole=True)
        accumulated.add_errors(final)


@dataclass(frozen=True)
class PartialResidual(ErrorFeedback):
    """PRES: keeps unselected entries, and selected entries that are missing from the result, as Ok-Topk does.

    The argument is that of :class:`ErrorFeedback`.
    """

    name = "partial"
    needs_entries = True

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores gradient plus residual, except that selected entries in the result keep only rounding errors."""
        accumulated.restore_unsettled(final, whole=False)
        accumulated.add_errors(final)


@dataclass(frozen=True)
class GlobalResidual(ErrorFeedback):
    """GRES: keeps the entries of PRES, and those that this worker dropped from partial sums at indices of the result.

    The argument is that of :class:`ErrorFeedback`.
    """

    name = "global"
    needs_entries = True

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores gradient plus residual, except at indices of the result, where only dropped summands remain."""
        accumulated.restore_others(final)
