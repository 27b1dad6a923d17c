"""What a method reached on a task, in a line: as the summary of all papers has it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import sha256
from statistics import mean
from typing import NamedTuple

from scripts.exhibits.failures import any_failed, succeeded
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.measures import Curve, final_metric, in_words, metric_curve, share_of_bytes
from scripts.exhibits.statistics import interval, seeds

__all__ = ["Role", "Target", "Tried", "marks", "reached", "tried"]

# The share of dense training's metric that may be missing where a target is reached.
MARGIN = 0.01


class Role(str, Enum):
    """What a method is in its paper."""

    PROPOSED = "proposed"
    OTHER = "for comparison"


class Tried(NamedTuple):
    """One method on one task. All but ``jobs`` is text.

    Attributes:
        task: what was trained, and for what.
        measure: what the metric is, in words, and what "seconds to the target" means there.
        method: its name.
        metric: over seeds, with its interval; or why there is none.
        seconds: until the target was reached.
        sent: bytes, as a share of dense training's.
        role: one of :class:`Role`.
        jobs: marks of the work behind it, see :func:`marks`.
        bad: whether some of its trainings failed.
    """

    task: str
    measure: str
    method: str
    metric: str
    seconds: str
    sent: str
    role: str
    jobs: Sequence[str]
    bad: bool = False


class Target(NamedTuple):
    """A metric that is good enough.

    Attributes:
        value: of the metric.
        lower: whether lower ones are better.
        words: what it is.
    """

    value: float
    lower: bool
    words: str

    @classmethod
    def of_dense(cls, outcomes: Sequence[Outcome], lower: bool) -> Target | None:
        """What dense training reaches, but for a hundredth of it; ``None`` if it has no result."""
        if not outcomes or any(outcome.reason is not None for outcome in outcomes):
            return None
        reached = mean(final_metric(outcome.data) for outcome in outcomes)
        return cls.near(reached, lower, outcomes[0].data["metric"], MARGIN)

    @classmethod
    def near(cls, reached: float, lower: bool, metric: str, margin: float) -> Target:
        """What dense training reached of a metric, but for a share ``margin`` of it."""
        value = reached + (1 if lower else -1) * margin * abs(reached)
        sign = "at most" if lower else "at least"
        name = in_words(metric)
        return cls(value, lower, f"{name}; target {sign} {value:.4g}, within {margin:.0%} of where dense training ends")


def marks(jobs: Sequence[Job]) -> list[str]:
    """A short mark for each job, by which it is found again in another section of a page."""
    return [sha256(job.command.encode()).hexdigest()[:12] for job in jobs]


def reached(curve: Curve, target: Target) -> float | None:
    """Seconds until the first evaluation that reaches the target, if one does."""
    for seconds, value in zip(curve.seconds, curve.values, strict=True):
        if value <= target.value if target.lower else value >= target.value:
            return seconds
    return None


def tried(
    task: str,
    target: Target | None,
    method: str,
    role: Role,
    jobs: Sequence[Job],
    outcomes: Sequence[Outcome],
    values: Sequence[float] | None = None,
) -> Tried:
    """The line of one method.

    Args:
        task: what was trained.
        target: of the task, if one is known.
        method: its name.
        role: in its paper.
        jobs: one for each seed.
        outcomes: of these.
        values: the metric by seed, where it is not that of these trainings.
    """
    good = succeeded(outcomes)
    words = target.words if target else ", ".join({in_words(outcome.data["metric"]) for outcome in good})
    failed = any_failed(outcomes)
    if not good:
        reason = next(outcome.fault for outcome in outcomes)
        return Tried(task, words, method, reason, "", "", role.value, marks(jobs), failed)
    shown = _with_interval(values or [final_metric(outcome.data) for outcome in good])
    metric = "; ".join((shown, *_lost(outcomes)))
    share = f"{share_of_bytes(outcome.data for outcome in good):.2%}"
    return Tried(task, words, method, metric, _until(good, target), share, role.value, marks(jobs), failed)


def _lost(outcomes: Sequence[Outcome]) -> list[str]:
    """How many trainings have no result, and why."""
    lost = [outcome.started for outcome in outcomes if outcome.reason is not None]
    counts = (("failed", sum(lost)), ("not run yet", len(lost) - sum(lost)))
    return [f"{count} of {len(outcomes)} {words}" for words, count in counts if count]


def _with_interval(values: Sequence[float]) -> str:
    bounds = interval(values)
    if bounds is None:
        return f"{mean(values):.4g} ({seeds(len(values))})"
    return f"{mean(values):.4g} ({bounds[0]:.4g} to {bounds[1]:.4g})"


def _until(outcomes: Sequence[Outcome], target: Target | None) -> str:
    if target is None:
        return "no target"
    found = [reached(metric_curve(outcome.data, outcome.events("eval")), target) for outcome in outcomes]
    seconds = [each for each in found if each is not None]
    if len(seconds) < len(found):
        return "not reached" if not seconds else f"{len(seconds)} of {len(found)} seeds"
    return f"{mean(seconds):.3g} s"
