"""One HTML page that needs nothing but itself: its style is inside, and so are its figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby, repeat
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.charts.palette import css
from scripts.exhibits.pages.svg import inline, swatch
from scripts.exhibits.pages.verdicts import COLUMN, Chip, Judged, chip, judged, judges
from scripts.exhibits.tables import LONG, Row, Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Tried
from trainer.report import environment, processor

__all__ = ["Section", "Source", "Sources", "figures", "here", "in_words", "page", "table"]

STYLE = Path(__file__).with_name("page.css")
# More rows, or columns, than are kept together, or legible, on a sheet of paper.
MANY, WIDE = 12, 7


class Section(NamedTuple):
    """A part of a page with a line of its own in the table of contents.

    Attributes:
        key: its id; unique on the page.
        group: under which heading the contents name it, and what stands above its title.
        title: in words.
        tag: a word beside the title, or nothing.
        marks: how many of its cells say what went wrong.
        html: what it holds.
        lead: its first figure, for the summary; the html says where it belongs otherwise.
        tried: what methods reached in it.
        judged: claims that it judges.
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


class Source(NamedTuple):
    """Where a figure comes from.

    Attributes:
        command: what to type to have it made again.
        state: the folder or file that holds it, or why there is none.
    """

    command: str
    state: str


# Of a row of a table.
Sources = Callable[[Row], Sequence[Source]]


def page(
    title: str, lead: str, facts: Mapping[str, str], sections: Sequence[Section], summary: Markup | None = None
) -> Markup:
    """The whole page.

    Args:
        title: of the page, as text.
        lead: what it is, in a sentence, as text.
        facts: on how it came about.
        sections: in their order; those of one group stand together.
        summary: stands in place of the contents; sections are folded then.
    """
    groups = [(group, list(members)) for group, members in groupby(sections, lambda section: section.group)]
    style = Markup(css() + STYLE.read_text())
    return render("page", title=title, lead=lead, facts=facts, groups=groups, style=style, summary=summary)


def figures(pictures: Sequence[Picture], own: str, basis: Basis) -> list[Markup]:
    """Figures, with what must be known to believe them beside each.

    Args:
        pictures: panels; those that follow each other with the same caption share a figure.
        own: what all ids in the figures begin with; unique on the page.
        basis: of all of them.
    """
    grouped = (list(panels) for _, panels in groupby(pictures, lambda picture: picture.caption))
    return [_figure(panels, own, basis) for panels in grouped]


def _figure(pictures: Sequence[Picture], own: str, basis: Basis) -> Markup:
    idents = [f"{own}-figure-{picture.file}" for picture in pictures]
    panels = [
        {"title": picture.title, "wide": picture.wide, "drawn": Markup(inline(picture.draw, ident, _said(picture)))}
        for picture, ident in zip(pictures, idents, strict=True)
    ]
    key = [(name, swatch(look)) for name, look in pictures[0].key.items()]
    caption = pictures[0].caption
    return render("figure", ident=idents[0], caption=caption, key=key, panels=panels, basis=_known(basis))


def _said(picture: Picture) -> str:
    """What a panel shows, for those who cannot see it."""
    return f"{picture.title}: {picture.caption}" if picture.title else picture.caption


def table(content: Table, ident: str, basis: Basis, sources: Sources) -> Markup:
    """A table, with what must be known to believe it, if anything, and where each row comes from."""
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
    """A claim in a line, and what is to be seen when it is opened."""
    rest = {column: cell.text for column, cell in zip(columns[1:], row.cells, strict=True) if column != COLUMN}
    told = "; ".join(
        f"{name} {text}" for name, text in {"published": claim.published, "ours": claim.ours}.items() if text
    )
    return claim.claim, chip(claim.verdict), told, rest


def _known(basis: Basis) -> Mapping[str, str]:
    return {name.capitalize(): text for name, text in basis._asdict().items() if text}


def _behind(content: Table, sources: Sources) -> Mapping[str, Sequence[Source]]:
    """What is behind each row; behind all of them, where that is the same; nothing, where nothing is."""
    found = {row.name: tuple(sources(row)) for row in content.rows}
    if not any(found.values()):
        return {}
    if len(found) > 1 and len(set(found.values())) == 1:
        return {"every row": next(iter(found.values()))}
    return found


def here() -> dict[str, str]:
    """Where and when a page is made: versions, commit, machine, and the time, in words."""
    return {
        "Made with": in_words(environment()),
        "On": f"{processor()}, {os.cpu_count()} cores",
        "Date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def in_words(found: Mapping[str, object]) -> str:
    """An environment, as a run's summary has it, in words."""
    names = {"python": "Python", "torch": "torch", "spardl": "spardl", "commit": "commit"}
    known = [f"{name} {found[key]}" for key, name in names.items() if found.get(key)]
    return "; ".join([", ".join(known), *([str(found["machine"])] if found.get("machine") else [])])
