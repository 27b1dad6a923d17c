"""What a run's summary and events say, and how runs are drawn side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

__all__ = ["Curve", "draw_curves", "figure_of", "final_metric", "metric_curve", "share_of_bytes"]

DASHES = ("-", "--", "-.", ":")
# More names, or longer ones, than a legend beside the lines has room for.
ROOM, LONG = 7, 30


class Curve(NamedTuple):
    """A metric, evaluation by evaluation.

    Attributes:
        steps: after which it was evaluated.
        seconds: on the cluster's clock until then; steps take equally long.
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


def share_of_bytes(summaries: Iterable[Mapping[str, Any]]) -> float:
    """Bytes sent, compared with a dense ring, on average over runs; 1 where there is nothing to send."""
    pairs = [(found["step_bytes"], found["step_bytes_dense"]) for found in summaries]
    return mean(sent / dense if dense else 1.0 for sent, dense in pairs)


def metric_curve(summary: Mapping[str, Any], evaluations: Iterable[Mapping[str, Any]]) -> Curve:
    """The curve of a finished run.

    Args:
        summary: of the run.
        evaluations: its events of the kind ``eval``.
    """
    pace = summary["cluster_seconds"] / summary["steps"]
    points = [(event["step"], event["step"] * pace, figure_of(event, summary["metric"])) for event in evaluations]
    steps, seconds, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(steps, seconds, values)


def draw_curves(axes: Any, curves: Mapping[str, Sequence[Curve]], clock: str, metric: str) -> None:
    """Draws one line a run; those of one method look alike.

    Args:
        axes: matplotlib's, to draw into.
        curves: each method's runs.
        clock: what the metric is drawn against, a field of :class:`Curve`.
        metric: its name.
    """
    for number, (name, runs) in enumerate(curves.items()):
        look = {"color": f"C{number}", "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}
        for run in runs:
            marker = "o" if len(run.values) == 1 else None  # one point is no line
            axes.plot(getattr(run, clock), run.values, alpha=0.85, marker=marker, **look)
        axes.plot([], [], label=name, **look)
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    if len(curves) > ROOM or any(len(name) > LONG for name in curves):
        columns = 1 if any(len(name) > 2 * LONG for name in curves) else 2
        axes.figure.legend(fontsize=7, loc="outside lower center", ncols=columns)
    else:
        axes.legend(fontsize=8)
