"""Learning-rate schedules: a factor as a function of the epoch, so nothing has to be saved."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from spardl.checks import is_a
from spardl.errors import ConfigError

__all__ = ["Constant", "Cosine", "LinearDecay", "LrSchedule", "MultiStep"]


@dataclass(frozen=True)
class LrSchedule(ABC):
    """A linear warm-up followed by a decay.

    Args:
        warmup_epochs: length of the warm-up; 0 for none.
        warmup_factor: share of the learning rate that it starts with, in [0, 1].

    Raises:
        ConfigError: if a value is out of range.
    """

    warmup_epochs: float = 0.0
    warmup_factor: float = 0.1

    def __post_init__(self) -> None:
        numbers = is_a(float, self.warmup_epochs) and is_a(float, self.warmup_factor)
        if not numbers or self.warmup_epochs < 0 or not 0 <= self.warmup_factor <= 1:
            raise ConfigError(
                "lr_schedule needs warmup_epochs >= 0 and warmup_factor in [0, 1], got "
                f"{self.warmup_epochs} and {self.warmup_factor}"
            )

    def factor(self, epoch: float, epochs: float) -> float:
        """What the learning rate is multiplied by.

        Args:
            epoch: epochs trained so far, with fractions.
            epochs: epochs in all.
        """
        if epoch < self.warmup_epochs:
            return self.warmup_factor + (1 - self.warmup_factor) * epoch / self.warmup_epochs
        return self._decay(epoch, epochs)

    @abstractmethod
    def _decay(self, epoch: float, epochs: float) -> float:
        """The factor after the warm-up."""

    def _progress(self, epoch: float, epochs: float) -> float:
        return min(1.0, (epoch - self.warmup_epochs) / max(epochs - self.warmup_epochs, 1e-9))


@dataclass(frozen=True)
class Constant(LrSchedule):
    """No decay."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(LrSchedule):
    """Half a cosine wave down to zero (Loshchilov and Hutter, SGDR, ICLR 2017)."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * self._progress(epoch, epochs)))


@dataclass(frozen=True)
class LinearDecay(LrSchedule):
    """A straight line down to zero, as BERT is trained."""

    def _decay(self, epoch: float, epochs: float) -> float:
        return 1 - self._progress(epoch, epochs)


@dataclass(frozen=True)
class MultiStep(LrSchedule):
    """Multiplies by a factor at given epochs.

    Args:
        milestones: epochs at which the rate falls.
        gamma: what it is multiplied by each time.

    Raises:
        ConfigError: if a value is not a number.
    """

    milestones: Sequence[float] = (81, 122, 155)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.milestones, Sequence) and all(is_a(float, epoch) for epoch in self.milestones)
        if not listed or not is_a(float, self.gamma):
            raise ConfigError(
                "lr_schedule needs a list of epochs as milestones and a number as gamma, got "
                f"{self.milestones} and {self.gamma}"
            )

    def _decay(self, epoch: float, epochs: float) -> float:
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))
