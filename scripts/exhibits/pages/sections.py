"""The report of exhibits: one section for each exhibit and scale, gathered over many commands into one page.

Every section is a file of its own, and the page is put together from these files. So a command adds to what others
made, and any number of them may do so at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from scripts.exhibits.base import Basis, Exhibit, Results
from scripts.exhibits.pages.page import Section, Source, figures, here, in_words, page, table
from scripts.exhibits.pages.summary import HERE, placed, summary
from scripts.exhibits.pages.verdicts import Judged, judged, judges
from scripts.exhibits.tables import Row, Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Tried
from spardl.basics.errors import DataError
from spardl.basics.files import write_atomically

__all__ = ["add", "exhibit_section", "key", "rendered", "sources", "tables_section"]

MOST_SOURCES = 12
TITLE = "Reproduced tables and figures"
LEAD = (
    "Every figure here can be traced to the runs behind it, and beside each stands what of it was simulated, measured "
    "and assumed. A cell with \u2717 says what failed, or what does not hold."
)


def key(name: str, scale: str) -> str:
    """The key of an exhibit's section."""
    return f"{name}-{scale}"


def sources(row: Row, results: Results) -> list[Source]:
    """Commands and folders behind a row."""
    found = [(job.command, results.of(job)) for job in row.jobs]
    return [
        Source(command, f"{outcome.fault}; see {outcome.where}" if outcome.reason else outcome.origin)
        for command, outcome in found
    ]


def exhibit_section(exhibit: Exhibit, group: str, scale: str, results: Results) -> Section:
    """What the report says of an exhibit.

    Args:
        exhibit: it.
        group: its paper, in words.
        scale: of the work.
        results: of the work.
    """
    tables, pictures = exhibit.tables(scale, results), exhibit.pictures(scale, results)
    own = key(exhibit.name, scale)
    about = {
        "Source": exhibit.source,
        "Shows": exhibit.shows,
        "What ran": exhibit.what_ran(scale),
    }
    command = f"python scripts/reproduce.py {exhibit.name} --scale {scale}"
    drawn = figures(pictures, own, exhibit.basis)
    lead, rest = ("".join(drawn[:1]), drawn[1:]) if exhibit.leads else ("", drawn)
    parts = [*rest, *rendered(tables, own, exhibit.basis, results)]
    here = Markup(HERE) if lead else ""
    html = render("exhibit", about=about, command=command, lead=here, parts=parts, lines=_made(tables, results))
    return Section(own, group, exhibit.title, scale, _marks(tables), html, lead, exhibit.tried(scale, results))


def tables_section(
    own: str, title: str, words: str, scale: str, tables: Sequence[Table], basis: Basis, results: Results
) -> Section:
    """A section of tables that belong to no one exhibit.

    Args:
        own: its key.
        title: over it.
        words: what it is, as text.
        scale: of the work.
        tables: its tables.
        basis: of these.
        results: of the work behind their rows.
    """
    parts = rendered(tables, own, basis, results)
    html = render("tables", words=words, parts=parts, lines=_made(tables, results))
    found = [claim for content in tables for claim in judged(content)]
    marked = _marks([content for content in tables if not judges(content)])  # what is not reproduced has not failed
    return Section(own, "", title, scale, marked, html, judged=found)


def rendered(tables: Sequence[Table], own: str, basis: Basis, results: Results) -> list[Markup]:
    """Tables as they stand in a section; ``own``: its key, ``basis``: of all, ``results``: behind their rows."""
    return [
        table(content, f"{own}-table-{number}", basis, lambda row: _few(sources(row, results)))
        for number, content in enumerate(tables, 1)
    ]


def _few(found: Sequence[Source]) -> Sequence[Source]:
    """No more than a reader looks through, for a page that can be sent around."""
    left = len(found) - MOST_SOURCES
    return found if left <= 1 else [*found[:MOST_SOURCES], Source(f"and {left} more", "named by --explain")]


def _marks(tables: Sequence[Table]) -> int:
    return sum(cell.bad for table in tables for row in table.rows for cell in row.cells)


def _made(tables: Sequence[Table], results: Results) -> list[str]:
    """When and where the section and the runs behind it were made, and what these warn of."""
    jobs = dict.fromkeys(job for table in tables for row in table.rows for job in row.jobs)
    found = [results.of(job).data for job in jobs]
    runs = sorted({in_words(data["environment"]) for data in found if "environment" in data})
    caveats = sorted({caveat for data in found for caveat in data.get("caveats", ())})
    return [
        f"Written {here()['Date']}.",
        *(f"Trained with {run}." for run in runs),
        *(f"Caveat: {caveat}." for caveat in caveats),
    ]


def add(folder: Path, sections: Sequence[Section], order: Sequence[str]) -> Path:
    """Adds sections to a report, in place of those of the same key.

    Args:
        folder: of the report.
        sections: new ones.
        order: keys, as they shall follow each other; what has another key comes last.

    Returns:
        The page.

    Raises:
        DataError: if what was there before cannot be read.
    """
    parts = folder / "sections"
    parts.mkdir(parents=True, exist_ok=True)
    for section in sections:
        write_atomically(parts / f"{section.key}.json", json.dumps(section._asdict()).encode())
    places = {own: place for place, own in enumerate(order)}
    kept = sorted(map(_read, parts.glob("*.json")), key=lambda each: (places.get(each.key, len(places)), each.key))
    index = folder / "index.html"
    write_atomically(index, page(TITLE, LEAD, here(), placed(kept), summary(kept)).encode())
    return index


def _read(path: Path) -> Section:
    try:
        found = Section(**json.loads(path.read_bytes()))
        tried, claims = [Tried(*each) for each in found.tried], [Judged(*each) for each in found.judged]
        return found._replace(tried=tried, judged=claims)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is no section of a report ({error}); delete it, and make its exhibit again") from error
