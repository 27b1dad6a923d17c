"""Verdicts on a page, shown by a colour, a mark and words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.tables import Row, Table
from scripts.exhibits.tried import marks

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


# By the first words of a verdict, best first; what holds by construction shows less than any other support.
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
_SUPPORT = tuple(_KINDS)[:3]


def chip(words: str) -> Chip:
    """How a verdict is shown; an unknown one has the neutral colour."""
    kind, mark = next((found for begin, found in _KINDS.items() if words.startswith(begin)), ("open", "\u2022"))
    return Chip(kind, mark, words)


class Part(NamedTuple):
    """Verdict on one task of a claim, or on a whole claim without tasks.

    Attributes:
        task: Name of the task; empty for a whole claim.
        verdict: The verdict.
        jobs: Marks of the jobs behind the figures.
        ours: Our figures.
    """

    task: str
    verdict: str
    jobs: Sequence[str]
    ours: str = ""

    @property
    def rank(self) -> tuple[int, str]:
        """Place in the order of verdicts, best first; an overshoot comes after its plain verdict."""
        ranks = [place for place, begin in enumerate(_KINDS) if self.verdict.startswith(begin)]
        return (ranks[0] if ranks else len(_KINDS), self.verdict)


class Judged(NamedTuple):
    """A claim in the summary. All but ``exhibits``, ``jobs`` and ``tasks`` is text.

    Attributes:
        claim: Name of the claim.
        paper: Figure of the paper, and where it stands.
        ours: Our figures.
        verdict: Verdict on the whole claim.
        exhibits: Names of the exhibits with our figures.
        jobs: Marks of the jobs behind the figures.
        tasks: Verdict on each task.
    """

    claim: str
    paper: str
    ours: str
    verdict: str
    exhibits: Sequence[str]
    jobs: Sequence[str]
    tasks: Sequence[Part] = ()

    @property
    def figure(self) -> str:
        """The figure of the paper, without the place where it stands."""
        return self.paper.rpartition(" (")[0] or self.paper

    @property
    def parts(self) -> Sequence[Part]:
        """Verdicts on tasks; of a claim without tasks the verdict on the claim."""
        return self.tasks or [Part("", self.verdict, self.jobs, self.ours)]


def best_part(claims: Iterable[Judged]) -> tuple[Judged, Part] | None:
    """The part with the best verdict, and its claim; the first of equals, ``None`` if no part supports its claim."""
    found = [(claim, part) for claim in claims for part in claim.parts]
    best = min(found, key=lambda each: each[1].rank, default=None)
    return best if best and best[1].verdict.startswith(_SUPPORT) else None


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
