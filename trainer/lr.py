"""Learning-rate schedules: factors of the learning rate that depend only on the epoch.

Checkpoints therefore store no state of a schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from spardl.basics.checks import is_finite, is_number
from spardl.basics.errors import ConfigError

__all__ = ["Constant", "Cosine", "Exponential", "LinearDecay", "LrSchedule", "MultiStep"]


@dataclass(frozen=True)
class LrSchedule(ABC):
    """A linear warm-up followed by a decay.

    Args:
        warmup_epochs: Length of the warm-up in epochs; 0 for no warm-up.
        warmup_fraction: Length of the warm-up as a fraction of the run, in [0, 1); 0 uses ``warmup_epochs``.
        warmup_factor: Factor that the learning rate is multiplied by at the start of the warm-up, in [0, 1].

    Raises:
        ConfigError: If a value is out of range.
    """

    warmup_epochs: float = 0.0
    warmup_factor: float = 0.1
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        numbers = is_finite(self.warmup_epochs) and is_finite(self.warmup_factor)
        if not numbers or self.warmup_epochs < 0 or not 0 <= self.warmup_factor <= 1:
            raise ConfigError(
                "lr_schedule.warmup_epochs must be at least 0 and warmup_factor from 0 to 1, got "
                f"warmup_epochs={self.warmup_epochs} and warmup_factor={self.warmup_factor}"
            )
        if not is_number(float, self.warmup_fraction) or not 0 <= self.warmup_fraction < 1:
            raise ConfigError(f"lr_schedule.warmup_fraction must be at least 0 and below 1, got {self.warmup_fraction}")
        if self.warmup_epochs and self.warmup_fraction:
            raise ConfigError(
                f"lr_schedule.warmup_epochs={self.warmup_epochs} and warmup_fraction={self.warmup_fraction} exclude "
                "each other; set one of them to 0"
            )

    def factor(self, epoch: float, epochs: float) -> float:
        """Returns the factor that the learning rate is multiplied by.

        Args:
            epoch: Number of epochs trained so far, with fractions.
            epochs: Number of epochs of the whole run.
        """
        warmup = self._warmup(epochs)
        # The comparison is strict, so that a warm-up of length 0 is never divided by.
        if epoch < warmup:
            return self.warmup_factor + (1 - self.warmup_factor) * epoch / warmup
        return self._decay(epoch, epochs)

    @abstractmethod
    def _decay(self, epoch: float, epochs: float) -> float:
        """Returns the factor after the warm-up."""

    def _warmup(self, epochs: float) -> float:
        return self.warmup_fraction * epochs or self.warmup_epochs

    def _progress(self, epoch: float, epochs: float) -> float:
        warmup = self._warmup(epochs)
        # A resumed run of another world size may end slightly late, and a run may consist of its warm-up only.
        return min(1.0, (epoch - warmup) / max(epochs - warmup, 1e-9))


@dataclass(frozen=True)
class Constant(LrSchedule):
    """Keeps the learning rate constant after the warm-up."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(LrSchedule):
    """Cosine annealing to zero after the warm-up (Loshchilov and Hutter, SGDR, ICLR 2017)."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * self._progress(epoch, epochs)))


@dataclass(frozen=True)
class LinearDecay(LrSchedule):
    """Linear decay to zero after the warm-up, as in the training of BERT."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 1 - self._progress(epoch, epochs)


@dataclass(frozen=True)
class Exponential(LrSchedule):
    """Multiplies the learning rate by a constant factor after every epoch.

    Args:
        gamma: Factor per epoch since the start of training, in (0, 1].

    Raises:
        ConfigError: If a value is out of range.
    """

    gamma: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(float, self.gamma) or not 0 < self.gamma <= 1:
            raise ConfigError(f"lr_schedule.gamma must be above 0 and at most 1, got {self.gamma}")

    def _decay(self, epoch: float, epochs: float) -> float:
        # Epochs count from the start of training, including the warm-up.
        return float(self.gamma ** math.floor(epoch))


@dataclass(frozen=True)
class MultiStep(LrSchedule):
    """Multiplies the learning rate by a constant factor at given epochs.

    Args:
        milestones: Epochs at which the learning rate changes.
        gamma: Factor at each milestone.

    Raises:
        ConfigError: If a value is not a finite number.
    """

    milestones: Sequence[float] = (81, 122, 155)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.milestones, Sequence) and all(is_finite(epoch) for epoch in self.milestones)
        if not listed or not is_finite(self.gamma):
            raise ConfigError(
                "lr_schedule.milestones must be a list of epochs and gamma a finite number, got "
                f"milestones={self.milestones} and gamma={self.gamma}"
            )

    def _decay(self, epoch: float, epochs: float) -> float:
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
