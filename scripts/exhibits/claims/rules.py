"""Rules that compare figures with published ones, and trainings of several seeds with one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose, log, sqrt
from statistics import mean
from typing import ClassVar

from scripts.exhibits.claims.judging import ORDER, Figure, Finding, Rule, Verdict, difference_of, show, shown
from scripts.exhibits.measures import Range

# Share of the published figure that counts as reproduced; and shares of the published gain (in logarithms) below which
# ours is a different result and above which it must have other causes.
NEAR, HALF, BEYOND = 0.9, 0.5, 1.5
GAIN = f"at least {HALF:g} of the published gain in logarithms and, with several seeds, Student's 95% interval above 1x"
OVERSHOOT = f"More than {BEYOND:g} of it in logarithms is an overshoot: flagged, and {Verdict.DIRECTION} at best"
ROUNDING = 0.01  # counts may differ by this share, because whole entries are sent
SPREAD = "beyond the spread of seeds (Student's 95% interval of the differences between equal seeds)"
FAR = "far beyond the published figure: "


def _share(found: float, published: float) -> float:
    """Share of a published gain or loss, in logarithms."""
    return log(found) / log(published)


def _ordered(figures: Sequence[Figure]) -> list[Figure]:
    return sorted(figures, key=lambda figure: figure.mean)


@dataclass(frozen=True)
class UpTo(Rule):
    """The best of several ratios against the best published one."""

    published: float
    text = (
        f"Ours is the best ratio. {Verdict.REPRODUCED}: a gain, and at least {NEAR:g} of {{0.published:g}}x. "
        f"{Verdict.DIRECTION}: a gain: {GAIN}. {OVERSHOOT}. Otherwise {Verdict.NOT}."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        best = max(figures, key=lambda figure: figure.mean)
        return _ends(best.describe("x"), [("best", best, self.published)])


@dataclass(frozen=True)
class Between(Rule):
    """A published range of ratios: ``low`` over the strongest baseline, ``high`` over the weakest."""

    low: float
    high: float
    text = (
        f"Ours are the least and the greatest ratio over all baselines. {Verdict.REPRODUCED}: the least is at "
        f"least {NEAR:g} of {{0.low:g}}x, the greatest at least {NEAR:g} of {{0.high:g}}x, and both are gains. "
        f"{Verdict.DIRECTION}: both are gains: {GAIN} at their end. {OVERSHOOT}. Otherwise {Verdict.NOT}."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        least, *_, greatest = _ordered([*figures, *figures])
        ours = f"{least.describe('x')} to {greatest.describe('x')}"
        return _ends(ours, [("least", least, self.low), ("greatest", greatest, self.high)])


def _ends(ours: str, ends: Sequence[tuple[str, Figure, float]]) -> Finding:
    """Finding on ratios, each with its name and the published one; a missing gain counts first, then an overshoot."""
    short, beyond, weak = list[str](), list[str](), list[tuple[float, float]]()
    for name, figure, published in ends:
        if not (figure.mean > 1 and figure.range.low > 1):
            short.append(f"the {name} is not a gain: {figure.describe('x')}")
            continue
        share, said = _share(figure.mean, published), f"the {name}, {figure.mean:.4g}x, is"
        if share < HALF:
            short.append(f"{said} {share:.0%} of {published:g}x in logarithms")
        if figure.mean > published**BEYOND:
            beyond.append(f"{said} {share:.1f} times {published:g}x in logarithms")
        if figure.mean < NEAR * published:
            weak.append((figure.mean, published))
    if short:
        return Finding(Verdict.NOT, ours, " and ".join(short))
    if beyond:
        return Finding(Verdict.DIRECTION, ours, f"{FAR}{' and '.join(beyond)}", overshoot=True)
    compared = weak or [(figure.mean, published) for _, figure, published in ends]
    found = " and ".join(f"{value:.4g}x" for value, _ in compared)
    wanted = " and ".join(f"{NEAR:g} of {published:g}x" for _, published in compared)
    if weak:
        return Finding(Verdict.DIRECTION, ours, f"a gain, but {found} is less than {wanted}")
    return Finding(Verdict.REPRODUCED, ours, f"{found} {'is' if len(ends) == 1 else 'are'} at least {wanted}")


@dataclass(frozen=True)
class Keeps(Rule):
    """A share that is kept, against a published one below 1, by the loss."""

    published: float
    text = (
        f"{Verdict.REPRODUCED}: each share is at least {NEAR:g} of {{0.published:.4g}}, and loses at least "
        f"1/{BEYOND:g} of what that loses, in logarithms. {Verdict.DIRECTION}: it loses at most {1 / HALF:g} times "
        f"as much; if it loses less than 1/{BEYOND:g}, that is an overshoot, and flagged. Otherwise {Verdict.NOT}."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        worst = _ordered(figures)[0]
        lost = _share(worst.mean, self.published)
        ours, compared = worst.describe("%"), f"{lost:.2g} of the loss of {show(self.published, '%')} in logarithms"
        if lost > 1 / HALF:
            return Finding(Verdict.NOT, ours, compared)
        if lost < 1 / BEYOND:
            return Finding(Verdict.DIRECTION, ours, FAR + compared, overshoot=True)
        near = worst.mean >= NEAR * self.published
        return Finding(Verdict.REPRODUCED if near else Verdict.DIRECTION, ours, compared)


@dataclass(frozen=True)
class AtMost(Rule):
    """No figure above a published one, or at least better than their rivals; the unit ``%`` is for shares."""

    published: float
    unit: str = ""
    text = (
        f"{Verdict.REPRODUCED}: each figure is {{0.demand}}. {Verdict.DIRECTION}: each is better than its rival, "
        f"if any, by at least {HALF:g} of the way to that number, in logarithms. Otherwise {Verdict.NOT}."
    )
    side: ClassVar[tuple[str, int]] = ("at most", 1)  # 1 if smaller figures are better, -1 if greater ones are

    @property
    def demand(self) -> str:
        """The requirement on each figure, with the number."""
        return f"{self.side[0]} {show(self.published, self.unit)}"

    def judge(self, figures: Sequence[Figure]) -> Finding:
        ordered, sign = _ordered(figures), self.side[1]
        ours = " to ".join(dict.fromkeys(end.describe(self.unit) for end in (ordered[0], ordered[-1])))
        wrong = [figure for figure in figures if sign * figure.mean > sign * self.published]
        if not wrong:
            every = "it is" if len(figures) == 1 else f"all of {len(figures)} figures are"
            return Finding(Verdict.REPRODUCED, ours, f"{every} {self.demand}")
        named = "; ".join(f"{figure.name}: {shown(figure.range, self.unit)}" for figure in wrong)
        missed = f"not {self.demand}: {named}"
        if all(figure.against and self._half_way(sign * figure.mean, mean(figure.against)) for figure in figures):
            words = f"{missed}; but better than all rivals, by at least half of the way"
            return Finding(Verdict.DIRECTION, ours, words)
        return Finding(Verdict.NOT, ours, missed)

    def _half_way(self, ours: float, rival: float) -> bool:
        """Whether a figure is at least as good as the geometric mean of its rival and the number."""
        return all(ours <= self.side[1] * each for each in (rival, sqrt(rival * self.published)))


class AtLeast(AtMost):
    """No figure below a published one."""

    side = ("at least", -1)


@dataclass(frozen=True)
class Equal(Rule):
    """Counts that equal a formula or another count, one reference each."""

    unit: str = ""
    text = f"{Verdict.REPRODUCED}: each figure equals its reference within {ROUNDING:.0%}. Otherwise {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        wrong = [each for each in figures if not isclose(each.mean, mean(each.against), rel_tol=ROUNDING)]
        ours = f"{len(figures) - len(wrong)} of {len(figures)} as stated"
        if not wrong:
            return Finding(Verdict.REPRODUCED, ours, _compared(figures[:: max(1, len(figures) - 1)], self.unit))
        return Finding(Verdict.NOT, ours, f"{len(wrong)} differ: {_compared(wrong, self.unit)}")


@dataclass(frozen=True)
class Within(Rule):
    """Figures with one limit each."""

    unit: str = ""
    text = f"{Verdict.REPRODUCED}: no figure exceeds its limit. Otherwise {Verdict.NOT}."

    def judge(self, figures: Sequence[Figure]) -> Finding:
        nearest = max(figures, key=lambda figure: figure.mean / mean(figure.against))
        ours = f"{show(nearest.mean, self.unit)} ({nearest.name}), the nearest to its limit"
        if above := [figure for figure in figures if figure.mean > mean(figure.against)]:
            words = f"{len(above)} of {len(figures)} exceed it: {_compared(above, self.unit)}"
            return Finding(Verdict.NOT, ours, words)
        return Finding(Verdict.REPRODUCED, ours, f"all {len(figures)} hold; {_compared([nearest], self.unit)}")


def _compared(figures: Sequence[Figure], unit: str) -> str:
    pairs = ((figure.name, show(figure.mean, unit), show(mean(figure.against), unit)) for figure in figures)
    return "; ".join(f"{name}: {ours}, stated {theirs}" for name, ours, theirs in pairs)


@dataclass(frozen=True)
class NoLoss(Rule):
    """A metric as good as a baseline's, seed by seed, up to a share ``margin`` of it; the worst figure counts."""

    margin: float = 0.01
    apart = True
    text = (
        "Differences from the baseline, seed by seed, as shares of its metric; negative is worse. Per task: "
        f"{Verdict.REPRODUCED}: Student's 95% interval reaches zero and stays above -{{0.margin:.0%}}. "
        f"{Verdict.DIRECTION}: it reaches zero, and the mean is above -{{0.margin:.0%}}. {Verdict.WORSE}: the "
        f"interval excludes zero, and the mean is above -{{0.margin:.0%}}. {Verdict.NOT}: the interval excludes "
        f"zero, and the mean is below that. Otherwise the seeds spread too widely: {Verdict.UNJUDGED}. "
        f"{Verdict.MIXED}: some tasks support the claim and others do not. Tasks that cannot be judged are named "
        f"and limit the claim to {Verdict.DIRECTION}. The result of a single worker without communication is "
        "given for comparison where it was trained."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        found = [self._one(figure) for figure in figures]
        worst = max((one.verdict for one in found), key=ORDER.index)
        reasons = (one.reason for one in found if one.verdict is worst)
        return Finding(worst, "; ".join(one.ours for one in found), "; ".join(reasons))

    def _one(self, figure: Figure) -> Finding:
        shares, floor = _shares(figure.values, figure), ""
        if figure.floor:
            # The task shows little if a single worker without communication passes the same test.
            alone = _shares(figure.floor, figure)
            passes = "; it passes the same test, so the task only shows that the method does no harm"
            passes = passes if alone.mean >= -self.margin else ""
            floor = f" (single worker without communication: {shown(alone, '%')}{passes})"
        verdict, words = self._verdict(shares)
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


def _shares(values: Sequence[float], figure: Figure) -> Range:
    """Paired differences from the values that a figure is compared with, as shares of their mean."""
    scale = abs(mean(figure.against)) or 1.0
    return Range(*(value / scale for value in difference_of(values, figure.against)))


@dataclass(frozen=True)
class Order(Rule):
    """At least two methods in order, best first, with equal seeds; greater values are better."""

    text = (
        f"Per task: {Verdict.REPRODUCED}: each method is better than the next {SPREAD}. {Verdict.DIRECTION}: the "
        f"means are in this order, and the first is better than the last {SPREAD}. Otherwise {Verdict.NOT}: a "
        f"difference within the spread of seeds does not count. {Verdict.MIXED}: some tasks support the claim and "
        "others do not."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        ours = ", ".join(f"{figure.name} {figure.mean:.4g}" for figure in figures)
        pairs = [*pairwise(figures), (figures[0], figures[-1])]
        *steps, whole = (difference_of(better.values, worse.values) for better, worse in pairs)
        named = zip(pairs, steps, strict=False)
        differences = "; ".join(f"{better.name} less {worse.name}: {shown(found)}" for (better, worse), found in named)
        if all(found.low > 0 for found in steps):
            return Finding(Verdict.REPRODUCED, ours, differences)
        if all(found.mean > 0 for found in steps) and whole.low > 0:
            return Finding(Verdict.DIRECTION, ours, f"not every difference exceeds the spread of seeds: {differences}")
        opposite = any(found.high < 0 for found in (*steps, whole))
        words = "in part the opposite order, beyond" if opposite else "no such order beyond"
        return Finding(Verdict.NOT, ours, f"{words} the spread of seeds: {differences}")


@dataclass(frozen=True)
class InnerBest(Rule):
    """Costs with equal seeds that fall at first and then rise."""

    unit: str = ""
    text = (
        f"{Verdict.REPRODUCED}: the least is neither the first nor the last, and below both {SPREAD}. "
        f"{Verdict.DIRECTION}: it is below the first {SPREAD}. Otherwise {Verdict.NOT}."
    )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        best = _ordered(figures)[0]
        ours = ", ".join(f"{figure.name}: {show(figure.mean, self.unit)}" for figure in figures)
        first, last = figures[0], figures[-1]
        saved, lost = (difference_of(end.values, best.values) for end in (first, last))
        differences = (
            f"{best.name} is the least; {first.name} takes {shown(saved, self.unit)} more, {last.name} "
            f"{shown(lost, self.unit)} more"
        )
        if saved.low <= 0:
            return Finding(Verdict.NOT, ours, f"nothing is below the first beyond the spread of seeds: {differences}")
        if lost.low <= 0:
            return Finding(Verdict.DIRECTION, ours, f"the turn is not beyond the spread of seeds: {differences}")
        return Finding(Verdict.REPRODUCED, ours, differences)
