"""Selects the part of a training's files that a record stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.exhibits.measures import last_epoch_loss

__all__ = ["MOST", "contents", "events_in", "thinned"]

# Lines of each kind, enough for a curve a few inches wide.
MOST = 30
# Fields of a summary that tables, figures and claims read, or that show whether a repeated run is equal.
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
    """Returns every n-th event including the last, with the smallest n that leaves at most ``MOST``."""
    every = math.ceil(len(events) / MOST) or 1
    return events[(len(events) - 1) % every :: every]


def contents(summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the content of the record of a finished training.

    Args:
        summary: Summary of the run.
        events: All lines of its metrics.

    Returns:
        Fields of the summary, the mean training loss of the last epoch, and :func:`thinned` evaluations and losses.
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
    """Metrics in a record, training losses first."""
    kinds = {"train": _TRAINING, "eval": _EVALUATIONS}
    return [{"kind": kind, **event} for kind, key in kinds.items() for event in content.get(key, ())]
