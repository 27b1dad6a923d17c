"""Generated sections of pages: Markdown between two marks, and the tables that go there."""

from __future__ import annotations

import re
from dataclasses import replace as changed_copy

from scripts.exhibits.outcomes import NOT_RUN_YET
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import ConfigError


def replace(text: str, section: str, content: str) -> str:
    """Puts content between the marks of a section.

    Raises:
        ConfigError: If the text has no such section.
    """
    pattern = rf"(<!-- {section}: .*? -->\n).*?(<!-- end of {section} -->)"
    changed, count = re.subn(pattern, lambda marks: f"{marks[1]}{content}\n{marks[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ConfigError(f"a page must have one section '<!-- {section}: ... -->', got {count}; add or remove one")
    return changed


def without_missing(table: Table) -> Table:
    """Drops rows that have not run, and missing seeds from the cells of the others."""
    rows = [row for row in table.rows if not row.cells or row.cells[0].text != NOT_RUN_YET]
    return changed_copy(
        table, rows=[Row(row.name, [_without_missing(cell) for cell in row.cells], row.jobs) for row in rows]
    )


def _without_missing(cell: Cell) -> Cell:
    return cell._replace(text=", ".join(part for part in cell.text.split(", ") if part != NOT_RUN_YET))
