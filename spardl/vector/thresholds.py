"""A magnitude threshold that is used again for many steps, and corrected a little after each.

Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
(reuse of thresholds), and its official code (the bands and factors). To find the threshold ahead of its period when the
count has gone far astray is an addition of this library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError

__all__ = ["Reuse", "check_number", "smallest_magnitude"]


@dataclass(frozen=True)
class Reuse:
    """How a threshold is kept near the one that selects k entries.

    Args:
        low: a count below this multiple of k lowers the threshold.
        lower_factor: factor that it is divided by then.
        high: a count above this multiple of k raises the threshold.
        raise_factor: factor that it is multiplied by then.
        reevaluate_beyond: a count above this multiple of k, or below k divided by it, has the threshold found at once,
            an addition to what is published; ``None``: only at the end of the period, as published.
    """

    low: float = 0.6667
    lower_factor: float = 1.012
    high: float = 1.25
    raise_factor: float = 1.012
    reevaluate_beyond: float | None = 2.0

    def corrected(self, threshold: float, count: int, k: int) -> float:
        """The threshold of the next step.

        Args:
            threshold: magnitude, of this step.
            count: entries that it selected.
            k: entries wanted.

        Returns:
            A magnitude.
        """
        if count < self.low * k:
            return threshold / self.lower_factor
        return threshold * self.raise_factor if count > self.high * k else threshold

    def is_astray(self, count: int, k: int) -> bool:
        """Whether the threshold that selected ``count`` entries, where ``k`` are wanted, must not be used."""
        beyond = self.reevaluate_beyond
        return beyond is not None and not k / beyond <= count <= beyond * k

    def check_reuse(self, group: str) -> None:
        """Checks these fields as those of a configuration group, ``group``.

        Raises:
            ConfigError: if a value is out of range.
        """
        check_number(group, "low", self.low, 0, 1)
        check_number(group, "high", self.high, 1)
        for name in ("lower_factor", "raise_factor"):
            check_number(group, name, getattr(self, name), 1)
        if self.reevaluate_beyond is not None:
            check_number(group, "reevaluate_beyond", self.reevaluate_beyond, 1)


def check_number(group: str, name: str, value: object, low: float, high: float = math.inf) -> None:
    """Checks that a configured value is a finite number within limits.

    Raises:
        ConfigError: if it is not.
    """
    if not is_a(float, value) or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ConfigError(f"{group}.{name} must be a number, {limits}, got {value!r}")


def smallest_magnitude(values: Tensor) -> float:
    """The threshold that all of these ``values``, shape (m,), reach; 0 if there are none.

    At most the largest number of their type.
    """
    if not values.numel():
        return 0.0
    return min(float(values.abs().min()), torch.finfo(values.dtype).max)
