"""The report of exhibits: one section per exhibit and size, collected into one page.

Every section is a separate file, and the page is assembled from these files. A command therefore adds to the sections
of earlier commands, and several commands may do so at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from scripts.exhibits.base import Basis, Exhibit, Results
from scripts.exhibits.charts.axes import drawing, drawn
from scripts.exhibits.pages.page import Section, Source, figures, here, in_words, page, table
from scripts.exhibits.pages.summary import HERE, contents, placed, summary
from scripts.exhibits.pages.verdicts import Judged, Part, judged, judges
from scripts.exhibits.tables import WRITERS, Row, Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Tried
from scripts.exhibits.unrun import Unrun, unrun, without_unrun
from spardl.basics.errors import DataError
from spardl.basics.files import write_atomically

MOST_SOURCES = 12
TITLE = "Reproduced tables and figures"
LEAD = (
    "Claims of the papers, our figures, and verdicts by rule. Below, every figure lists its runs and states what was "
    "simulated, measured or assumed. A cell with \u2717 marks a failure."
)


def key(name: str, scale: str) -> str:
    """Key of an exhibit's section."""
    return f"{name}-{scale}"


def sources(row: Row, results: Results) -> list[Source]:
    """Commands and folders behind a row."""
    found = [(job.command, results.of(job)) for job in row.jobs]
    return [
        Source(command, f"{outcome.fault}; see {outcome.where}" if outcome.reason else outcome.origin)
        for command, outcome in found
    ]


def exhibit_section(exhibit: Exhibit, group: str, scale: str, results: Results) -> Section:
    """The section of an exhibit.

    Args:
        exhibit: The exhibit.
        group: Paper of the exhibit.
        scale: Size preset of the runs.
        results: Results of the runs.
    """
    tables, pictures = without_unrun(exhibit.tables(scale, results)), exhibit.pictures(scale, results)
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
    tried, waiting = exhibit.tried(scale, results), unrun(exhibit, scale, results)
    return Section(own, group, exhibit.title, scale, _marks(tables), html, lead, tried, waiting=waiting)


def tables_section(
    own: str,
    title: str,
    words: str,
    scale: str,
    tables: Sequence[Table],
    basis: Basis,
    results: Results,
    judged_claims: Sequence[Judged] | None = None,
) -> Section:
    """A section of tables that belong to no single exhibit.

    Args:
        own: Key of the section.
        title: Title of the section.
        words: Introduction, as text.
        scale: Size preset of the runs.
        tables: Tables of the section.
        basis: Basis of the tables.
        results: Results behind the rows.
        judged_claims: Claims for the summary; ``None``: those of the tables.
    """
    parts = rendered(tables, own, basis, results)
    html = render("tables", words=words, parts=parts, lines=_made(tables, results))
    claims = [claim for content in tables for claim in judged(content)] if judged_claims is None else judged_claims
    marked = _marks([content for content in tables if not judges(content)])  # "not reproduced" is not a failure
    return Section(own, "", title, scale, marked, html, judged=claims)


def rendered(tables: Sequence[Table], own: str, basis: Basis, results: Results) -> list[Markup]:
    """HTML of the tables of a section.

    Args:
        tables: The tables.
        own: Key of the section.
        basis: Basis of all tables.
        results: Results behind the rows.
    """
    return [
        table(content, f"{own}-table-{number}", basis, lambda row: _few(sources(row, results)))
        for number, content in enumerate(tables, 1)
    ]


def _few(found: Sequence[Source]) -> Sequence[Source]:
    # A page that lists all of them would be too large to send around.
    left = len(found) - MOST_SOURCES
    return found if left <= 1 else [*found[:MOST_SOURCES], Source(f"and {left} more", "listed by --explain")]


def _marks(tables: Sequence[Table]) -> int:
    return sum(cell.bad for table in tables for row in table.rows for cell in row.cells)


def _made(tables: Sequence[Table], results: Results) -> list[str]:
    """When and where the section and its runs were made, and the caveats of the runs."""
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
    """Adds sections to a report, in place of those with the same key.

    Args:
        folder: Folder of the report.
        sections: New sections.
        order: Keys in the order of the page; sections with other keys come last.

    Returns:
        Path of the page.

    Raises:
        DataError: if an existing section cannot be read.
    """
    parts = folder / "sections"
    parts.mkdir(parents=True, exist_ok=True)
    for section in sections:
        write_atomically(parts / f"{section.key}.json", json.dumps(section._asdict()).encode())
    places = {own: place for place, own in enumerate(order)}
    kept = sorted(map(_read, parts.glob("*.json")), key=lambda each: (places.get(each.key, len(places)), each.key))
    index = folder / "index.html"
    write_atomically(index, page(TITLE, LEAD, here(), placed(kept), summary(kept), contents(kept)).encode())
    return index


def _read(path: Path) -> Section:
    try:
        found = Section(**json.loads(path.read_bytes()))
        tried = [Tried(*each) for each in found.tried]
        claims = [Judged(*each)._replace(tasks=[Part(*task) for task in each[-1]]) for each in found.judged]
        return found._replace(tried=tried, judged=claims, waiting=[Unrun(*each) for each in found.waiting])
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a section of a report ({error}); delete it and make its exhibit again"
        ) from error


ENDINGS = ("png", "pdf")


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes tables and figures, and returns the tables; rows that were not run are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = without_unrun(exhibit.tables(scale, results))
    for number, content in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(content).encode())
    _draw(exhibit, scale, results, folder)
    return tables


def _draw(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> None:
    for picture in exhibit.pictures(scale, results):
        with drawing():
            figure = drawn(picture.draw, picture.key, picture.title or picture.caption)
            for ending in ENDINGS:
                figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=200)
