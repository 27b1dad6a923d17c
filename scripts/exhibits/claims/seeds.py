"""Rules for what is trained several times: a difference counts if it is beyond the spread of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from scripts.exhibits.claims.base import Figure, Finding, Rule, Verdict, difference_of, show, shown
from scripts.exhibits.statistics import Range

__all__ = ["InnerBest", "NoLoss", "Order"]

BEYOND = "beyond the spread of seeds (Student's 95% interval of the differences between equal seeds)"


@dataclass(frozen=True)
class NoLoss(Rule):
    """A metric as good as a baseline's, seed by seed.

    Attributes:
        margin: the share of the baseline's metric that is no loss yet.
    """

    margin: float = 0.01

    apart = True

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            "Ours are differences from the baseline, seed by seed, as shares of its metric, turned so that below zero "
            f"is worse. {Verdict.REPRODUCED}: Student's 95% interval of the mean is not below "
            f"-{self.margin:.0%}. {Verdict.DIRECTION}: the mean is not below it. {Verdict.NOT}: the whole "
            f"interval is below zero. Else the seeds spread too widely: {Verdict.UNJUDGED}. Of several cases the "
            f"worst counts; those that cannot be judged are named, and leave {Verdict.DIRECTION} at best. What one "
            "worker alone reaches is told beside it, where it was trained."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; greater values are better ones, and compared with those of the same seeds."""
        found = [self._one(figure) for figure in figures]
        order = list(Verdict)
        worst = max((one.verdict for one in found), key=order.index)
        deciding = [one for one in found if one.verdict is worst]
        ours = "; ".join(one.ours for one in found)
        return Finding(worst, ours, "; ".join(one.reason for one in deciding))

    def _one(self, figure: Figure) -> Finding:
        scale = abs(mean(figure.against)) or 1.0
        shares, margin = _shares(figure.values, figure, scale), f"-{self.margin:.0%}"
        told = self._of_floor(_shares(figure.floor, figure, scale)) if figure.floor else ""
        ours = f"{figure.name}: {shown(shares, '%')}"
        if shares.low >= -self.margin:
            return Finding(Verdict.REPRODUCED, ours, f"{figure.name}: no worse than {margin}{told}")
        if shares.mean >= -self.margin:
            reason = f"{figure.name}: the mean is no worse than {margin}, but the seeds do not rule that out{told}"
            return Finding(Verdict.DIRECTION, ours, reason)
        if shares.high < 0:
            reason = f"{figure.name}: worse by {-shares.mean:.2%}, beyond the spread of seeds{told}"
            return Finding(Verdict.NOT, ours, reason)
        reason = f"{figure.name}: worse by {-shares.mean:.2%} on average, but within the spread of seeds{told}"
        return Finding(Verdict.UNJUDGED, ours, reason)

    def _of_floor(self, shares: Range) -> str:
        """What one worker alone loses, who sends nothing, and what it means if that is no more than a method may."""
        passes = "; it passes, too, so no more is shown than that the method does no harm"
        told = passes if shares.mean >= -self.margin else ""
        return f" (one worker alone, which sends nothing: {shown(shares, '%')}{told})"


def _shares(values: Sequence[float], figure: Figure, scale: float) -> Range:
    """How much better values are than what a figure is compared with, in units of a scale."""
    return Range(*(value / scale for value in difference_of(values, figure.against)))


@dataclass(frozen=True)
class Order(Rule):
    """Methods, the best first."""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"{Verdict.REPRODUCED}: each is better than the next {BEYOND}. {Verdict.DIRECTION}: the means are in this "
            f"order, and the first is better than the last in that way. Else {Verdict.NOT}: what is within the spread "
            "of seeds is no difference."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; at least two, greater values are better ones, with equal seeds."""
        ours = ", ".join(f"{figure.name} {figure.mean:.4g}" for figure in figures)
        steps = [_step(*pair) for pair in pairwise(figures)]
        told = "; ".join(f"{name}: {shown(found)}" for name, found in steps)
        if all(found.low > 0 for _, found in steps):
            return Finding(Verdict.REPRODUCED, ours, told)
        name, whole = _step(figures[0], figures[-1])
        if all(found.mean > 0 for _, found in steps) and whole.low > 0:
            return Finding(Verdict.DIRECTION, ours, f"not every difference is beyond the spread of seeds: {told}")
        if any(found.high < 0 for _, found in [*steps, (name, whole)]):
            return Finding(Verdict.NOT, ours, f"in part the opposite order, beyond the spread of seeds: {told}")
        return Finding(Verdict.NOT, ours, f"no such order beyond the spread of seeds: {told}")


def _step(better: Figure, worse: Figure) -> tuple[str, Range]:
    return f"{better.name} less {worse.name}", difference_of(better.values, worse.values)


@dataclass(frozen=True)
class InnerBest(Rule):
    """Costs that fall at first, and then rise.

    Attributes:
        unit: of the figures.
    """

    unit: str = ""

    @property
    def words(self) -> str:
        """See :attr:`Rule.words`."""
        return (
            f"{Verdict.REPRODUCED}: the least is neither the first nor the last, and below both {BEYOND}. "
            f"{Verdict.DIRECTION}: it is below the first in that way. Else {Verdict.NOT}."
        )

    def judge(self, figures: Sequence[Figure]) -> Finding:
        """See :meth:`Rule.judge`; lesser values are better ones, with equal seeds."""
        best = min(figures, key=lambda figure: figure.mean)
        ours = ", ".join(f"{figure.name}: {show(figure.mean, self.unit)}" for figure in figures)
        saved, lost = (difference_of(end.values, best.values) for end in (figures[0], figures[-1]))
        told = (
            f"{best.name} is the least; {figures[0].name} has {shown(saved, self.unit)} more, {figures[-1].name} "
            f"{shown(lost, self.unit)} more"
        )
        if saved.low <= 0:
            return Finding(Verdict.NOT, ours, f"nothing is below the first beyond the spread of seeds: {told}")
        if lost.low <= 0:
            return Finding(Verdict.DIRECTION, ours, f"the turn is not beyond the spread of seeds: {told}")
        return Finding(Verdict.REPRODUCED, ours, told)
