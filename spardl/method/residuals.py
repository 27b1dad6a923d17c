"""Error feedback: where the discarded mass goes.

The rules differ in what they call lost (Zhao et al., SparDL, ICDE 2024, global residual collection):

* *local*: an entry that this worker did not select stays with it.
* *end-procedure*: an entry that it selected, but whose index is absent from the final result, comes back.
* *in-procedure*: an index that is present in the result, of which some mass was dropped on the way, keeps
  that mass at the worker that dropped it.

LRES keeps the first kind, PRES the first two, GRES all three, and only GRES conserves mass when a
communicator re-selects on the way; none does with a decay. What a compressor leaves behind of a whole vector,
entry by entry (a low-rank approximation, a sign), knows no positions: only LRES can keep it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Part
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
    """A rule for what one worker carries over to its next gradient.

    Attributes:
        name: how configurations call it.
        remembers: whether anything is carried over.
        needs_entries: whether the rule is about single entries that were sent, and others that were not.
        needs_count: whether it must know how many entries are sent before they are chosen.
        rescales: whether the result is another than the sum.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True
    needs_entries: ClassVar[bool] = False
    needs_count: ClassVar[bool] = False
    rescales: ClassVar[bool] = False

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Adds a gradient to what was carried over, in place.

        Args:
            memory: shape (n,): the residual; afterwards residual plus gradient.
            gradient: finite, shape (n,); ``None`` for a step without one.
            candidates: of the memory's largest entries; up to date afterwards.
            clear: whether the gradient becomes zero, or stays as it is.
        """
        candidates.add(memory, gradient, clear=clear)

    def scale(self, total: SparseVector, parts: Sequence[Part]) -> SparseVector:
        """What the result is made of the sum: itself.

        Args:
            total: over all workers.
            parts: how many entries of which ranges were sent.

        Returns:
            What is to be divided by P.
        """
        return total

    @abstractmethod
    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Turns the vector that a synchronization leaves behind into the new residual, in place.

        Args:
            accumulated: the vector after the program has taken from it and added to it.
            final: int64, shape (m,), strictly increasing: the indices of the final result.
        """


class NoResidual(Residual):
    """Forgets what was not sent."""

    name = "none"
    remembers = False

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Replaces the memory by the gradient: nothing is carried over."""
        if gradient is None:
            memory.zero_()
        else:
            memory.copy_(gradient)
            if clear:
                gradient.zero_()
        candidates.add(memory, None)

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Keeps nothing; the next gradient overwrites the memory."""


class RescaledResidual(NoResidual):
    """Forgets what was not sent, and multiplies what was by n / k.

    Makes a random choice of k out of n entries right on average (Foroutan Eghlidi and Jaggi, Sparse Communication
    for Training Deep Networks, 2020, axis "error feedback off").
    """

    name = "rescaled"
    needs_entries = True
    needs_count = True
    rescales = True

    def scale(self, total: SparseVector, parts: Sequence[Part]) -> SparseVector:
        """Every entry times the length of its part / the entries sent of it."""
        device, dtype = total.indices.device, total.values.dtype
        ends = torch.tensor([part.stop for part in parts], dtype=torch.int64, device=device)
        factors = torch.tensor([(part.stop - part.start) / part.k for part in parts], dtype=dtype, device=device)
        own = factors[torch.searchsorted(ends, total.indices, right=True)]
        return SparseVector(total.indices, total.values * own, total.length)


@dataclass(frozen=True)
class ErrorFeedback(Residual):
    """Carries over what is late.

    Args:
        decay: share of it that is left in the next step, so that what is very late is forgotten: of a gradient that
            waits, no more than 1 / (1 - decay) steps add up. ``None`` keeps all, as published. SparseLoCo (Sarfi et
            al., arXiv 2508.15706) has 0.95, of its outer steps.

    Raises:
        ConfigError: if it is not between 0 and 1.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and (not is_a(float, self.decay) or not 0 < self.decay < 1):
            raise ConfigError(f"residual.decay must be above 0 and below 1, or null for none, got {self.decay!r}")

    def accumulate(
        self, memory: Tensor, gradient: Tensor | None, candidates: Candidates, *, clear: bool = False
    ) -> None:
        """Adds a gradient to what is left of what was carried over, in place; see :class:`Residual`."""
        if self.decay is not None:
            memory.mul_(self.decay)
        super().accumulate(memory, gradient, candidates, clear=clear)


@dataclass(frozen=True)
class LocalResidual(ErrorFeedback):
    """LRES: keeps what this worker did not select itself. See :class:`ErrorFeedback`."""

    name = "local"

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector and clears what this worker selected."""
        accumulated.restore_but(final, whole=True)
        accumulated.add_errors(final)


@dataclass(frozen=True)
class PartialResidual(ErrorFeedback):
    """PRES: also keeps what this worker selected but the final result lacks (the rule of Ok-Topk, too).

    See :class:`ErrorFeedback`.
    """

    name = "partial"
    needs_entries = True

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector and clears what this worker selected and the result holds."""
        accumulated.restore_but(final, whole=False)
        accumulated.add_errors(final)


@dataclass(frozen=True)
class GlobalResidual(ErrorFeedback):
    """GRES: also keeps, where the result has an index, the mass this worker dropped on the way.

    See :class:`ErrorFeedback`.
    """

    name = "global"
    needs_entries = True

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector except at the result's indices."""
        accumulated.restore_others(final)
