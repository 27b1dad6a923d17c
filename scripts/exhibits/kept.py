"""What a record keeps of a training's files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.exhibits.measures import last_epoch_loss

__all__ = ["MOST", "contents", "events_in", "thinned"]

# Lines of each kind: as many as a curve a few inches wide can show.
MOST = 30
# Of a summary: what tables, figures and claims read, and what tells whether a run made again is the same.
_SUMMARY = (
    "metric",
    "final",
    "best",
    "steps",
    "epochs",
    "workers",
    "parameters",
    "wall_seconds",
    "cluster_seconds",
    "step_bytes",
    "step_bytes_dense",
    "density",
    "residual_ratio",
    "residual_age",
    "weights_sha256",
    "caveats",
    "editions",
    "environment",
)
_LOSSES = ("step", "epoch", "loss")
_EVALUATIONS, _TRAINING = "evaluations", "losses"


def thinned(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Every n-th event, n as small as leaves no more than ``MOST``; the last one always."""
    every = math.ceil(len(events) / MOST) or 1
    return events[(len(events) - 1) % every :: every]


def contents(summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a record keeps of a finished training.

    Args:
        summary: of the run.
        events: all lines of its metrics.

    Returns:
        The part of the summary that is read; the mean training loss of the last epoch, of all lines; evaluations, and
        training losses, :func:`thinned`.
    """
    training = [event for event in events if event["kind"] == "train"]
    loss = last_epoch_loss(training)
    return {
        **{key: summary.get(key) for key in _SUMMARY},
        "train_loss": loss if loss is None or math.isfinite(loss) else None,
        _EVALUATIONS: _cut([event for event in events if event["kind"] == "eval"], ("step", *summary["final"])),
        _TRAINING: _cut(training, _LOSSES),
    }


def _cut(events: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    return [{key: event[key] for key in keys} for event in thinned(events)]


def events_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of metrics that a record has, training first."""
    kinds = {"train": _TRAINING, "eval": _EVALUATIONS}
    return [{"kind": kind, **event} for kind, key in kinds.items() for event in content.get(key, ())]
