"""Where momentum and weight decay are applied: by the optimizer to the average, or by each worker to its gradient.

Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2 (momentum correction, momentum factor
masking); Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (the axis).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spardl.basics.checks import check_choice, check_flag, is_a
from spardl.basics.errors import ConfigError
from spardl.method.moments import Moments
from spardl.protocol.costs import Cost
from spardl.protocol.programs import Program, Worker
from spardl.vector.bounds import Bound

__all__ = [
    "UPDATE_SCALES",
    "AutoMomentum",
    "CorrectedMomentum",
    "LocalMomentum",
    "Momentum",
    "OptimizerMomentum",
    "SgdMomentum",
]

# Factors of Adam's updates before they are averaged.
UPDATE_SCALES = ("none", "measured")


class Momentum(ABC):
    """A rule for what is compressed: the gradient, or a momentum of it.

    Attributes:
        name: how configurations call it.
        remembers: whether each worker carries moments of its gradients.
        masks: whether the velocity is stopped at the entries that were sent.
        moved: whether it is an optimizer's, moved: that then only applies averages, and a limit on the norm
            holds for each worker's own gradient.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    moved: ClassVar[bool] = False

    @property
    def decay(self) -> float:
        """Weight decay that each worker adds to its gradient before compression."""
        return 0.0

    @property
    def measures(self) -> bool:
        """Whether workers exchange more than what is compressed."""
        return False

    def init_moments(self, like: Tensor) -> Moments:
        """Zeros for a worker that begins; ``like``: its gradient, shape (n,)."""
        return Moments(like.new_empty(0), like.new_empty(0))

    @abstractmethod
    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """What is to be compressed.

        Args:
            gradient: finite, shape (n,), not changed.
            moments: the worker's, changed in place.

        Returns:
            Shape (n,).
        """

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Sees to it that what was remembered and what is to be compressed are finite.

        Args:
            applied: what ``apply`` returned, shape (n,); cut in place where it overflowed.
            peak: largest magnitude of the gradient.
            moments: the worker's, likewise.

        Returns:
            A bound of the magnitudes of ``applied``, and whether something had to be cut.
        """
        return peak, False

    def measure(self, worker: Worker, moments: Moments) -> Program[None]:
        """The program in which workers compare what they accumulated last; called if ``measures``.

        Args:
            worker: who runs it.
            moments: the worker's, changed in place, equally on all workers.

        Returns:
            Nothing.
        """
        yield from ()

    def measure_cost(self, worker: Worker, length: int, step: int) -> Cost | None:
        """Rounds and words of that program.

        Args:
            worker: who runs it.
            length: entries of the gradient.
            step: number of the synchronization, dense warm-up included.

        Returns:
            The cost; ``None`` if nothing is exchanged in this step.
        """
        return None

    def mask(self, velocity: Tensor, sent: Tensor) -> None:
        """Stops the velocity where this worker sent; called if ``masks``.

        Args:
            velocity: shape (n,), changed in place.
            sent: int64 positions, shape (m,).
        """
        velocity[sent] = 0


class OptimizerMomentum(Momentum):
    """Compresses the gradient; momentum and weight decay are the optimizer's, applied to the average."""

    name = "optimizer"
    remembers = False

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """The gradient itself."""
        return gradient


@dataclass(frozen=True)
class AutoMomentum(OptimizerMomentum):
    """What the optimizer has is each worker's, as far as the optimizer is known; see ``spardl.method.moving``.

    Args:
        beta2: share of Adam's squares that is left in the next step; ``None``: the optimizer's, at most 0.99 where
            ``scope=auto`` takes a share of each chunk, else 0.95.
        update_scale: of Adam's updates: ``none`` or ``measured``; see :class:`AdamMomentum`.

    Raises:
        ConfigError: if a value is out of range.
    """

    beta2: float | None = None
    update_scale: str = "none"

    name = "auto"

    def __post_init__(self) -> None:
        check_choice("update_scale", self.update_scale, UPDATE_SCALES)
        if self.beta2 is not None and (not is_a(float, self.beta2) or not 0 <= self.beta2 < 1):
            raise ConfigError(f"beta2 must be at least 0 and below 1, got {self.beta2!r}")


@dataclass(frozen=True)
class LocalMomentum(Momentum):
    """Each worker compresses a momentum of its own gradient; the optimizer must have none.

    Args:
        factor: share of the velocity that is left in the next step.
        weight_decay: multiple of the weights that is added to the gradient.
        nesterov: whether the gradient is looked ahead.

    Raises:
        ConfigError: if a value is out of range.
    """

    factor: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    name = "local"

    def __post_init__(self) -> None:
        if not is_a(float, self.factor) or not 0 <= self.factor < 1:
            raise ConfigError(f"momentum.factor must be at least 0 and below 1, got {self.factor!r}")
        if not is_a(float, self.weight_decay) or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"momentum.weight_decay must be a number, at least 0, got {self.weight_decay!r}")
        check_flag("momentum.nesterov", self.nesterov)

    @property
    def decay(self) -> float:
        """The configured weight decay."""
        return self.weight_decay

    def init_moments(self, like: Tensor) -> Moments:
        """A velocity."""
        return Moments(torch.zeros_like(like), like.new_empty(0))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Factor * velocity + gradient, which is the velocity from now on."""
        velocity = moments.velocity
        velocity.mul_(self.factor).add_(gradient)
        return torch.add(gradient, velocity, alpha=self.factor) if self.nesterov else velocity

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Grows by the peak; only where that is too much are the vectors looked at."""
        found = moments.bound.grow(moments.velocity, peak)
        most = Bound(moments.bound.value)
        if applied is not moments.velocity:
            found = most.grow(applied, peak) or found
        return most.value, found


@dataclass(frozen=True)
class CorrectedMomentum(LocalMomentum):
    """Momentum correction with factor masking; see ``LocalMomentum`` for the arguments.

    What is sent late was multiplied by the momentum for as long as it waited; stopping the velocity where an
    entry was sent keeps stale momentum from pushing on.
    """

    name = "corrected"
    masks = True


@dataclass(frozen=True)
class SgdMomentum(LocalMomentum):
    """The momentum of torch's SGD, moved: weight decay is what the optimizer's groups have; see ``LocalMomentum``."""

    name = "sgd"
    moved = True
