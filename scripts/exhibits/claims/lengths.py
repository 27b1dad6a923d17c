"""Checks whether trainings can be judged by accuracy: long enough for the density, with a converged dense baseline."""

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
    case: Case, config: Mapping[str, Any], found: Sequence[Mapping[str, Any]], baselines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Reasons why the accuracy of a method cannot be judged by its trainings.

    Args:
        case: Task that was trained.
        config: Configuration of one of the method's trainings.
        found: Summaries of the method's trainings, by seed.
        baselines: Summaries of dense training, by seed.

    Returns:
        The reasons; empty if the accuracy can be judged.
    """
    steps = min(summary["steps"] for summary in found)
    return [reason for reason in (_length(config, steps), _baseline(case, baselines)) if reason]


def watched_hindrances(words: Sequence[str], steps: int) -> list[str]:
    """Reasons why a traced training is too short to show a method whose residuals have built up.

    Composes the configuration; call it within :func:`scripts.choices.composing`.

    Args:
        words: Command-line words of train.py.
        steps: Steps of the traced training.

    Returns:
        The reason, if there is one.

    Raises:
        ConfigError: if the words do not compose a configuration.
    """
    short = _length(configuration(words), steps)
    return [short] if short else []


def planned_long_enough(config: Mapping[str, Any]) -> bool:
    """Whether a training is planned to be long enough to judge the method's accuracy.

    Args:
        config: Configuration of the training.
    """
    steps = config["training"]["max_steps"]
    return steps is None or not _length(config, steps)


def _length(config: Mapping[str, Any], steps: int) -> str:
    # Dense training and methods without a density have no minimum.
    density = config["compressor"].get("density")
    needed = math.ceil(round(SWEEPS / density, 6)) if density else 0
    made = steps - config["warmup"]["steps"]
    return f"too short: {made} steps where {needed} are needed" if made < needed else ""


def _baseline(case: Case, baselines: Sequence[Mapping[str, Any]]) -> str:
    """Why the dense baseline is not converged; empty if its final metric reaches the reference."""
    reference = case.known
    if reference is None:
        return "no reference value of dense training is known for this task"
    higher = baselines[0]["metric"] in HIGHER_IS_BETTER
    final = [final_metric(summary) for summary in baselines]
    best = [figure_of(summary, "best") for summary in baselines]
    if reference.reached(final, higher):
        return ""
    if reference.reached(best, higher):
        return (
            f"the dense baseline overfits: {mean(final):.4g} at the end, {mean(best):.4g} before; reference {reference}"
        )
    return f"the dense baseline reached only {mean(final):.4g}; reference {reference}"
