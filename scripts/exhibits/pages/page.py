"""One HTML page that needs nothing but itself: its style is inside, and so are its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.pages.svg import inline
from scripts.exhibits.tables import WRITERS, Row, Table
from spardl.training.summary import environment

__all__ = ["Section", "Source", "Sources", "definitions", "figure", "here", "in_words", "page", "table"]

STYLE = Path(__file__).with_name("page.css")
# More rows, or columns, than are kept together, or legible, on a sheet of paper.
LONG, WIDE = 12, 8


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


def page(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title: of the page, as text.
        lead: what it is, in a sentence, as text.
        facts: on how it came about.
        sections: in their order; those of one group stand together.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        '<link rel="icon" href="data:,">',
        f"<style>\n{STYLE.read_text()}</style>",
        "</head>",
        "<body>",
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n{definitions(facts, 'facts')}</header>",
        _contents(sections),
        "<main>",
        *map(_section, sections),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _contents(sections: Sequence[Section]) -> str:
    parts = ['<nav aria-labelledby="contents">\n<h2 id="contents">Contents</h2>']
    for group, members in groupby(sections, lambda section: section.group):
        lines = "\n".join(
            f'<li><a href="#{escape(section.key)}">{escape(section.title)}</a>{_tag(section)}</li>'
            for section in members
        )
        heading = f"<h3>{escape(group)}</h3>\n" if group else ""
        parts.append(f"{heading}<ul>\n{lines}\n</ul>")
    return "\n".join([*parts, "</nav>"])


def _tag(section: Section) -> str:
    tag = f' <span class="tag">{escape(section.tag)}</span>' if section.tag else ""
    cells = "cell" if section.marks == 1 else "cells"
    return tag + (f' <span class="mark">\u2717 {section.marks} {cells}</span>' if section.marks else "")


def _section(section: Section) -> str:
    over = f'<p class="over">{escape(section.group)}</p>\n' if section.group else ""
    heading = f"<header>\n{over}<h2>{escape(section.title)}{_tag(section)}</h2>\n</header>"
    return f'<section id="{escape(section.key)}">\n{heading}\n{section.html}</section>'


def definitions(pairs: Mapping[str, str], kind: str) -> str:
    """Names and what they mean, both as text.

    Args:
        pairs: them.
        kind: the list's class.
    """
    lines = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs.items())
    return f'<dl class="{kind}">\n{lines}\n</dl>\n'


def _basis(basis: Basis) -> str:
    return definitions({name.capitalize(): text for name, text in basis._asdict().items() if text}, "basis")


def figure(picture: Picture, ident: str, basis: Basis) -> str:
    """A figure, with what must be known to believe it beside it."""
    drawn = inline(picture.draw, ident, picture.caption)
    words = f'<p class="what">{escape(picture.caption)}</p>\n{_basis(basis)}'
    return f'<figure id="{ident}">\n{_box(drawn, picture.caption)}<figcaption>\n{words}</figcaption>\n</figure>\n'


def table(content: Table, ident: str, basis: Basis, sources: Sources) -> str:
    """A table, with what must be known to believe it, if anything, and where each row comes from."""
    words = f"<figcaption>\n{_basis(basis)}</figcaption>\n" if any(basis) else ""
    body = _box(WRITERS["html"](content), content.title)
    sizes = {"long": len(content.rows) > LONG, "wide": len(content.columns) > WIDE}
    kind = " ".join(["sheet", *(name for name, holds in sizes.items() if holds)])
    return f'<figure id="{ident}" class="{kind}">\n{body}{words}{_details(content, sources)}</figure>\n'


def _box(content: str, label: str) -> str:
    """What is wider than the page scrolls inside; with the keyboard, too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">\n{content}</div>\n'


def _details(content: Table, sources: Sources) -> str:
    """What is behind each row; behind all of them, where that is the same."""
    found = {row.name: tuple(sources(row)) for row in content.rows}
    if not any(found.values()):
        return ""
    if len(found) > 1 and len(set(found.values())) == 1:
        found = {"every row": next(iter(found.values()))}
    lines = "\n".join(f"<dt>{escape(name)}</dt>\n{''.join(map(_source, each))}" for name, each in found.items())
    return f"<details>\n<summary>Commands and folders behind each row</summary>\n<dl>\n{lines}</dl>\n</details>\n"


def _source(source: Source) -> str:
    return f'<dd><code>{escape(source.command)}</code> <span class="state">{escape(source.state)}</span></dd>\n'


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
