"""Verdicts on a page, shown by a colour, a mark and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.tables import Row, Table
from scripts.exhibits.tried import marks

__all__ = ["COLUMN", "PAPER", "Chip", "Judged", "chip", "judged", "judges"]

# A table with this column holds a verdict in every row.
COLUMN, PAPER = "verdict", "paper (table or figure)"


class Chip(NamedTuple):
    """How a verdict is shown.

    Attributes:
        kind: Class of the page's style, which sets the colour.
        mark: Sign with the same meaning as the colour.
        words: The verdict.
    """

    kind: str
    mark: str
    words: str


# By the first words of a verdict.
_KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "reproduced": ("good", "\u2713"),
        "in the same direction": ("half", "\u2248"),
        "checked by construction": ("built", "="),
        "depends on the task": ("half", "\u00b1"),
        "slightly worse": ("half", "\u2193"),
        "cannot be judged": ("open", "?"),
        "not reproduced": ("bad", "\u2717"),
    }
)


def chip(words: str) -> Chip:
    """How a verdict is shown; an unknown one has the neutral colour."""
    kind, mark = next((found for begin, found in _KINDS.items() if words.startswith(begin)), ("open", "\u2022"))
    return Chip(kind, mark, words)


class Judged(NamedTuple):
    """A claim in the summary. All but ``exhibits``, ``jobs`` and ``tasks`` is text.

    Attributes:
        claim: Name of the claim.
        paper: Figure of the paper, and where it stands.
        ours: Our figures.
        verdict: Verdict on the whole claim.
        exhibits: Names of the exhibits with our figures.
        jobs: Marks of the jobs behind the figures.
        tasks: Name, verdict and marks of the jobs of each task.
    """

    claim: str
    paper: str
    ours: str
    verdict: str
    exhibits: Sequence[str]
    jobs: Sequence[str]
    tasks: Sequence[tuple[str, str, Sequence[str]]] = ()

    @property
    def parts(self) -> Sequence[tuple[str, str, Sequence[str]]]:
        """Verdicts on tasks; of a claim without tasks the verdict on the claim."""
        return self.tasks or [("", self.verdict, self.jobs)]


def judges(table: Table) -> bool:
    """Whether a table has a verdict in every row."""
    return COLUMN in table.columns[1:]


def judged(table: Table) -> list[Judged]:
    """The claims of a table of verdicts; none for other tables."""
    return [_claim(table, row) for row in table.rows] if judges(table) else []


def _claim(table: Table, row: Row) -> Judged:
    cells = {column: cell.text for column, cell in zip(table.columns[1:], row.cells, strict=True)}
    *exhibits, _ = cells.get("exhibit", "").split(", ")
    return Judged(row.name, cells.get(PAPER, ""), cells.get("ours", ""), cells[COLUMN], exhibits, marks(row.jobs))
