"""A time that grows with the size of what is sent: the cost that schedules plan with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spardl.basics.errors import ConfigError

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear:
    """A time that grows with the size of a group, such as a + b * size or alpha + beta * bytes.

    Attributes:
        fixed: seconds of a group of any size, even of none.
        per_entry: seconds per entry.
    """

    fixed: float
    per_entry: float

    def __call__(self, entries: int) -> float:
        """Seconds of a group with so many entries."""
        return self.fixed + self.per_entry * entries

    @classmethod
    def fit(cls, entries: Sequence[int], seconds: Sequence[float]) -> Linear:
        """The line that is nearest to measured times (least squares), with no coefficient below 0.

        The squared error is convex. So if the free optimum has a coefficient below 0, the optimum sought has a
        coefficient that is exactly 0, and it is enough to compare the two fits with one coefficient: this is exact,
        and needs no iteration. Cutting off a negative coefficient and keeping the other would not be optimal.

        Args:
            entries: sizes of the measured groups, at least two different ones.
            seconds: the time of each.

        Raises:
            ConfigError: if there are not as many times as sizes, or fewer than two sizes, or a time is not finite.
        """
        if len(entries) != len(seconds) or not all(map(math.isfinite, seconds)):
            raise ConfigError(f"fusion: a cost needs one finite time for each of {len(entries)} sizes, got {seconds!r}")
        if len(set(entries)) < 2:
            raise ConfigError(f"fusion: a cost needs times of at least two sizes, got {sorted(set(entries))}")
        slope, intercept = statistics.linear_regression(entries, seconds)
        if min(slope, intercept) >= 0:
            return cls(intercept, slope)
        along = math.fsum(x * y for x, y in zip(entries, seconds, strict=True)) / sum(x * x for x in entries)
        flat = cls(max(0.0, statistics.fmean(seconds)), 0.0)
        steep = cls(0.0, max(0.0, along))
        return min(flat, steep, key=lambda line: line.error(entries, seconds))

    def error(self, entries: Sequence[int], seconds: Sequence[float]) -> float:
        """The sum of squared differences from measured times, in seconds squared."""
        return math.fsum((self(x) - y) ** 2 for x, y in zip(entries, seconds, strict=True))
