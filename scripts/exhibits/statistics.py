"""What several seeds say together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

__all__ = ["interval", "spread"]

RESAMPLES = 2000
LEVEL = 0.95


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, to four and two digits."""
    return f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The bootstrap interval of the mean, percentiles, 95%; ``None`` for fewer than three values.

    Of three seeds it is narrow: resamples of three values can be no farther apart than these are.
    """
    if len(values) < 3:
        return None
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
