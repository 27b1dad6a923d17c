"""Verdicts on a page: in a colour, with a mark, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.tables import Row, Table
from scripts.exhibits.tried import marks

__all__ = ["COLUMN", "Chip", "Judged", "chip", "judged", "judges"]

# A table with such a column is one of verdicts.
COLUMN = "verdict"


class Chip(NamedTuple):
    """How a verdict is shown.

    Attributes:
        kind: of the colour, as the page's style knows it.
        mark: that says the same without any.
        words: the verdict.
    """

    kind: str
    mark: str
    words: str


# By how a verdict begins.
_KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "reproduced": ("good", "\u2713"),
        "in the same direction": ("half", "\u2248"),
        "checked by construction": ("built", "="),
        "cannot be judged": ("open", "?"),
        "not reproduced": ("bad", "\u2717"),
    }
)


def chip(words: str) -> Chip:
    """How a verdict is shown; one that is not known has no colour of its own."""
    kind, mark = next((found for begin, found in _KINDS.items() if words.startswith(begin)), ("open", "\u2022"))
    return Chip(kind, mark, words)


class Judged(NamedTuple):
    """A claim, as the summary has it.

    Attributes:
        claim: its name.
        published: the paper's figure.
        ours: our figures.
        verdict: in words.
        exhibit: that the figures are of.
        jobs: marks of the work behind it.
    """

    claim: str
    published: str
    ours: str
    verdict: str
    exhibit: str
    jobs: Sequence[str]


def judges(table: Table) -> bool:
    """Whether a table has a verdict in every row, beside what it is on."""
    return COLUMN in table.columns[1:]


def judged(table: Table) -> list[Judged]:
    """The claims of a table of verdicts; nothing of others."""
    return [_claim(table, row) for row in table.rows] if judges(table) else []


def _claim(table: Table, row: Row) -> Judged:
    cells = {column: cell.text for column, cell in zip(table.columns[1:], row.cells, strict=True)}
    published, ours = cells.get("published", ""), cells.get("ours", "")
    exhibit = cells.get("exhibit", "").partition(",")[0]
    return Judged(row.name, published, ours, cells[COLUMN], exhibit, marks(row.jobs))
