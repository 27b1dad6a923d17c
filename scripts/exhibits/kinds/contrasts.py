"""Pairwise comparisons of trainings that differ in one setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.exhibits.base import Results, at
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.measures import INTERVAL, LEAST, Range, difference, final_metric, seeds
from scripts.exhibits.outcomes import NOT_RUN_YET, any_failed, succeeded
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["Contrasts", "Pair"]

COLUMNS = ("under these conditions", "difference", INTERVAL, "says")


class Pair(NamedTuple):
    """Two methods that differ in one setting.

    Attributes:
        one: Method whose metric counts.
        other: Method whose metric is subtracted.
    """

    one: str
    other: str


@dataclass(frozen=True)
class Contrasts(MethodComparison):
    """Compares methods and tabulates their differences for equal seeds.

    Attributes:
        pairs: Pairs of methods by the conditions of the comparison.
        question: Title of the table of differences.
    """

    pairs: Mapping[str, Pair] = field(kw_only=True)
    question: str = field(kw_only=True)

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [*super().tables(scale, results), *(self._differences(plan, case, results) for case in plan.cases)]

    def _differences(self, plan: Plan, case: Case, results: Results) -> Table:
        rows = [self._row(plan, case, conditions, results) for conditions in self.pairs]
        return Table(f"{self.question} {case.title}", COLUMNS, rows)

    def _row(self, plan: Plan, case: Case, conditions: str, results: Results) -> Row:
        pair = self.pairs[conditions]
        jobs = [self.job(plan, case, method, seed) for method in pair for seed in plan.seeds]
        one, other = ([results.of(self.job(plan, case, each, seed)) for seed in plan.seeds] for each in pair)
        both = [(a, b) for a, b in zip(one, other, strict=True) if len(succeeded([a, b])) == len(pair)]
        if not both:
            return Row(conditions, [Cell(NOT_RUN_YET, bad=any_failed([*one, *other]))] * (len(COLUMNS) - 1), jobs)
        found = difference(*zip(*((final_metric(a.data), final_metric(b.data)) for a, b in both), strict=True))
        return Row(conditions, _cells(found, len(both), pair, case.lower), jobs)


def _cells(found: Range, count: int, pair: Pair, lower: bool) -> list[Cell]:
    if count < LEAST:
        shown, says = f"none of {seeds(count)}", "too few seeds to say"
    else:
        shown, says = f"{found.low:+.4f} to {found.high:+.4f}", _says(found, pair, lower)
    return [Cell(f"{found.mean:+.4f}", found.mean), Cell(shown), Cell(says)]


def _says(found: Range, pair: Pair, lower: bool) -> str:
    if found.low <= 0 <= found.high:
        return "no difference beyond the seeds'"
    better = pair.one if (found.mean < 0) == lower else pair.other
    return f"{better} is better"
