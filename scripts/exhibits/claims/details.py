"""How each claim was judged: what the report folds out beside its verdict."""

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
    """The table of all claims, and in further columns all that a verdict rests on."""
    short = claims_table(judgements)
    rows = [
        Row(row.name, [*row.cells, *map(Cell, _told(judgement))], row.jobs)
        for row, judgement in zip(short.rows, judgements, strict=True)
    ]
    return Table(short.title, (*short.columns, *COLUMNS), rows)


def _told(judgement: Judgement) -> tuple[str, ...]:
    """A text for each of the further columns."""
    claim = judgement.claim
    note = f" ({claim.published.note})" if claim.published.note else ""
    limits = "; ".join(f"{limit.reason} ({_bounds(limit)})" for limit in claim.limits_at(judgement.scale))
    return (
        f"{claim.states}{note}",
        claim.measure,
        claim.rule.words,
        limits or "none",
        _built_in(claim) if claim.construction else "no",
        f"{claim.exhibit}, {judgement.scale}",
        judgement.setting,
        *judgement.basis,
    )


def _built_in(claim: Claim) -> str:
    """Why it has to be true, and what the rule's words become then."""
    return f"{claim.construction}; what the rule finds true is {Verdict.BUILT_IN}"


def _bounds(limit: Limit) -> str:
    """Between which verdicts it leaves a choice."""
    worst = "" if limit.at_worst is Verdict.NOT else f", {limit.at_worst} at worst"
    return f"{limit.at_best} at best{worst}"
