"""What rules of judgement have in common: figures in, a verdict with its reason out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from statistics import mean
from typing import ClassVar, NamedTuple

from scripts.exhibits.jobs import Job
from scripts.exhibits.statistics import LEAST, Range, difference, range_of_mean

__all__ = ["OVERSHOT", "Figure", "Finding", "Rule", "Verdict", "difference_of", "show", "shown", "told"]

OVERSHOT = ", overshoot"  # what a verdict's label ends with, if ours is far beyond what is published


class Verdict(Enum):
    """What can be said of a claim, the best first."""

    REPRODUCED = "reproduced"
    BUILT_IN = "checked by construction"
    DIRECTION = "in the same direction"
    UNJUDGED = "cannot be judged here"
    NOT = "not reproduced"

    def __str__(self) -> str:
        return self.value


class Figure(NamedTuple):
    """One thing that was found.

    Attributes:
        name: what it is of.
        values: one for each seed; a single one if no chance is in it.
        against: what it is compared with, in the same way; a rule says whether it needs that.
        jobs: the work behind it.
        remark: what else is to be said of it, such as what it is compared with another rival.
        hindrances: why nothing can be judged by it; empty if something can.
        floor: what one worker alone reaches, which sends nothing, by seed; empty if that is not known.
    """

    name: str
    values: Sequence[float]
    against: Sequence[float] = ()
    jobs: Sequence[Job] = ()
    remark: str = ""
    hindrances: Sequence[str] = ()
    floor: Sequence[float] = ()

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean(self.values)

    @property
    def range(self) -> Range:
        """Of the mean; a point if no chance is in it."""
        return _range(self.values)


class Finding(NamedTuple):
    """What a rule says.

    Attributes:
        verdict: in one word.
        ours: the figures that decided.
        reason: why, in words made of the figures.
        overshoot: whether the figures are far beyond the published ones, so that something else must differ.
    """

    verdict: Verdict
    ours: str
    reason: str
    overshoot: bool = False

    @property
    def label(self) -> str:
        """The verdict, and whether it is of an overshoot."""
        return f"{self.verdict}{OVERSHOT}" if self.overshoot else str(self.verdict)


def _range(values: Sequence[float]) -> Range:
    """Of the mean; what has only one value has no chance in it."""
    return range_of_mean(values) if len(values) > 1 else Range(values[0], values[0], values[0])


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """The mean of ours less theirs, value by value, with its interval if there is more than one."""
    return difference(ours, theirs) if len(ours) > 1 else _range([ours[0] - theirs[0]])


def show(number: float, unit: str = "") -> str:
    """A number to four digits; with the unit ``%``, as a share."""
    return f"{100 * number:.4g}%" if unit == "%" else f"{number:.4g}{unit}"


def shown(found: Range, unit: str = "") -> str:
    """The mean, and the interval if there is one."""
    if found.low == found.high:
        return show(found.mean, unit)
    if math.isinf(found.high):
        return f"{show(found.mean, unit)} (fewer than {LEAST} seeds: no interval)"
    return f"{show(found.mean, unit)} ({show(found.low, unit)} to {show(found.high, unit)})"


def told(figure: Figure, unit: str = "") -> str:
    """A figure with its name and remark."""
    return f"{shown(figure.range, unit)} ({'; '.join(filter(None, (figure.name, figure.remark)))})"


class Rule(ABC):
    """Turns figures into a verdict.

    Attributes:
        apart: whether each figure is judged by itself, so that those by which nothing can be judged may be left out.
    """

    apart: ClassVar[bool] = False

    @property
    @abstractmethod
    def words(self) -> str:
        """The rule, for readers, with its numbers."""

    @abstractmethod
    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges at least one figure."""
