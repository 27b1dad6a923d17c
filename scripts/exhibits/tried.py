"""One line per method and task for the summary of all papers: metric, time to the target, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from statistics import mean
from typing import NamedTuple

from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.measures import Curve, final_metric, in_words, interval, metric_curve, seeds, share_of_bytes
from scripts.exhibits.outcomes import NOT_RUN_YET, any_failed, by_machine, machines, succeeded

# Largest shortfall from the metric of dense training at the target, as a share.
MARGIN = 0.01


class Role(str, Enum):
    """Role of a method in its paper."""

    PROPOSED = "proposed"
    OTHER = "for comparison"


class Tried(NamedTuple):
    """One method on one task. All but ``jobs`` and the flags is text.

    Attributes:
        task: Trained task and the task of the paper that it represents.
        measure: The metric and the target.
        method: Name of the method.
        metric: Mean over seeds with its confidence interval, or the reason why it is missing.
        seconds: Time until the target was reached.
        sent: Bytes as a share of those of dense training.
        role: One of :class:`Role`.
        jobs: Jobs behind the line.
        bad: Whether some trainings failed.
        ran: Whether some trainings were started.
        machine: Machine that the seconds were measured on; several machines have separate seconds.
    """

    task: str
    measure: str
    method: str
    metric: str
    seconds: str
    sent: str
    role: str
    jobs: Sequence[Job]
    bad: bool = False
    ran: bool = True
    machine: str = ""


class Target(NamedTuple):
    """A metric value that counts as reached.

    Attributes:
        value: Value of the metric.
        lower: Whether lower values are better.
        words: The target, for readers.
    """

    value: float
    lower: bool
    words: str

    @classmethod
    def of_dense(cls, outcomes: Sequence[Outcome], lower: bool) -> Target | None:
        """Returns the metric of dense training less 1%; ``None`` if dense training is incomplete."""
        if not outcomes or any(outcome.reason is not None for outcome in outcomes):
            return None
        reached = mean(final_metric(outcome.data) for outcome in outcomes)
        return cls.near(reached, lower, outcomes[0].data["metric"], MARGIN)

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


def tried(
    task: str,
    target: Target | None,
    method: str,
    role: Role,
    jobs: Sequence[Job],
    outcomes: Sequence[Outcome],
    values: Sequence[float] | None = None,
) -> Tried:
    """Returns the line of one method on a task; ``values`` are its metric by seed if not that of the trainings."""
    good = succeeded(outcomes)
    words = target.words if target else ", ".join({in_words(outcome.data["metric"]) for outcome in good})
    failed = any_failed(outcomes)
    if not good:
        reason = next(outcome.fault for outcome in outcomes)
        return Tried(task, words, method, reason, "", "", role.value, jobs, failed, failed)
    shown = _with_interval(values or [final_metric(outcome.data) for outcome in good])
    lost = [outcome.started for outcome in outcomes if outcome.reason is not None]
    counts = (("failed", sum(lost)), (NOT_RUN_YET, len(lost) - sum(lost)))
    metric = "; ".join((shown, *(f"{count} of {len(outcomes)} {words}" for words, count in counts if count)))
    share = f"{share_of_bytes(outcome.data for outcome in good):.2%}"
    machine, until = "; ".join(machines(good)), _until(good, target)
    return Tried(task, words, method, metric, until, share, role.value, jobs, failed, machine=machine)


def _with_interval(values: Sequence[float]) -> str:
    bounds = interval(values)
    if bounds is None:
        return f"{mean(values):.4g} ({seeds(len(values))})"
    return f"{mean(values):.4g} ({bounds[0]:.4g} to {bounds[1]:.4g})"


def _until(outcomes: Sequence[Outcome], target: Target | None) -> str:
    if target is None:
        return "no target"
    groups = by_machine(outcomes)
    if len(groups) > 1:  # seconds of different machines have no common mean
        return "; ".join(f"{_until(own, target)} ({seeds(len(own))} on {name})" for name, own in groups.items())
    found = [reached(metric_curve(outcome.data, outcome.events("eval")), target) for outcome in outcomes]
    seconds = [each for each in found if each is not None]
    if len(seconds) < len(found):
        return "not reached" if not seconds else f"{len(seconds)} of {len(found)} seeds"
    return f"{mean(seconds):.3g} s"
