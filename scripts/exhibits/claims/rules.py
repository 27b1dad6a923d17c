"""Rules that compare figures with published ones, and trainings of several seeds with one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose, log, sqrt
from statistics import mean
from typing import ClassVar

from scripts.exhibits.claims.base import Figure, Finding, Rule, Verdict, difference_of, show, shown, told
from scripts.exhibits.measures import Range

__all__ = ["AtLeast", "AtMost", "Between", "Equal", "InnerBest", "Keeps", "NoLoss", "Order", "UpTo", "Within"]

# Share of the published figure that counts as reproduced; and shares of the published gain (in logarithms) below which
# ours is a different result and above which it must have other causes.
NEAR, HALF, BEYOND = 0.9, 0.5, 1.5
GAIN = f"at least {HALF:g} of the published gain in logarithms and, with several seeds, Student's 95% interval above 1x"
OVERSHOOT = f"More than {BEYOND:g} of it in logarithms is an overshoot: flagged, and {Verdict.DIRECTION} at best"
ROUNDING = 0.01  # counts may differ by this share, because whole entries are sent


def _named(figures: Sequence[Figure], unit: str) -> str:
    return "; ".join(f"{figure.name}: {shown(figure.range, unit)}" for figure in figures)


def _share(found: float, published: float) -> float:
    """Share of a published gain or loss, in logarithms."""
    return log(found) / log(published)


@dataclass(frozen=True)
class UpTo(Rule):
    """The best of several ratios against the best published one.

    Attributes:
        published: The published ratio.
    """

    published: float

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"Ours is the best ratio. {Verdict.REPRODUCED}: a gain, and at least {NEAR:g} of {self.published:g}x. "
            f"{Verdict.DIRECTION}: a gain: {GAIN}. {OVERSHOOT}. Otherwise {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures that are ratios."""
        best = max(figures, key=lambda figure: figure.mean)
        return _ends(told(best, "x"), [_End("best", best, self.published)])


@dataclass(frozen=True)
class Between(Rule):
    """A published range of ratios over several baselines.

    Attributes:
        low: Ratio over the strongest baseline.
        high: Ratio over the weakest baseline.
    """

    low: float
    high: float

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"Ours are the least and the greatest ratio over all baselines. {Verdict.REPRODUCED}: the least is at "
            f"least {NEAR:g} of {self.low:g}x, the greatest at least {NEAR:g} of {self.high:g}x, and both are gains. "
            f"{Verdict.DIRECTION}: both are gains: {GAIN} at their end. {OVERSHOOT}. Otherwise {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures that are ratios."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        ends = [_End("least", ordered[0], self.low), _End("greatest", ordered[-1], self.high)]
        return _ends(" to ".join(told(end.figure, "x") for end in ends), ends)


@dataclass(frozen=True)
class _End:
    """A ratio, and the published one that it stands against.

    Attributes:
        name: Position among all ratios.
        figure: Our ratio.
        published: Published ratio.
    """

    name: str
    figure: Figure
    published: float

    @property
    def shortfall(self) -> str:
        """Reason why it is not a gain; empty if it is a gain."""
        if not (self.figure.mean > 1 and self.figure.range.low > 1):
            return f"the {self.name} is not a gain: {told(self.figure, 'x')}"
        share = _share(self.figure.mean, self.published)
        if share >= HALF:
            return ""
        return f"the {self.name}, {self.figure.mean:.4g}x, is {share:.0%} of {self.published:g}x in logarithms"

    @property
    def excess(self) -> str:
        """Reason why it is an overshoot; empty if it is within the limit."""
        if self.figure.mean <= self.published**BEYOND:
            return ""
        share = _share(self.figure.mean, self.published)
        return f"the {self.name}, {self.figure.mean:.4g}x, is {share:.1f} times {self.published:g}x in logarithms"

    @property
    def near(self) -> bool:
        """Whether it is close to the published one."""
        return self.figure.mean >= NEAR * self.published


def _ends(ours: str, ends: Sequence[_End]) -> Finding:
    """A missing gain counts first, then an overshoot."""
    short = [end.shortfall for end in ends if end.shortfall]
    if short:
        return Finding(Verdict.NOT, ours, " and ".join(short))
    beyond = [end.excess for end in ends if end.excess]
    if beyond:
        return Finding(
            Verdict.DIRECTION, ours, f"far beyond the published figure: {' and '.join(beyond)}", overshoot=True
        )
    weak = [end for end in ends if not end.near]
    compared = [(f"{end.figure.mean:.4g}x", f"{NEAR:g} of {end.published:g}x") for end in weak or ends]
    found, wanted = (" and ".join(parts) for parts in zip(*compared, strict=True))
    if weak:
        return Finding(Verdict.DIRECTION, ours, f"a gain, but {found} is less than {wanted}")
    return Finding(Verdict.REPRODUCED, ours, f"{found} {'is' if len(ends) == 1 else 'are'} at least {wanted}")


@dataclass(frozen=True)
class Keeps(Rule):
    """A share that is kept, against a published one, by the loss.

    Attributes:
        published: The published share, below 1.
    """

    published: float

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"{Verdict.REPRODUCED}: each share is at least {NEAR:g} of {self.published:.4g}, and loses at least "
            f"1/{BEYOND:g} of what that loses, in logarithms. {Verdict.DIRECTION}: it loses at most {1 / HALF:g} times "
            f"as much; if it loses less than 1/{BEYOND:g}, that is an overshoot, and flagged. Otherwise {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures that are shares."""
        worst = min(figures, key=lambda figure: figure.mean)
        lost = _share(worst.mean, self.published)
        ours, compared = told(worst, "%"), f"{lost:.2g} of the loss of {show(self.published, '%')} in logarithms"
        if lost > 1 / HALF:
            return Finding(Verdict.NOT, ours, compared)
        if lost < 1 / BEYOND:
            return Finding(Verdict.DIRECTION, ours, f"far beyond the published figure: {compared}", overshoot=True)
        near = worst.mean >= NEAR * self.published
        return Finding(Verdict.REPRODUCED if near else Verdict.DIRECTION, ours, compared)


@dataclass(frozen=True)
class _Limit(Rule):
    """All figures on one side of a published one, or at least better than their rivals.

    Attributes:
        published: The published figure.
        unit: Unit of the figures; ``%`` for shares.
    """

    published: float
    unit: str = ""

    side: ClassVar[str]
    sign: ClassVar[int]  # 1 if smaller figures are better, -1 if greater ones are

    def holds(self, ours: float, limit: float) -> bool:
        """Whether a figure satisfies a limit."""
        return self.sign * ours <= self.sign * limit

    @property
    def demand(self) -> str:
        """The requirement on each figure, with the number."""
        return f"{self.side} {show(self.published, self.unit)}"

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"{Verdict.REPRODUCED}: each figure is {self.demand}. {Verdict.DIRECTION}: each is better than its rival, "
            f"if any, by at least {HALF:g} of the way to that number, in logarithms. Otherwise {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures; those with a rival are compared with it."""
        ordered = sorted(figures, key=lambda figure: figure.mean)
        ends = list(dict.fromkeys(told(end, self.unit) for end in (ordered[0], ordered[-1])))
        ours = " to ".join(ends)
        wrong = [figure for figure in figures if not self.holds(figure.mean, self.published)]
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, f"{_all(figures)} {self.demand}")
        missed = f"not {self.demand}: {_named(wrong, self.unit)}"
        if all(figure.against and self._half_way(figure.mean, mean(figure.against)) for figure in figures):
            return Finding(
                Verdict.DIRECTION, ours, f"{missed}; but better than all rivals, by at least half of the way"
            )
        return Finding(Verdict.NOT, ours, missed)

    def _half_way(self, ours: float, rival: float) -> bool:
        """Whether a figure is at least as good as the geometric mean of its rival and the number."""
        return self.holds(ours, rival) and self.holds(ours, sqrt(rival * self.published))


class AtMost(_Limit):
    """No figure above a published limit."""

    side, sign = "at most", 1


class AtLeast(_Limit):
    """No figure below a published limit."""

    side, sign = "at least", -1


def _all(figures: Sequence[Figure]) -> str:
    return "it is" if len(figures) == 1 else f"all of {len(figures)} figures are"


@dataclass(frozen=True)
class Equal(Rule):
    """Counts that equal a formula or another count.

    Attributes:
        unit: Unit of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return f"{Verdict.REPRODUCED}: each figure equals its reference within {ROUNDING:.0%}. Otherwise {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures with one reference each."""
        wrong = [each for each in figures if not isclose(each.mean, mean(each.against), rel_tol=ROUNDING)]
        right = len(figures) - len(wrong)
        ours = f"{right} of {len(figures)} as stated"
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, _compared(figures[:: max(1, len(figures) - 1)], self.unit))
        return Finding(Verdict.NOT, ours, f"{len(wrong)} differ: {_compared(wrong, self.unit)}")


@dataclass(frozen=True)
class Within(Rule):
    """Figures with one limit each.

    Attributes:
        unit: Unit of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return f"{Verdict.REPRODUCED}: no figure exceeds its limit. Otherwise {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures with one limit each."""
        nearest = max(figures, key=lambda figure: figure.mean / mean(figure.against))
        ours = f"{show(nearest.mean, self.unit)} ({nearest.name}), the nearest to its limit"
        above = [figure for figure in figures if figure.mean > mean(figure.against)]
        if above:
            return Finding(
                Verdict.NOT, ours, f"{len(above)} of {len(figures)} exceed it: {_compared(above, self.unit)}"
            )
        return Finding(Verdict.REPRODUCED, ours, f"all {len(figures)} hold; {_compared([nearest], self.unit)}")


def _compared(figures: Sequence[Figure], unit: str) -> str:
    pairs = ((figure.name, show(figure.mean, unit), show(mean(figure.against), unit)) for figure in figures)
    return "; ".join(f"{name}: {ours}, stated {theirs}" for name, ours, theirs in pairs)


SPREAD = "beyond the spread of seeds (Student's 95% interval of the differences between equal seeds)"


@dataclass(frozen=True)
class NoLoss(Rule):
    """A metric as good as a baseline's, seed by seed.

    Attributes:
        margin: Largest loss that is tolerated, as a share of the baseline's metric.
    """

    margin: float = 0.01

    apart = True

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            "Differences from the baseline, seed by seed, as shares of its metric; negative is worse. Per task: "
            f"{Verdict.REPRODUCED}: Student's 95% interval reaches zero and stays above -{self.margin:.0%}. "
            f"{Verdict.DIRECTION}: it reaches zero, and the mean is above -{self.margin:.0%}. {Verdict.WORSE}: the "
            f"interval excludes zero, and the mean is above -{self.margin:.0%}. {Verdict.NOT}: the interval excludes "
            f"zero, and the mean is below that. Otherwise the seeds spread too widely: {Verdict.UNJUDGED}. "
            f"{Verdict.MIXED}: some tasks support the claim and others do not. Tasks that cannot be judged are named "
            f"and limit the claim to {Verdict.DIRECTION}. The result of a single worker without communication is "
            "given for comparison where it was trained."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures of which greater values are better, against values of the same seeds; the worst counts."""
        found = [self._one(figure) for figure in figures]
        order = list(Verdict)
        worst = max((one.verdict for one in found), key=order.index)
        deciding = [one for one in found if one.verdict is worst]
        ours = "; ".join(one.ours for one in found)
        return Finding(worst, ours, "; ".join(one.reason for one in deciding))

    def _one(self, figure: Figure) -> Finding:
        scale = abs(mean(figure.against)) or 1.0
        shares = _shares(figure.values, figure, scale)
        verdict, words = self._verdict(shares)
        floor = self._of_floor(_shares(figure.floor, figure, scale)) if figure.floor else ""
        return Finding(verdict, f"{figure.name}: {shown(shares, '%')}", f"{figure.name}: {words}{floor}")

    def _verdict(self, shares: Range) -> tuple[Verdict, str]:
        margin, worse = f"{self.margin:.0%}", f"worse by {-shares.mean:.2%}"
        if shares.high < 0:  # the interval excludes equality, which is what the paper claims
            if shares.mean < -self.margin:
                return Verdict.NOT, f"{worse}, beyond the spread of seeds"
            return Verdict.WORSE, f"{worse}, beyond the spread of seeds, but by no more than {margin}"
        if shares.low >= -self.margin:
            return Verdict.REPRODUCED, f"no loss of more than {margin}"
        if shares.mean >= -self.margin:
            return Verdict.DIRECTION, f"the mean loss is at most {margin}, but the seeds do not rule out a larger one"
        return Verdict.UNJUDGED, f"{worse} on average, but within the spread of seeds"

    def _of_floor(self, shares: Range) -> str:
        """Result of a single worker without communication; the task shows little if that passes the same test."""
        passes = "; it passes the same test, so the task only shows that the method does no harm"
        return f" (single worker without communication: {shown(shares, '%')}{passes * (shares.mean >= -self.margin)})"


def _shares(values: Sequence[float], figure: Figure, scale: float) -> Range:
    """Paired differences from the values that a figure is compared with, divided by ``scale``."""
    return Range(*(value / scale for value in difference_of(values, figure.against)))


@dataclass(frozen=True)
class Order(Rule):
    """Methods in order, best first."""

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"Per task: {Verdict.REPRODUCED}: each method is better than the next {SPREAD}. {Verdict.DIRECTION}: the "
            f"means are in this order, and the first is better than the last {SPREAD}. Otherwise {Verdict.NOT}: a "
            f"difference within the spread of seeds does not count. {Verdict.MIXED}: some tasks support the claim and "
            "others do not."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges at least two figures with equal seeds, of which greater values are better."""
        ours = ", ".join(f"{figure.name} {figure.mean:.4g}" for figure in figures)
        steps = [_step(*pair) for pair in pairwise(figures)]
        told = "; ".join(f"{name}: {shown(found)}" for name, found in steps)
        if all(found.low > 0 for _, found in steps):
            return Finding(Verdict.REPRODUCED, ours, told)
        name, whole = _step(figures[0], figures[-1])
        if all(found.mean > 0 for _, found in steps) and whole.low > 0:
            return Finding(Verdict.DIRECTION, ours, f"not every difference exceeds the spread of seeds: {told}")
        if any(found.high < 0 for _, found in [*steps, (name, whole)]):
            return Finding(Verdict.NOT, ours, f"in part the opposite order, beyond the spread of seeds: {told}")
        return Finding(Verdict.NOT, ours, f"no such order beyond the spread of seeds: {told}")


def _step(better: Figure, worse: Figure) -> tuple[str, Range]:
    return f"{better.name} less {worse.name}", difference_of(better.values, worse.values)


@dataclass(frozen=True)
class InnerBest(Rule):
    """Costs that fall at first and then rise.

    Attributes:
        unit: Unit of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return (
            f"{Verdict.REPRODUCED}: the least is neither the first nor the last, and below both {SPREAD}. "
            f"{Verdict.DIRECTION}: it is below the first {SPREAD}. Otherwise {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges figures with equal seeds, of which smaller values are better."""
        best = min(figures, key=lambda figure: figure.mean)
        ours = ", ".join(f"{figure.name}: {show(figure.mean, self.unit)}" for figure in figures)
        saved, lost = (difference_of(end.values, best.values) for end in (figures[0], figures[-1]))
        told = (
            f"{best.name} is the least; {figures[0].name} takes {shown(saved, self.unit)} more, {figures[-1].name} "
            f"{shown(lost, self.unit)} more"
        )
        if saved.low <= 0:
            return Finding(Verdict.NOT, ours, f"nothing is below the first beyond the spread of seeds: {told}")
        if lost.low <= 0:
            return Finding(Verdict.DIRECTION, ours, f"the turn is not beyond the spread of seeds: {told}")
        return Finding(Verdict.REPRODUCED, ours, told)
