"""Statistics over seeds: Student's 95% confidence interval of the mean, for at least three seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

__all__ = ["INTERVAL", "LEAST", "Range", "difference", "interval", "range_of_mean", "seeds", "shown_interval", "spread"]

LEVEL = 0.95
# Fewest values with an interval. For two values it is 12.7 times wider than their distance, which says nothing.
LEAST = 3
# Student's interval of a few accuracies may exceed 1.
LIMITS = {"accuracy": (0.0, 1.0)}
# Name in columns and captions.
INTERVAL = f"Student's {LEVEL:.0%} interval"


class Range(NamedTuple):
    """Confidence interval of a mean.

    Attributes:
        low: Lower end; infinite if there are too few values.
        mean: Mean of the values.
        high: Upper end; infinite if there are too few values.
    """

    low: float
    mean: float
    high: float


def seeds(count: int) -> str:
    """Returns the number of seeds, for readers."""
    return f"{count} seed{'s' if count > 1 else ''}"


def spread(values: Sequence[float]) -> str:
    """Returns the mean with half of the interval; for fewer than three seeds, with their number."""
    found = range_of_mean(values)
    if len(values) < LEAST:
        return f"{found.mean:.4g} ({seeds(len(values))})"
    return f"{found.mean:.4g} ± {found.high - found.mean:.2g}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95% interval of the mean; ``None`` for fewer than three values, NaN if a value is not finite."""
    found = range_of_mean(values)
    return None if len(values) < LEAST else (found.low, found.high)


def shown_interval(values: Sequence[float], metric: str = "") -> str:
    """The interval to four digits, within the range of the metric, or the number of seeds if there are too few."""
    bounds = interval(values)
    if bounds is None:
        return f"none of {seeds(len(values))}"
    least, most = LIMITS.get(metric, (-math.inf, math.inf))
    return f"{max(bounds[0], least):.4g} to {min(bounds[1], most):.4g}"


def range_of_mean(values: Sequence[float]) -> Range:
    """Returns Student's 95% interval of the mean of at least one value; infinite for fewer than three.

    A bootstrap of three differences excludes zero whenever all have the same sign, which happens by chance in one of
    four cases; Student's interval does so in one of twenty for normal differences.
    """
    middle = mean(values)
    if len(values) < LEAST:
        return Range(-math.inf, middle, math.inf)
    from scipy.stats import t  # noqa: PLC0415 - slow to import, and only intervals need it

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * _deviation(values) / math.sqrt(len(values))
    return Range(middle - half, middle, middle + half)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is not finite, where :func:`statistics.stdev` may end in an error."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Returns Student's 95% interval of the mean of paired differences; equal seeds have equal weights and batches.

    Raises:
        ValueError: If the numbers of values differ.
    """
    return range_of_mean([one - other for one, other in zip(ours, theirs, strict=True)])
