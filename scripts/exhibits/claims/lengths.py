"""Whether trainings can tell anything of accuracy: long enough for their density, and beside a twin that learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from scripts.exhibits.base import SWEEPS
from scripts.exhibits.kinds.trainings import Case
from scripts.exhibits.kinds.watched import configuration
from scripts.exhibits.measures import HIGHER_IS_BETTER, figure_of, final_metric

__all__ = ["hindrances", "planned_long_enough", "watched_hindrances"]


def hindrances(
    case: Case, config: Mapping[str, Any], found: Sequence[Mapping[str, Any]], twins: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Why a method's accuracy cannot be judged by its trainings.

    Args:
        case: what was trained.
        config: of the method's trainings, whichever seed.
        found: summaries of these, by seed.
        twins: those of dense training, likewise.

    Returns:
        The reasons, in words; empty if it can be judged.
    """
    steps = min(summary["steps"] for summary in found)
    return [reason for reason in (_length(config, steps), _twin(case, twins)) if reason]


def watched_hindrances(words: Sequence[str], steps: int) -> list[str]:
    """Why what was seen in a training says nothing of how a method is once residuals have built up.

    Composes the configuration, within :func:`scripts.choices.composing`.

    Args:
        words: of train.py.
        steps: of the training, which was watched.

    Returns:
        The reason, in words; empty if there is none.

    Raises:
        ConfigError: if the words do not compose a configuration.
    """
    short = _length(configuration(words), steps)
    return [short] if short else []


def planned_long_enough(config: Mapping[str, Any]) -> bool:
    """Whether a training is meant to be so long, or may be, that its method's accuracy can be judged.

    Args:
        config: of the training.
    """
    steps = config["training"]["max_steps"]
    return steps is None or not _length(config, steps)


def _length(config: Mapping[str, Any], steps: int) -> str:
    """Of dense training, and of methods without a density, any number of steps will do."""
    density = config["compressor"].get("density")
    needed = math.ceil(round(SWEEPS / density, 6)) if density else 0
    made = steps - config["warmup"]["steps"]
    return f"too short: {made} steps where {needed} are needed" if made < needed else ""


def _twin(case: Case, twins: Sequence[Mapping[str, Any]]) -> str:
    if case.known is None:
        return "it is not known what dense training reaches here"
    known, more = case.known.value, twins[0]["metric"] in HIGHER_IS_BETTER

    def enough(value: float) -> bool:
        return value >= known if more else value <= known

    reached, best = mean(map(final_metric, twins)), mean(figure_of(summary, "best") for summary in twins)
    if enough(reached):
        return ""
    if enough(best):
        return f"the dense twin overfits: it ended at {reached:.4g}, after {best:.4g}, where {case.known} is known"
    return f"the dense twin reached only {reached:.4g}, where {case.known} is known"
