"""Reads metrics from the summary and the events of a run; means and Student's intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

LEVEL = 0.95
# Fewest values with an interval. For two values it is 12.7 times wider than their distance, which says nothing.
LEAST = 3
# Student's interval of a few accuracies may exceed 1.
LIMITS = {"accuracy": (0.0, 1.0)}
# Name in columns and captions.
INTERVAL = f"Student's {LEVEL:.0%} interval"


class Range(NamedTuple):
    """Confidence interval of a mean; its ends are infinite for fewer than three values."""

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


def shown_interval(values: Sequence[float], metric: str = "") -> str:
    """The interval to four digits, within the range of the metric, or the number of seeds if there are too few."""
    if len(values) < LEAST:
        return f"none of {seeds(len(values))}"
    low, _, high = range_of_mean(values)
    least, most = LIMITS.get(metric, (-math.inf, math.inf))
    return f"{max(low, least):.4g} to {min(high, most):.4g}"


def range_of_mean(values: Sequence[float]) -> Range:
    """Returns Student's 95% interval of the mean of at least one value; infinite for fewer than three.

    A bootstrap of three differences excludes zero whenever all have the same sign, which happens by chance in one of
    four cases; Student's interval does so in one of twenty for normal differences.
    """
    middle = mean(values)
    if len(values) < LEAST:
        return Range(-math.inf, middle, math.inf)
    from scipy.stats import t  # noqa: PLC0415 - slow to import, and only intervals need it

    # With a value that is not finite, statistics.stdev may end in an error.
    deviation = stdev(values) if all(map(math.isfinite, values)) else math.nan
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Range(middle - half, middle, middle + half)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Returns Student's 95% interval of the mean of paired differences; equal seeds have equal weights and batches."""
    return range_of_mean([one - other for one, other in zip(ours, theirs, strict=True)])


HIGHER_IS_BETTER = frozenset({"accuracy"})  # among the metrics of all tasks

# Names of metrics for readers.
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "mae": "mean absolute error",
        "wer": "word error rate",
        "cer": "character error rate",
        "mlm_loss": "loss of masked tokens",
    }
)


class Curve(NamedTuple):
    """A metric by evaluation, after steps and seconds; equal times per step are assumed if only their sum is known."""

    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]


def figure_of(values: Mapping[str, Any], name: str) -> float:
    """Returns a figure of a run; NaN for ``null``, which stands for all non-finite values."""
    value: float | None = values[name]
    return math.nan if value is None else value


def final_metric(summary: Mapping[str, Any]) -> float:
    """Returns the final value of the metric; NaN if it was not finite."""
    return figure_of(summary["final"], summary["metric"])


def last_epoch_loss(training: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean training loss of the last epoch, from events of the kind ``train``; ``None`` without any."""
    last = [figure_of(event, "loss") for event in training if event["epoch"] > training[-1]["epoch"] - 1]
    return mean(last) if last else None


def share_of_bytes(summaries: Iterable[Mapping[str, Any]]) -> float:
    """Returns the bytes sent as a share of a dense ring all-reduce, on average over runs; 0 for a single worker."""
    pairs = [(found["step_bytes"], found["step_bytes_dense"]) for found in summaries]
    return mean(sent / dense if dense else 0.0 for sent, dense in pairs)


def metric_curve(summary: Mapping[str, Any], evaluations: Iterable[Mapping[str, Any]]) -> Curve:
    """Returns the curve of a finished run from its events of the kind ``eval``."""
    pace = summary["cluster_seconds"] / summary["steps"]
    points = [
        (event["step"], event.get("seconds", event["step"] * pace), figure_of(event, summary["metric"]))
        for event in evaluations
    ]
    steps, seconds, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(steps, seconds, values)


def in_words(metric: str) -> str:
    """Returns the name of a metric for readers."""
    return WORDS.get(metric, metric.replace("_", " "))


class Target(NamedTuple):
    """A metric value that counts as reached, and the words for it."""

    value: float
    lower: bool  # whether lower values are better
    words: str

    @classmethod
    def near(cls, reached: float, lower: bool, metric: str, margin: float) -> Target:
        """Returns the metric that dense training reached, less a share ``margin`` of it."""
        value = reached + (1 if lower else -1) * margin * abs(reached)
        sign = "at most" if lower else "at least"
        name = in_words(metric)
        return cls(value, lower, f"{name}; target {sign} {value:.4g}, within {margin:.0%} of where dense training ends")


def reached(curve: Curve, target: Target) -> float | None:
    """Returns the seconds until the first evaluation that reaches the target, if one does."""
    for seconds, value in zip(curve.seconds, curve.values, strict=True):
        if value <= target.value if target.lower else value >= target.value:
            return seconds
    return None
