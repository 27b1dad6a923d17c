"""What a run's summary and events say."""

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

HIGHER_IS_BETTER = frozenset({"accuracy"})  # of all tasks' metrics

# What a metric's name stands for.
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "mae": "mean absolute error",
        "wer": "word error rate",
        "cer": "character error rate",
        "mlm_loss": "loss of masked tokens",
    }
)


class Curve(NamedTuple):
    """A metric, evaluation by evaluation.

    Attributes:
        steps: after which it was evaluated.
        seconds: on the clock until then; where only those of the whole run are known, steps take equally long.
        values: of the metric.
    """

    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]


def figure_of(values: Mapping[str, Any], name: str) -> float:
    """A figure of a run's files; NaN where they say ``null``, which stands for all that is not finite."""
    value: float | None = values[name]
    return math.nan if value is None else value


def final_metric(summary: Mapping[str, Any]) -> float:
    """The last value of the task's metric; NaN if it was not finite."""
    return figure_of(summary["final"], summary["metric"])


def last_epoch_loss(training: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean training loss of the last epoch, of a run's events of the kind ``train``; ``None`` without any."""
    last = [figure_of(event, "loss") for event in training if event["epoch"] > training[-1]["epoch"] - 1]
    return mean(last) if last else None


def share_of_bytes(summaries: Iterable[Mapping[str, Any]]) -> float:
    """Bytes sent, compared with a dense ring, on average over runs; 0 where nothing is to be sent."""
    pairs = [(found["step_bytes"], found["step_bytes_dense"]) for found in summaries]
    return mean(sent / dense if dense else 0.0 for sent, dense in pairs)


def metric_curve(summary: Mapping[str, Any], evaluations: Iterable[Mapping[str, Any]]) -> Curve:
    """The curve of a finished run.

    Args:
        summary: of the run.
        evaluations: its events of the kind ``eval``.
    """
    pace = summary["cluster_seconds"] / summary["steps"]
    points = [
        (event["step"], event.get("seconds", event["step"] * pace), figure_of(event, summary["metric"]))
        for event in evaluations
    ]
    steps, seconds, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(steps, seconds, values)


def in_words(metric: str) -> str:
    """The metric's name for readers."""
    return WORDS.get(metric, metric.replace("_", " "))
