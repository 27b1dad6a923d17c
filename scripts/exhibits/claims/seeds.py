"""Rules for trainings with several seeds: a difference counts if it exceeds the spread of seeds."""

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
            f"Per task: {Verdict.REPRODUCED}: each method is better than the next {BEYOND}. {Verdict.DIRECTION}: the "
            f"means are in this order, and the first is better than the last {BEYOND}. Otherwise {Verdict.NOT}: a "
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
            f"{Verdict.REPRODUCED}: the least is neither the first nor the last, and below both {BEYOND}. "
            f"{Verdict.DIRECTION}: it is below the first {BEYOND}. Otherwise {Verdict.NOT}."
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
