"""One HTML page that needs nothing but itself: its style is inside, and so are its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.pages.svg import inline
from scripts.exhibits.tables import LONG, Row, Table
from scripts.exhibits.templates import render
from spardl.training.summary import environment

__all__ = ["Section", "Source", "Sources", "figure", "here", "in_words", "page", "table"]

STYLE = Path(__file__).with_name("page.css")
# More rows, or columns, than are kept together, or legible, on a sheet of paper.
MANY, WIDE = 12, 8


class Section(NamedTuple):
    """A part of a page with a line of its own in the table of contents.

    Attributes:
        key: its id; unique on the page.
        group: under which heading the contents name it, and what stands above its title.
        title: in words.
        tag: a word beside the title, or nothing.
        marks: how many of its cells say what went wrong.
        html: what it holds.
    """

    key: str
    group: str
    title: str
    tag: str
    marks: int
    html: str


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


def page(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[Section]) -> Markup:
    """The whole page.

    Args:
        title: of the page, as text.
        lead: what it is, in a sentence, as text.
        facts: on how it came about.
        sections: in their order; those of one group stand together.
    """
    groups = [(group, list(members)) for group, members in groupby(sections, lambda section: section.group)]
    style = Markup(STYLE.read_text())
    return render("page", title=title, lead=lead, facts=facts, groups=groups, style=style)


def figure(picture: Picture, ident: str, basis: Basis) -> Markup:
    """A figure, with what must be known to believe it beside it."""
    drawn = Markup(inline(picture.draw, ident, picture.caption))
    return render("figure", ident=ident, caption=picture.caption, drawn=drawn, basis=_known(basis))


def table(content: Table, ident: str, basis: Basis, sources: Sources) -> Markup:
    """A table, with what must be known to believe it, if anything, and where each row comes from."""
    sizes = {"long": len(content.rows) > MANY, "wide": len(content.columns) > WIDE}
    kind = " ".join(["sheet", *(name for name, holds in sizes.items() if holds)])
    found = _behind(content, sources)
    return render("sheet", table=content, long=LONG, ident=ident, kind=kind, basis=_known(basis), sources=found)


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
        "On": f"{_processor()}, {os.cpu_count()} cores",
        "Date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def in_words(found: Mapping[str, object]) -> str:
    """An environment, as a run's summary has it, in words."""
    names = {"python": "Python", "torch": "torch", "spardl": "spardl", "commit": "commit"}
    known = [f"{name} {found[key]}" for key, name in names.items() if found.get(key)]
    return "; ".join([", ".join(known), *([str(found["machine"])] if found.get("machine") else [])])


def _processor() -> str:
    """The processor's name, as well as this system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
