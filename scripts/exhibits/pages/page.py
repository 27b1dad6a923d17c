"""A self-contained HTML page: style and figures are inside; figures follow its colours."""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from scripts.exhibits.base import Basis, Draw, Picture
from scripts.exhibits.charts.style import Look, drawing, drawn
from scripts.exhibits.tables import LONG, Row, Table, render
from trainer.report import environment, processor

STYLE = Path(__file__).with_name("page.css")
# Rows and columns up to which a table is kept together on a sheet of paper.
MANY, WIDE = 12, 7


class Section(NamedTuple):
    """A part of a page with an entry in the contents list.

    Attributes:
        key: Id, unique on the page.
        group: Heading in the contents list, and above the title.
        tag: A word next to the title, or empty.
        marks: Number of cells that report a failure.
        exhibit: Name of the exhibit, if the section shows one.
        lead: First figure, for the summary.
    """

    key: str
    group: str
    title: str
    tag: str
    marks: int
    html: str
    exhibit: str = ""
    lead: str = ""


class Entry(NamedTuple):
    """A heading of the contents list, with id and title of each of its parts of the page."""

    title: str
    links: Sequence[tuple[str, str]]


class Source(NamedTuple):
    """Origin of a figure: the command that makes it again, and where it is or why it is missing."""

    command: str
    state: str


# Of a row of a table.
Sources = Callable[[Row], Sequence[Source]]


def page(
    title: str,
    lead: str,
    facts: Mapping[str, str],
    sections: Sequence[Section],
    summary: Markup | None = None,
    contents: Sequence[Entry] = (),
) -> Markup:
    """The whole page.

    Args:
        title: Title of the page, as text.
        lead: What the page shows, in a sentence, as text.
        facts: How the page was made.
        sections: Sections in order; those of one group follow each other.
        summary: Placed after the contents list; sections are folded then.
        contents: Entries of the contents list for the summary.
    """
    groups = [(group, list(members)) for group, members in groupby(sections, lambda section: section.group)]
    style = Markup(STYLE.read_text())
    parts = {"title": title, "lead": lead, "facts": facts, "groups": groups, "summary": summary, "contents": contents}
    return render("page", **parts, style=style)


def image(draw: Draw, key: Mapping[str, Look], text: str) -> Markup:
    """Draws a figure with the legend ``key`` as an ``img`` element with an SVG and a text for screen readers."""
    out = io.BytesIO()
    with drawing(svg_fonttype="none", svg_hashsalt="figure", path_simplify_threshold=0.3):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawn(draw, key).savefig(out, format="svg", transparent=True, metadata=nothing)
    source = b64encode(out.getvalue()).decode()
    return Markup('<img class="plot" alt="{}" src="data:image/svg+xml;base64,{}">').format(text, source)


def figures(pictures: Sequence[Picture], own: str, basis: Basis) -> list[Markup]:
    """Figures with their basis; consecutive panels with the same caption share one. Their ids begin with ``own``."""
    return [_figure(list(panels), own, basis) for _, panels in groupby(pictures, lambda picture: picture.caption)]


def _figure(pictures: Sequence[Picture], own: str, basis: Basis) -> Markup:
    caption = pictures[0].caption
    panels = [
        {
            "title": each.title,
            "wide": each.wide,
            "drawn": image(each.draw, each.key, f"{each.title}: {caption}" if each.title else caption),
        }
        for each in pictures
    ]
    return render("figure", ident=f"{own}-figure-{pictures[0].file}", caption=caption, panels=panels, **_known(basis))


def table(content: Table, ident: str, basis: Basis, sources: Sources) -> Markup:
    """A table with its basis, if any, and the origin of each row."""
    sizes = {"long": len(content.rows) > MANY, "wide": len(content.columns) > WIDE}
    kind = " ".join(["sheet", *(name for name, holds in sizes.items() if holds)])
    found = behind(content.rows, sources)
    return render("sheet", table=content, long=LONG, ident=ident, kind=kind, sources=found, **_known(basis))


def _known(basis: Basis) -> dict[str, Mapping[str, str]]:
    return {"basis": {name.capitalize(): text for name, text in basis._asdict().items() if text}}


def behind(rows: Sequence[Row], sources: Sources) -> Mapping[str, Sequence[Source]]:
    """Origins by row; a single entry if all rows share it, empty without origins."""
    found = {row.name: tuple(sources(row)) for row in rows}
    if not any(found.values()):
        return {}
    if len(found) > 1 and len(set(found.values())) == 1:
        return {"every row": next(iter(found.values()))}
    return found


def here() -> dict[str, str]:
    """Versions, commit, machine and time at which a page is made."""
    return {
        "Made with": in_words(environment()),
        "On": f"{processor()}, {os.cpu_count()} cores",
        "Date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def in_words(found: Mapping[str, object]) -> str:
    """The environment of a run's summary, as text."""
    names = {"python": "Python", "torch": "torch", "spardl": "spardl", "commit": "commit"}
    known = [f"{name} {found[key]}" for key, name in names.items() if found.get(key)]
    return "; ".join([", ".join(known), *([str(found["machine"])] if found.get("machine") else [])])
