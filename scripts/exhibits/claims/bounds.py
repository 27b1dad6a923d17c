"""Rules for figures that are held against published ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from statistics import mean

from scripts.exhibits.claims.base import Figure, Finding, Rule, Verdict, show, shown

__all__ = ["AtLeast", "AtMost", "Between", "Equal", "UpTo", "Within"]

NEAR = 0.9  # so much of a published figure is that figure
NOTICEABLE = 1.01  # what is less than 1% faster is not faster
GAIN = f"at least {NOTICEABLE:g}x, and the 95% interval over seeds above 1x, if there are seeds"
ROUNDING = 0.01  # counts that differ by less are equal: whole entries are sent


def _named(figures: Sequence[Figure], unit: str) -> str:
    return "; ".join(f"{figure.name}: {shown(figure.range, unit)}" for figure in figures)


@dataclass(frozen=True)
class UpTo(Rule):
    """The best of some ratios against a published best one.

    Attributes:
        published: the ratio.
    """

    published: float

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"Ours is the best ratio. {Verdict.REPRODUCED}: a gain, and at least {NEAR:g} of {self.published:g}x. "
            f"{Verdict.DIRECTION}: a gain: {GAIN}. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; the figures are ratios."""
        best = max(figures, key=lambda figure: figure.mean)
        ours = f"{shown(best.range, 'x')} ({best.name})"
        wanted = NEAR * self.published
        if not _faster(best):
            return Finding(Verdict.NOT, ours, f"no gain in {len(figures)} ratios; the best is {ours}")
        if best.mean >= wanted:
            return Finding(Verdict.REPRODUCED, ours, f"{best.mean:.4g}x is at least {NEAR:g} of {self.published:g}x")
        less = f"a gain, but {best.mean:.4g}x is less than {NEAR:g} of {self.published:g}x"
        return Finding(Verdict.DIRECTION, ours, less)


def _faster(figure: Figure) -> bool:
    return figure.mean >= NOTICEABLE and figure.range.low > 1


@dataclass(frozen=True)
class Between(Rule):
    """A published range of ratios over several baselines.

    Attributes:
        low: over the strongest baseline.
        high: over the weakest.
    """

    low: float
    high: float

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"Ours are the least and the greatest ratio over all baselines. {Verdict.REPRODUCED}: the least is at "
            f"least {NEAR:g} of {self.low:g}x, the greatest at least {NEAR:g} of {self.high:g}x, and all are gains. "
            f"{Verdict.DIRECTION}: all are gains: {GAIN}. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; the figures are ratios."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        least, most = ordered[0], ordered[-1]
        ours = f"{shown(least.range, 'x')} ({least.name}) to {shown(most.range, 'x')} ({most.name})"
        slower = [figure for figure in ordered if not _faster(figure)]
        if slower:
            told = f"{len(slower)} of {len(figures)} ratios are no gain: {_named(slower, 'x')}"
            return Finding(Verdict.NOT, ours, told)
        ends = ((least, self.low, "least"), (most, self.high, "greatest"))
        short = [
            f"the {name}, {figure.mean:.4g}x, is less than {NEAR:g} of {wanted:g}x"
            for figure, wanted, name in ends
            if figure.mean < NEAR * wanted
        ]
        if short:
            return Finding(Verdict.DIRECTION, ours, f"a gain over every baseline, but {' and '.join(short)}")
        both = f"{least.mean:.4g}x and {most.mean:.4g}x are at least {NEAR:g} of {self.low:g}x and {self.high:g}x"
        return Finding(Verdict.REPRODUCED, ours, both)


@dataclass(frozen=True)
class _Limit(Rule):
    """All figures on one side of a published one, or at least of their rivals.

    Attributes:
        published: the figure.
        unit: of the figures; ``%`` for shares.
    """

    published: float
    unit: str = ""

    @property
    @abstractmethod
    def demand(self) -> str:
        """What is asked of each figure, in words, with the number."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """The number in it."""

    @abstractmethod
    def holds(self, ours: float, limit: float) -> bool:
        """Whether a figure keeps a limit."""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"{Verdict.REPRODUCED}: each figure is {self.demand}. {Verdict.DIRECTION}: each is on that side of "
            f"the rival it is compared with, if there is one. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; figures with a rival are compared with it."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        ends = list(dict.fromkeys(f"{shown(end.range, self.unit)} ({end.name})" for end in (ordered[0], ordered[-1])))
        ours = " to ".join(ends)
        wrong = [figure for figure in figures if not self.holds(figure.mean, self.limit)]
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, f"{_all(figures)} {self.demand}")
        told = f"not {self.demand}: {_named(wrong, self.unit)}"
        if all(figure.against and self.holds(figure.mean, mean(figure.against)) for figure in figures):
            return Finding(Verdict.DIRECTION, ours, f"{told}; yet better than all rivals")
        return Finding(Verdict.NOT, ours, told)


@dataclass(frozen=True)
class AtMost(_Limit):
    """No figure above a published limit."""

    @property
    def demand(self) -> str:
        """See :class:`_Limit`."""
        return f"at most {show(self.published, self.unit)}"

    @property
    def limit(self) -> float:
        """See :class:`_Limit`."""
        return self.published

    def holds(self, ours: float, limit: float) -> bool:
        """See :class:`_Limit`."""
        return ours <= limit


@dataclass(frozen=True)
class AtLeast(_Limit):
    """No figure far below a published one.

    Attributes:
        near: the part of the published figure that counts as it.
    """

    near: float = NEAR

    @property
    def demand(self) -> str:
        """See :class:`_Limit`."""
        part = "" if self.near == 1 else f"{self.near:g} of "
        return f"at least {part}{show(self.published, self.unit)}"

    @property
    def limit(self) -> float:
        """See :class:`_Limit`."""
        return self.near * self.published

    def holds(self, ours: float, limit: float) -> bool:
        """See :class:`_Limit`."""
        return ours >= limit


def _all(figures: Sequence[Figure]) -> str:
    return "it is" if len(figures) == 1 else f"all of {len(figures)} figures are"


@dataclass(frozen=True)
class Equal(Rule):
    """Counts that are what a formula, or another count, says.

    Attributes:
        unit: of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return f"{Verdict.REPRODUCED}: each figure is what it is compared with, to {ROUNDING:.0%}. Else {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; every figure is compared with one other."""
        wrong = [each for each in figures if not isclose(each.mean, mean(each.against), rel_tol=ROUNDING)]
        right = len(figures) - len(wrong)
        ours = f"{right} of {len(figures)} as stated"
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, _compared(figures[:: max(1, len(figures) - 1)], self.unit))
        return Finding(Verdict.NOT, ours, f"{len(wrong)} differ: {_compared(wrong, self.unit)}")


@dataclass(frozen=True)
class Within(Rule):
    """Figures that each have a limit of their own.

    Attributes:
        unit: of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return f"{Verdict.REPRODUCED}: no figure is above its own limit. Else {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; every figure is compared with its limit."""
        nearest = max(figures, key=lambda figure: figure.mean / mean(figure.against))
        ours = f"{show(nearest.mean, self.unit)} ({nearest.name}), the nearest to its limit"
        above = [figure for figure in figures if figure.mean > mean(figure.against)]
        if above:
            return Finding(Verdict.NOT, ours, f"{len(above)} of {len(figures)} above: {_compared(above, self.unit)}")
        return Finding(Verdict.REPRODUCED, ours, f"all {len(figures)} hold; {_compared([nearest], self.unit)}")


def _compared(figures: Sequence[Figure], unit: str) -> str:
    pairs = ((figure.name, show(figure.mean, unit), show(mean(figure.against), unit)) for figure in figures)
    return "; ".join(f"{name}: {ours}, where {theirs} is stated" for name, ours, theirs in pairs)
