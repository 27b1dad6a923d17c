"""Error feedback: where the discarded mass goes.

The rules differ in what they call lost (Zhao et al., SparDL, ICDE 2024, global residual collection):

* *local*: an entry that this worker did not select stays with it.
* *end-procedure*: an entry that it selected, but whose index is absent from the final result, comes back.
* *in-procedure*: an index that is present in the result, of which some mass was dropped on the way, keeps
  that mass at the worker that dropped it.

LRES keeps the first kind, PRES the first two, GRES all three, and only GRES conserves mass when a
communicator re-selects on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from spardl.accumulator import Accumulator

__all__ = ["GlobalResidual", "LocalResidual", "NoResidual", "PartialResidual", "Residual"]


class Residual(ABC):
    """A rule for what one worker carries over to its next gradient.

    Attributes:
        name: how configurations call it.
        remembers: whether anything is carried over.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True

    def accumulate(self, memory: Tensor, gradient: Tensor) -> bool:
        """Adds a gradient to what was carried over, in place.

        A gradient with a NaN or an infinity is left out: once inside, it would come back at every step.

        Args:
            memory: shape (n,): the residual; afterwards residual plus gradient.
            gradient: shape (n,); not changed.

        Returns:
            Whether the gradient was accepted.
        """
        if gradient.numel() and not bool(torch.linalg.vector_norm(gradient, ord=torch.inf).isfinite()):
            return False
        memory.add_(gradient)
        return True

    @abstractmethod
    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Turns the vector that a synchronization leaves behind into the new residual, in place.

        Args:
            accumulated: the vector after the program has taken from it and added to it.
            final: int64, strictly increasing: the indices of the final result.
        """


class NoResidual(Residual):
    """Forgets what was not sent."""

    name = "none"
    remembers = False

    def accumulate(self, memory: Tensor, gradient: Tensor) -> bool:
        """Replaces the memory by the gradient, whatever it holds: nothing is carried over."""
        memory.copy_(gradient)
        return True

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Keeps nothing; the next gradient overwrites the memory."""


class LocalResidual(Residual):
    """LRES: keeps what this worker did not select itself."""

    name = "local"

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector and clears what this worker selected."""
        accumulated.restore()
        accumulated.values[accumulated.taken()] = 0


class PartialResidual(Residual):
    """PRES: also keeps what this worker selected but the final result lacks (the rule of Ok-Topk, too)."""

    name = "partial"

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector and clears what this worker selected and the result holds."""
        accumulated.restore()
        taken = accumulated.taken()
        accumulated.values[taken[torch.isin(taken, final, assume_unique=True)]] = 0


class GlobalResidual(Residual):
    """GRES: also keeps, where the result has an index, the mass this worker dropped on the way."""

    name = "global"

    def keep(self, accumulated: Accumulator, final: Tensor) -> None:
        """Restores the original vector except at the result's indices."""
        dropped = accumulated.values[final]
        # Sums of finite numbers can overflow on the way; the overflow is in the result already.
        dropped = torch.where(dropped.isfinite(), dropped, 0)
        accumulated.restore()
        accumulated.values[final] = dropped
