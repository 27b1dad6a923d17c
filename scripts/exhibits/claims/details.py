"""The table of claims with everything that each verdict rests on, which the report folds out."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.judging import Claim, Judgement, Limit, claims_table
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["detailed_table"]

COLUMNS = (
    "claimed",
    "compared",
    "rule",
    "limits",
    "by construction",
    "exhibit",
    "setting",
    "simulated",
    "measured",
    "assumed",
)


def detailed_table(judgements: Sequence[Judgement]) -> Table:
    """The table of all claims, with further columns for everything that a verdict rests on."""
    short = claims_table(judgements)
    rows = [
        Row(row.name, [*row.cells, *map(Cell, _details(judgement))], row.jobs)
        for row, judgement in zip(short.rows, judgements, strict=True)
    ]
    return Table(short.title, (*short.columns, *COLUMNS), rows)


def _details(judgement: Judgement) -> tuple[str, ...]:
    claim = judgement.claim
    note = f" ({claim.published.note})" if claim.published.note else ""
    limits = "; ".join(f"{limit.reason} ({_bounds(limit)})" for limit in claim.limits_at(judgement.scale))
    return (
        f"{claim.states}{note}",
        claim.measure,
        claim.rule.words,
        limits or "none",
        _built_in(claim) if claim.construction else "no",
        f"{', '.join(claim.exhibits)}, {judgement.scale}",
        judgement.setting,
        *judgement.basis,
    )


def _built_in(claim: Claim) -> str:
    """Why the claim must hold by construction, and the verdict that this gives."""
    return f"{claim.construction}; if the rule is satisfied, the verdict is {Verdict.BUILT_IN}"


def _bounds(limit: Limit) -> str:
    """Best and worst verdict under a limit."""
    worst = "" if limit.at_worst is Verdict.NOT else f", {limit.at_worst} at worst"
    return f"{limit.at_best} at best{worst}"
