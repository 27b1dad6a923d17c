"""Building blocks of the rules that judge claims: figures, verdicts, findings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from statistics import mean
from typing import ClassVar, NamedTuple

from scripts.exhibits.jobs import Job
from scripts.exhibits.measures import LEAST, Range, difference, range_of_mean

__all__ = ["OVERSHOT", "Figure", "Finding", "Rule", "Verdict", "difference_of", "show", "shown", "told"]

OVERSHOT = ", overshoot"  # appended to a verdict if our figure far exceeds the published one


class Verdict(Enum):
    """Verdicts, best first."""

    REPRODUCED = "reproduced"
    BUILT_IN = "checked by construction"
    DIRECTION = "in the same direction"
    MIXED = "depends on the task"
    WORSE = "slightly worse"
    UNJUDGED = "cannot be judged here"
    NOT = "not reproduced"

    def __str__(self) -> str:
        return self.value


class Figure(NamedTuple):
    """One of our results.

    Attributes:
        name: Name for readers.
        values: One value per seed; a single value if the result is deterministic.
        against: Values to compare with, in the same order; some rules need none.
        jobs: Jobs that the values come from.
        remark: Further words for readers, such as the ratio to another rival.
        hindrances: Reasons why the values cannot be judged; empty if they can.
        floor: Values of a single worker without communication, by seed; empty if unknown.
        task: Name of the task; figures of one task are judged together.
    """

    name: str
    values: Sequence[float]
    against: Sequence[float] = ()
    jobs: Sequence[Job] = ()
    remark: str = ""
    hindrances: Sequence[str] = ()
    floor: Sequence[float] = ()
    task: str = ""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return mean(self.values)

    @property
    def range(self) -> Range:
        """Confidence interval of the mean; a point if the result is deterministic."""
        return _range(self.values)


class Finding(NamedTuple):
    """The outcome of a rule.

    Attributes:
        verdict: Verdict without an overshoot mark.
        ours: The deciding figures, as text.
        reason: Reason for the verdict, made of the figures.
        overshoot: Whether the figures far exceed the published ones, so that something else must differ.
    """

    verdict: Verdict
    ours: str
    reason: str
    overshoot: bool = False

    @property
    def label(self) -> str:
        """The verdict, marked if it is an overshoot."""
        return f"{self.verdict}{OVERSHOT}" if self.overshoot else str(self.verdict)


def _range(values: Sequence[float]) -> Range:
    """Confidence interval of the mean; a single value is deterministic."""
    return range_of_mean(values) if len(values) > 1 else Range(values[0], values[0], values[0])


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Mean of the paired differences, with its confidence interval if there are several values."""
    return difference(ours, theirs) if len(ours) > 1 else _range([ours[0] - theirs[0]])


def show(number: float, unit: str = "") -> str:
    """A number with four significant digits; the unit ``%`` formats it as a percentage."""
    return f"{100 * number:.4g}%" if unit == "%" else f"{number:.4g}{unit}"


def shown(found: Range, unit: str = "") -> str:
    """The mean, with its confidence interval if there is one."""
    if found.low == found.high:
        return show(found.mean, unit)
    if math.isinf(found.high):
        return f"{show(found.mean, unit)} (fewer than {LEAST} seeds: no interval)"
    return f"{show(found.mean, unit)} ({show(found.low, unit)} to {show(found.high, unit)})"


def told(figure: Figure, unit: str = "") -> str:
    """A figure with its name and its remark."""
    return f"{shown(figure.range, unit)} ({'; '.join(filter(None, (figure.name, figure.remark)))})"


class Rule(ABC):
    """Turns figures into a verdict.

    Attributes:
        apart: Whether each figure is a task that is judged on its own.
    """

    apart: ClassVar[bool] = False

    @property
    @abstractmethod
    def words(self) -> str:
        """The rule with its numbers, for readers."""

    @abstractmethod
    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges at least one figure; all of them belong to one task unless the rule is ``apart``."""
