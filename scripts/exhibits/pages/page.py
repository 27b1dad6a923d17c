"""A self-contained HTML page: style and figures are inside; figures follow its colours."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby, repeat
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from markupsafe import Markup, escape

from scripts.exhibits.base import Basis, Draw, Picture
from scripts.exhibits.charts import axes, palette
from scripts.exhibits.charts.palette import css
from scripts.exhibits.pages.verdicts import COLUMN, Chip, Judged, chip, judged, judges
from scripts.exhibits.tables import LONG, Row, Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Tried
from scripts.exhibits.unrun import Unrun
from trainer.report import environment, processor

# CSS variables that replace the colours of matplotlib.
_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"#000000": "currentColor", "#ffffff": "var(--paper)", **palette.variables()}
)
_COLOURS = re.compile("|".join(_VARIABLES))
# What a page does not need: the style sheet, rotations by nothing, and ids of groups, which repeat in every figure.
_LEFT_OUT = re.compile(r'<style.*?</style>| id="[\w.]*[A-Za-z]_\d+"| transform="rotate\(-0 [^"]*"', re.DOTALL)
_LETTERS = re.compile(r"(font-family: |(?<=px) )'[^;\"]*")  # of the property font, in older versions
# Attributes that hold coordinates. They are rounded to 0.1 points, a difference that is not visible.
_PLACES = re.compile(r'(?<= )(?:d|x|y|width|height|points|transform)="[^"]*"')
_DECIMAL = re.compile(r"-?\d+\.\d+")


def inline(draw: Draw, key: Mapping[str, palette.Look], ident: str, title: str) -> str:
    """Draws a figure as an ``svg`` element.

    Args:
        draw: Function that draws into a matplotlib figure.
        key: Look of each name in the legend; empty for no legend.
        ident: Name of the figure, unique on the page.
        title: Description for screen readers.

    Returns:
        An ``svg`` element for use in HTML. It contains text as text, and has an aspect ratio but no fixed size.
    """
    out = io.BytesIO()
    # Salted hashes make the ids of markers and clip paths unique on the page.
    with axes.drawing(svg_fonttype="none", svg_hashsalt=ident, path_simplify_threshold=0.3):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        axes.drawn(draw, key).savefig(out, format="svg", transparent=True, metadata=nothing)
    head, _, body = out.getvalue().decode().partition("<svg ")[2].partition(">")
    (box,) = re.findall('viewBox="[^"]*"', head)
    text = _PLACES.sub(lambda found: _DECIMAL.sub(_short, " ".join(found[0].split())), _LEFT_OUT.sub("", body))
    text = _COLOURS.sub(lambda found: _VARIABLES[found[0]], _LETTERS.sub(r"\1var(--sans)", text))
    label = f'<svg class="plot" role="img" aria-labelledby="{ident}-title" {box}>\n<title id="{ident}-title">'
    return re.sub(r"\n\s*", "\n", f"{label}{escape(title)}</title>{text.replace('xlink:href', 'href')}")


def _short(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"  # + 0.0 turns -0.0 into 0.0


STYLE = Path(__file__).with_name("page.css")
# Rows and columns up to which a table is kept together on a sheet of paper.
MANY, WIDE = 12, 7


class Section(NamedTuple):
    """A part of a page with an entry in the contents list.

    Attributes:
        key: Id, unique on the page.
        group: Heading in the contents list, and above the title.
        title: Title.
        tag: A word next to the title, or empty.
        marks: Number of cells that report a failure.
        html: Content.
        lead: First figure, for the summary; the content marks its place otherwise.
        tried: Results of methods on tasks.
        judged: Claims that the section judges.
        waiting: Jobs of the section that were not run.
    """

    key: str
    group: str
    title: str
    tag: str
    marks: int
    html: str
    lead: str = ""
    tried: Sequence[Tried] = ()
    judged: Sequence[Judged] = ()
    waiting: Sequence[Unrun] = ()


class Entry(NamedTuple):
    """A heading of the contents list.

    Attributes:
        title: The heading.
        links: Id and title of each part of the page.
    """

    title: str
    links: Sequence[tuple[str, str]]


class Source(NamedTuple):
    """Origin of a figure.

    Attributes:
        command: Command that makes it again.
        state: Folder or file that holds it, or the reason why it is missing.
    """

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
    style = Markup(css() + STYLE.read_text())
    parts = {"title": title, "lead": lead, "facts": facts, "groups": groups, "summary": summary, "contents": contents}
    return render("page", **parts, style=style)


def figures(pictures: Sequence[Picture], own: str, basis: Basis) -> list[Markup]:
    """Figures with their basis.

    Args:
        pictures: Panels; consecutive panels with the same caption share a figure.
        own: Prefix of all ids in the figures, unique on the page.
        basis: Basis of all figures.
    """
    grouped = (list(panels) for _, panels in groupby(pictures, lambda picture: picture.caption))
    return [_figure(panels, own, basis) for panels in grouped]


def _figure(pictures: Sequence[Picture], own: str, basis: Basis) -> Markup:
    idents = [f"{own}-figure-{picture.file}" for picture in pictures]
    panels = [
        {
            "title": picture.title,
            "wide": picture.wide,
            "drawn": Markup(inline(picture.draw, picture.key, ident, _said(picture))),
        }
        for picture, ident in zip(pictures, idents, strict=True)
    ]
    return render("figure", ident=idents[0], caption=pictures[0].caption, panels=panels, basis=_known(basis))


def _said(picture: Picture) -> str:
    """Description of a panel for screen readers."""
    return f"{picture.title}: {picture.caption}" if picture.title else picture.caption


def table(content: Table, ident: str, basis: Basis, sources: Sources) -> Markup:
    """A table with its basis, if any, and the origin of each row."""
    sizes = {"long": len(content.rows) > MANY, "wide": len(content.columns) > WIDE}
    kind = " ".join(["sheet", *(name for name, holds in sizes.items() if holds)])
    found = _behind(content, sources)
    if judges(content):
        return render(
            "verdicts",
            table=content,
            ident=ident,
            rows=list(map(_claim, judged(content), content.rows, repeat(content.columns))),
            sources=found,
        )
    return render("sheet", table=content, long=LONG, ident=ident, kind=kind, basis=_known(basis), sources=found)


def _claim(claim: Judged, row: Row, columns: Sequence[str]) -> tuple[str, Chip, str, Mapping[str, str]]:
    """A claim as one line, and the details that it unfolds."""
    rest = {column: cell.text for column, cell in zip(columns[1:], row.cells, strict=True) if column != COLUMN}
    line = "; ".join(f"{name}: {text}" for name, text in {"paper": claim.paper, "ours": claim.ours}.items() if text)
    return claim.claim, chip(claim.verdict), line, rest


def _known(basis: Basis) -> Mapping[str, str]:
    return {name.capitalize(): text for name, text in basis._asdict().items() if text}


def _behind(content: Table, sources: Sources) -> Mapping[str, Sequence[Source]]:
    """Origins by row; a single entry if all rows share it, empty without origins."""
    found = {row.name: tuple(sources(row)) for row in content.rows}
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
