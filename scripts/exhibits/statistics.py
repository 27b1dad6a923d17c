"""What several seeds say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

__all__ = ["Range", "difference", "interval", "range_of_mean", "spread"]

RESAMPLES = 2000
LEVEL = 0.95


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


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, to four and two digits."""
    return f"{mean(values):.4g}" + (f" ± {_deviation(values):.2g}" if len(values) > 1 else "")


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is not finite, where :func:`statistics.stdev` may end in an error."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The bootstrap interval of the mean, percentiles, 95%; ``None`` for fewer than three values.

    It is NaN if a value is not finite. Of three seeds it is narrow: resamples of three values can be no farther apart
    than these are.
    """
    if len(values) < 3:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    # Only who asks for an interval needs these.
    import numpy as np  # noqa: PLC0415
    from scipy.stats import bootstrap  # noqa: PLC0415

    found = bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def range_of_mean(values: Sequence[float]) -> Range:
    """Student's 95% interval of the mean of at least one seed.

    Wider than :func:`interval` where seeds are few, as decisions need it: the bootstrap interval of three differences
    leaves out zero whenever the three have one sign, which chance alone brings about in one of four cases.
    """
    middle = mean(values)
    if len(values) < 2:
        return Range(-math.inf, middle, math.inf)
    from scipy.stats import t  # noqa: PLC0415

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * _deviation(values) / math.sqrt(len(values))
    return Range(middle - half, middle, middle + half)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Student's 95% interval of the mean difference, seed by seed: equal seeds mean equal weights and batches.

    Raises:
        ValueError: if there are not as many of one as of the other.
    """
    return range_of_mean([one - other for one, other in zip(ours, theirs, strict=True)])
