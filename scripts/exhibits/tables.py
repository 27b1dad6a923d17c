"""Tables with the jobs behind each row, as Markdown, CSV, LaTeX and HTML; text from templates and between marks.

Cells of jobs without a result give the reason, and failures are marked.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scripts.exhibits.jobs import Job, Outcome, any_failed
from spardl.basics.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")


class Cell(NamedTuple):
    """A cell of a table: a text, the number if it is one, and whether it reports a failure."""

    text: str
    value: float | None = None
    bad: bool = False

    @property
    def plain(self) -> str:
        """The number with full precision, or the text."""
        return self.text if self.value is None else repr(self.value)


class Row(NamedTuple):
    """A row of a table: its first column, the cells of all others, and the jobs that the figures come from."""

    name: str
    cells: Sequence[Cell]
    jobs: Sequence[Job]


@dataclass(frozen=True)
class Table:
    """A table; its first column is that of the row names, and rows have one cell for each further column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns) - 1:
                raise ValueError(
                    f"{self.title}: row {row.name} must have a cell for each of {self.columns[1:]}, got "
                    f"{len(row.cells)} cells"
                )

    @property
    def numeric(self) -> list[bool]:
        """Whether each column after the first contains numbers."""
        places = range(len(self.columns) - 1)
        return [any(row.cells[place].value is not None for row in self.rows) for place in places]

    def texts(self) -> Iterable[list[str]]:
        """Returns the texts of the rows, names first."""
        return ([row.name, *(cell.text for cell in row.cells)] for row in self.rows)


# Cells of a row of which no job was started.
NOT_RUN_YET, NOT_RUN = "not run yet", "not run"


def failed(outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    """A number of cells, at least 1, of a row whose jobs have at least one outcome without a result."""
    lost = [outcome for outcome in outcomes if outcome.reason is not None]
    reasons = "; ".join(sorted({outcome.fault for outcome in lost}))
    begun = any_failed(lost)
    return [Cell(reasons, bad=begun), *[Cell("failed" if begun else NOT_RUN, bad=begun)] * (count - 1)]


def row_of(
    name: str, job: Job, outcome: Outcome, count: int, cells: Callable[[Mapping[str, Any]], Sequence[Cell]]
) -> Row:
    """Row of one job, with a number of cells that a function makes from the result; also of a failed job."""
    return Row(name, failed([outcome], count) if outcome.reason is not None else cells(outcome.data), [job])


def without_missing(table: Table) -> Table:
    """Drops rows that have not run, and missing seeds from the cells of the others."""
    rows = [row for row in table.rows if not row.cells or row.cells[0].text != NOT_RUN_YET]
    return replace(
        table, rows=[Row(row.name, [_without_missing(cell) for cell in row.cells], row.jobs) for row in rows]
    )


def _without_missing(cell: Cell) -> Cell:
    return cell._replace(text=", ".join(part for part in cell.text.split(", ") if part != NOT_RUN_YET))


BAR = "\\|"  # in a cell


def markdown(table: Table) -> str:
    """Formats a Markdown table."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.texts()]
    return "".join(f"| {' | '.join(text.replace('|', BAR) for text in line)} |\n" for line in lines)


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([row.name, *(cell.plain for cell in row.cells)] for row in table.rows)
    return out.getvalue()


LATEX_MARKS: Mapping[int, str] = MappingProxyType(
    str.maketrans(
        {
            **{mark: f"\\{mark}" for mark in "&%$#_{}"},
            "\\": r"\textbackslash{}",
            "~": r"\textasciitilde{}",
            "^": r"\textasciicircum{}",
            "±": r"$\pm$",
        }
    )
)


def _latex(table: Table) -> str:
    head, *lines = (
        " & ".join(text.translate(LATEX_MARKS) for text in line) + r" \\" for line in (table.columns, *table.texts())
    )
    layout, body = "l" + "r" * (len(table.columns) - 1), "\n".join([head, r"\hline", *lines])
    return f"% {table.title}\n\\begin{{tabular}}{{{layout}}}\n{body}\n\\end{{tabular}}\n"


LONG = 40  # characters from which a cell gets a wide column


def _html(table: Table) -> Markup:
    return render("table", table=table, long=LONG)


# By the ending of the file.
WRITERS: Mapping[str, Callable[[Table], str]] = MappingProxyType(
    {"md": markdown, "csv": _csv, "tex": _latex, "html": _html}
)


@cache
def _environment(folder: Path, escape: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: object) -> Markup:
    """Renders HTML from the template of this name; text is escaped, unless it is :class:`~markupsafe.Markup`."""
    return Markup(_environment(TEMPLATES, escape=True).get_template(f"{template}.html").render(values))


def render_page(template: Path, **values: object) -> str:
    """Renders Markdown from a template file (``*.md.j2``); values are not escaped."""
    return _environment(template.parent, escape=False).get_template(template.name).render(values)


def replace_section(text: str, section: str, content: str) -> str:
    """Puts content between the marks of a section.

    Raises:
        ConfigError: If the text has no such section.
    """
    pattern = rf"(<!-- {section}: .*? -->\n).*?(<!-- end of {section} -->)"
    changed, count = re.subn(pattern, lambda marks: f"{marks[1]}{content}\n{marks[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ConfigError(f"a page must have one section '<!-- {section}: ... -->', got {count}; add or remove one")
    return changed
