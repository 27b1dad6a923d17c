"""Reads metrics from the summary and the events of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = [
    "HIGHER_IS_BETTER",
    "Curve",
    "figure_of",
    "final_metric",
    "in_words",
    "last_epoch_loss",
    "metric_curve",
    "share_of_bytes",
]

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
    """A metric by evaluation.

    Attributes:
        steps: Steps before each evaluation.
        seconds: Clock at each evaluation; equal times per step are assumed if only the total is known.
        values: Values of the metric.
    """

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
    """Returns the curve of a finished run.

    Args:
        summary: Summary of the run.
        evaluations: Events of the kind ``eval``.
    """
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
