"""Markdown page of all claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.exhibits.base import SWEEPS
from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.bounds import BEYOND
from scripts.exhibits.claims.judging import TRIVIAL, Judgement, claims_table, summary_table
from scripts.exhibits.tables import Table, markdown
from scripts.exhibits.templates import render_page

__all__ = ["page"]

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
