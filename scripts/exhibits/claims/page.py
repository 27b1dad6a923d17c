"""Markdown page of all claims, and the table with everything that each verdict rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.exhibits.base import SWEEPS
from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.judging import TRIVIAL, Claim, Judgement, Limit, claims_table, summary_table
from scripts.exhibits.claims.rules import BEYOND
from scripts.exhibits.tables import Cell, Row, Table, markdown
from scripts.exhibits.templates import render_page

__all__ = ["detailed_table", "page"]

TEMPLATE = Path(__file__).resolve().parents[3] / "docs" / "tables" / "claims.md.j2"


def page(judgements: Sequence[Judgement], scale: str, outputs: Path | None, command: str) -> str:
    """The whole page, as Markdown.

    Args:
        judgements: Verdicts on all claims, at least one.
        scale: Size preset of the runs.
        outputs: Folder of the runs; ``None`` stands for the records.
        command: Command that makes the page again.
    """
    where = f" --outputs {outputs.as_posix()}" if outputs else " --record"
    names = {"good": Verdict.REPRODUCED, "direction": Verdict.DIRECTION, "unjudged": Verdict.UNJUDGED}
    names |= {"bad": Verdict.NOT, "built_in": Verdict.BUILT_IN, "mixed": Verdict.MIXED, "worse": Verdict.WORSE}
    return render_page(
        TEMPLATE,
        making=f"python scripts/reproduce.py all --scale {scale} --jobs 2{where}",
        command=command,
        trivial=TRIVIAL,
        sweeps=SWEEPS,
        beyond=f"{BEYOND:g}",
        verdicts=markdown(summary_table(judgements)),
        claims=markdown(_short(claims_table(judgements))),
        judgements=judgements,
        **names,
    )


def _short(table: Table) -> Table:
    """The table without its last column, the reasons."""
    rows = [row._replace(cells=row.cells[:-1]) for row in table.rows]
    return replace(table, columns=table.columns[:-1], rows=rows)


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
