"""Rules for figures that are held against published ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, log, sqrt
from statistics import mean

from scripts.exhibits.claims.base import Figure, Finding, Rule, Verdict, show, shown, told

__all__ = ["AtLeast", "AtMost", "Between", "Equal", "Keeps", "UpTo", "Within"]

NEAR = 0.9  # so much of a published figure is that figure
HALF = 0.5  # of a published gain, in logarithms: less is another result, not a weaker one
BEYOND = 1.5  # of a published gain, in logarithms: more must have other causes
GAIN = f"at least {HALF:g} of the published gain in logarithms, and Student's 95% interval above 1x, if there are seeds"
OVERSHOOT = f"More than {BEYOND:g} of it in logarithms is an overshoot: flagged, and {Verdict.DIRECTION} at best"
ROUNDING = 0.01  # counts that differ by less are equal: whole entries are sent


def _named(figures: Sequence[Figure], unit: str) -> str:
    return "; ".join(f"{figure.name}: {shown(figure.range, unit)}" for figure in figures)


def _share(found: float, published: float) -> float:
    """Of a published gain or loss, in logarithms."""
    return log(found) / log(published)


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
            f"{Verdict.DIRECTION}: a gain: {GAIN}. {OVERSHOOT}. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; the figures are ratios."""
        best = max(figures, key=lambda figure: figure.mean)
        return _ends(told(best, "x"), [_End("best", best, self.published)])


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
            f"least {NEAR:g} of {self.low:g}x, the greatest at least {NEAR:g} of {self.high:g}x, and both are gains. "
            f"{Verdict.DIRECTION}: both are gains: {GAIN} at their end. {OVERSHOOT}. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; the figures are ratios."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        ends = [_End("least", ordered[0], self.low), _End("greatest", ordered[-1], self.high)]
        return _ends(" to ".join(told(end.figure, "x") for end in ends), ends)


@dataclass(frozen=True)
class _End:
    """A ratio, and the published one that it stands against.

    Attributes:
        name: which of all ratios it is.
        figure: it.
        published: the other.
    """

    name: str
    figure: Figure
    published: float

    @property
    def shortfall(self) -> str:
        """Why it is no gain, in words; empty if it is one."""
        if not (self.figure.mean > 1 and self.figure.range.low > 1):
            return f"the {self.name} is no gain: {told(self.figure, 'x')}"
        share = _share(self.figure.mean, self.published)
        if share >= HALF:
            return ""
        return f"the {self.name}, {self.figure.mean:.4g}x, is {share:.0%} of {self.published:g}x in logarithms"

    @property
    def excess(self) -> str:
        """Why it is an overshoot, likewise."""
        if self.figure.mean <= self.published**BEYOND:
            return ""
        share = _share(self.figure.mean, self.published)
        return f"the {self.name}, {self.figure.mean:.4g}x, is {share:.1f} times {self.published:g}x in logarithms"

    @property
    def near(self) -> bool:
        """Whether it is the published one, or nearly so."""
        return self.figure.mean >= NEAR * self.published


def _ends(ours: str, ends: Sequence[_End]) -> Finding:
    """No gain counts first, then an overshoot."""
    short = [end.shortfall for end in ends if end.shortfall]
    if short:
        return Finding(Verdict.NOT, ours, " and ".join(short))
    beyond = [end.excess for end in ends if end.excess]
    if beyond:
        return Finding(Verdict.DIRECTION, ours, f"far beyond what is published: {' and '.join(beyond)}", overshoot=True)
    weak = [end for end in ends if not end.near]
    compared = [(f"{end.figure.mean:.4g}x", f"{NEAR:g} of {end.published:g}x") for end in weak or ends]
    found, wanted = (" and ".join(parts) for parts in zip(*compared, strict=True))
    if weak:
        return Finding(Verdict.DIRECTION, ours, f"a gain, but {found} is less than {wanted}")
    return Finding(Verdict.REPRODUCED, ours, f"{found} {'is' if len(ends) == 1 else 'are'} at least {wanted}")


@dataclass(frozen=True)
class Keeps(Rule):
    """A share that is kept, against a published one: the loss is what is compared.

    Attributes:
        published: the share, below 1.
    """

    published: float

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"{Verdict.REPRODUCED}: each share is at least {NEAR:g} of {self.published:.4g}, and loses at least "
            f"1/{BEYOND:g} of what that loses, in logarithms. {Verdict.DIRECTION}: it loses at most {1 / HALF:g} times "
            f"as much; if it loses less than 1/{BEYOND:g}, that is an overshoot, and flagged. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; the figures are shares."""
        worst = min(figures, key=lambda figure: figure.mean)
        lost = _share(worst.mean, self.published)
        ours, compared = told(worst, "%"), f"{lost:.2g} of the loss of {show(self.published, '%')} in logarithms"
        if lost > 1 / HALF:
            return Finding(Verdict.NOT, ours, compared)
        if lost < 1 / BEYOND:
            return Finding(Verdict.DIRECTION, ours, f"far beyond what is published: {compared}", overshoot=True)
        near = worst.mean >= NEAR * self.published
        return Finding(Verdict.REPRODUCED if near else Verdict.DIRECTION, ours, compared)


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

    @abstractmethod
    def holds(self, ours: float, limit: float) -> bool:
        """Whether a figure keeps a limit."""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"{Verdict.REPRODUCED}: each figure is {self.demand}. {Verdict.DIRECTION}: each is better than the rival "
            f"it is compared with, if there is one, by at least {HALF:g} of the way to that number, in logarithms. "
            f"Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; figures with a rival are compared with it."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        ends = list(dict.fromkeys(told(end, self.unit) for end in (ordered[0], ordered[-1])))
        ours = " to ".join(ends)
        wrong = [figure for figure in figures if not self.holds(figure.mean, self.published)]
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, f"{_all(figures)} {self.demand}")
        missed = f"not {self.demand}: {_named(wrong, self.unit)}"
        if all(figure.against and self._half_way(figure.mean, mean(figure.against)) for figure in figures):
            return Finding(Verdict.DIRECTION, ours, f"{missed}; yet better than all rivals, by half of the way or more")
        return Finding(Verdict.NOT, ours, missed)

    def _half_way(self, ours: float, rival: float) -> bool:
        """Whether a figure is at least as good as the geometric mean of its rival and the number."""
        return self.holds(ours, rival) and self.holds(ours, sqrt(rival * self.published))


@dataclass(frozen=True)
class AtMost(_Limit):
    """No figure above a published limit."""

    @property
    def demand(self) -> str:
        """See :class:`_Limit`."""
        return f"at most {show(self.published, self.unit)}"

    def holds(self, ours: float, limit: float) -> bool:
        """See :class:`_Limit`."""
        return ours <= limit


@dataclass(frozen=True)
class AtLeast(_Limit):
    """No figure below a published limit."""

    @property
    def demand(self) -> str:
        """See :class:`_Limit`."""
        return f"at least {show(self.published, self.unit)}"

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
