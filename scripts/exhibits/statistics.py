"""What several seeds say together: Student's 95% interval of the mean, of three seeds at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

__all__ = ["INTERVAL", "LEAST", "Range", "difference", "interval", "range_of_mean", "seeds", "shown_interval", "spread"]

LEVEL = 0.95
# So many values have an interval. Of two, Student's is 12.7 times as wide as their distance: it says nothing.
LEAST = 3
# Student's interval of a few accuracies may exceed 1.
LIMITS = {"accuracy": (0.0, 1.0)}
# What columns and captions call it.
INTERVAL = f"Student's {LEVEL:.0%} interval"


class Range(NamedTuple):
    """Where a mean probably lies.

    Attributes:
        low: the lower end, infinite if the values are too few.
        mean: of the values.
        high: the upper end, likewise.
    """

    low: float
    mean: float
    high: float


def seeds(count: int) -> str:
    """How many there are, in words."""
    return f"{count} seed{'s' if count > 1 else ''}"


def spread(values: Sequence[float]) -> str:
    """The mean to four digits, and half of Student's 95% interval to two; of fewer than three seeds, how many."""
    found = range_of_mean(values)
    if len(values) < LEAST:
        return f"{found.mean:.4g} ({seeds(len(values))})"
    return f"{found.mean:.4g} ± {found.high - found.mean:.2g}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean; ``None`` for fewer than three values, NaN if a value is not finite."""
    found = range_of_mean(values)
    return None if len(values) < LEAST else (found.low, found.high)


def shown_interval(values: Sequence[float], metric: str = "") -> str:
    """The interval to four digits, within the range of the metric, or how many seeds are too few for one."""
    bounds = interval(values)
    if bounds is None:
        return f"none of {seeds(len(values))}"
    least, most = LIMITS.get(metric, (-math.inf, math.inf))
    return f"{max(bounds[0], least):.4g} to {min(bounds[1], most):.4g}"


def range_of_mean(values: Sequence[float]) -> Range:
    """Student's 95% interval of the mean of at least one value; infinite for fewer than three.

    A bootstrap of three differences would leave out zero whenever the three have one sign, which chance alone brings
    about in one of four cases; Student's does so in one of twenty, if they are normal.
    """
    middle = mean(values)
    if len(values) < LEAST:
        return Range(-math.inf, middle, math.inf)
    # Only who asks for an interval needs it.
    from scipy.stats import t  # noqa: PLC0415

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * _deviation(values) / math.sqrt(len(values))
    return Range(middle - half, middle, middle + half)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is not finite, where :func:`statistics.stdev` may end in an error."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Student's 95% interval of the mean difference, seed by seed: equal seeds mean equal weights and batches.

    Raises:
        ValueError: if there are not as many of one as of the other.
    """
    return range_of_mean([one - other for one, other in zip(ours, theirs, strict=True)])
