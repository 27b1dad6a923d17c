"""Self-contained HTML pages of reports: sections of exhibits, the summary of papers and claims, and missing runs.

Style and figures are inside the page; figures follow its colours. Also writes the files of tables and figures.
"""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from markupsafe import Markup

from scripts.exhibits.base import Basis, Draw, Exhibit, Picture, Results
from scripts.exhibits.charts.style import Look, drawing, drawn
from scripts.exhibits.claims.judging import Finding, Judgement, TaskFinding, Verdict
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.tables import LONG, NOT_RUN, NOT_RUN_YET, TEMPLATES, WRITERS, Cell, Row, Table, render
from spardl.basics.files import write_atomically
from trainer.report import environment, processor

STYLE = TEMPLATES / "page.css"
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


MOST_SOURCES = 12
ENDINGS = ("png", "pdf")


def sources(row: Row, results: Results) -> list[Source]:
    """Commands and folders behind a row."""
    found = [(job.command, results.of(job)) for job in row.jobs]
    return [
        Source(command, f"{outcome.fault}; see {outcome.where}" if outcome.reason else outcome.origin)
        for command, outcome in found
    ]


def few_sources(row: Row, results: Results) -> Sequence[Source]:
    """The first sources of a row: a page that lists all of them would be too large to send around."""
    found = sources(row, results)
    left = len(found) - MOST_SOURCES
    return found if left <= 1 else [*found[:MOST_SOURCES], Source(f"and {left} more", "listed by --explain")]


def exhibit_section(exhibit: Exhibit, group: str, scale: str, results: Results) -> Section:
    """The section of an exhibit of the paper ``group``; the summary shows the first figure if the exhibit leads."""
    tables, own = without_unrun(exhibit.tables(scale, results)), f"{exhibit.name}-{scale}"
    about = {
        "Source": exhibit.source,
        "Shows": exhibit.shows,
        "What ran": exhibit.what_ran(scale),
    }
    command = f"python scripts/reproduce.py {exhibit.name} --scale {scale}"
    drawn_figures = figures(exhibit.pictures(scale, results), own, exhibit.basis)
    lead = "".join(drawn_figures[:1]) if exhibit.leads else ""
    sheets = [
        table(content, f"{own}-table-{number}", exhibit.basis, lambda row: few_sources(row, results))
        for number, content in enumerate(tables, 1)
    ]
    parts = [*drawn_figures[bool(lead) :], *sheets]
    made = made_with((row for content in tables for row in content.rows), results)
    html = render("exhibit", about=about, command=command, lead=lead, parts=parts, lines=made)
    marks = sum(cell.bad for content in tables for row in content.rows for cell in row.cells)
    return Section(own, group, exhibit.title, scale, marks, html, exhibit.name, lead)


def made_with(rows: Iterable[Row], results: Results) -> list[str]:
    """When and where a section and the runs behind its rows were made, and the caveats of the runs."""
    jobs = dict.fromkeys(job for row in rows for job in row.jobs)
    found = [results.of(job).data for job in jobs]
    runs = sorted({in_words(data["environment"]) for data in found if "environment" in data})
    caveats = sorted({caveat for data in found for caveat in data.get("caveats", ())})
    return [
        f"Written {here()['Date']}.",
        *(f"Trained with {run}." for run in runs),
        *(f"Caveat: {caveat}." for caveat in caveats),
    ]


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes tables and figures, and returns the tables; rows that were not run are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = without_unrun(exhibit.tables(scale, results))
    for number, content in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(content).encode())
    for picture in exhibit.pictures(scale, results):
        with drawing():
            figure = drawn(picture.draw, picture.key, picture.title or picture.caption)
            for ending in ENDINGS:
                figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=200)
    return tables


def without_unrun(tables: Sequence[Table]) -> list[Table]:
    """Tables without the rows of jobs that were not run, and without the tables that this leaves empty."""
    waiting = {NOT_RUN, NOT_RUN_YET}
    kept = [
        replace(old, rows=[row for row in old.rows if not row.cells or {cell.text for cell in row.cells} - waiting])
        for old in tables
    ]
    return [new for new, old in zip(kept, tables, strict=True) if new.rows or not old.rows]


def unrun_table(exhibits: Sequence[Exhibit], scale: str, results: Results) -> Table | None:
    """The list of jobs that were not started, one row per task, if there are any; shared jobs appear once."""
    seen: set[Job] = set()
    lines, total, unknown = list[Row](), 0.0, 0
    for exhibit in exhibits:
        for task, methods in _waiting(exhibit, scale, results).items():
            new = {method: [job for job in jobs if job not in seen] for method, (jobs, _) in methods.items()}
            seen.update(job for own in new.values() for job in own)
            new = {method: own for method, own in new.items() if own}
            if not new:
                continue
            times = [methods[method][1] for method in new]
            needed = [each * len(own) for each, own in zip(times, new.values(), strict=True) if each is not None]
            time = sum(needed) if len(needed) == len(new) else None
            total, unknown = total + (time or 0.0), unknown + (time is None)
            texts = (task or exhibit.title, "; ".join(new), str(sum(map(len, new.values()))), in_hours(time))
            lines.append(Row(exhibit.name, [*map(Cell, texts)], ()))
    if not lines:
        return None
    untimed = f"{unknown} row{'s' if unknown > 1 else ''} of unknown time"
    words = [f"{in_hours(total)} core hours"] * bool(total) + [untimed] * bool(unknown)
    runs = f"{len(seen)} run{'s' if len(seen) > 1 else ''}"
    columns = ("exhibit", "task", "methods", "runs", "core hours")
    return Table(f"Not run yet: {runs}, {' and '.join(words)}", columns, lines)


def _waiting(
    exhibit: Exhibit, scale: str, results: Results
) -> dict[str, dict[str, tuple[Sequence[Job], float | None]]]:
    """Jobs that were not started, by task and method, with the core seconds of each job if they are known.

    A job takes the planned seconds, or as long as finished jobs of the same task took.
    """
    jobs = list(dict.fromkeys(exhibit.jobs(scale)))
    paces: dict[str, list[float]] = {}
    waiting: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        task, method = _place(job)
        if seconds := results.of(job).data.get("wall_seconds"):
            paces.setdefault(task, []).append(seconds)
        if not results.of(job).started:
            waiting.setdefault(task, {}).setdefault(method, []).append(job)
    found: dict[str, dict[str, tuple[Sequence[Job], float | None]]] = {}
    for task, methods in waiting.items():
        for method, own in methods.items():
            planned = [job.expected for job in own if job.expected is not None]
            times = planned if len(planned) == len(own) else paces.get(task)
            found.setdefault(task, {})[method] = (own, mean(times) if times else None)
    return found


def _place(job: Job) -> tuple[str, str]:
    """Returns the task and method of a job."""
    labels = job.labels if isinstance(job, Training) else None
    return (", ".join(labels.tags), labels.job_type) if labels else ("", job.command)


def in_hours(seconds: float | None) -> str:
    """Hours with two significant digits, such as 0.5 or 12,000."""
    return "unknown" if seconds is None else f"{float(f'{seconds / 3600:.2g}'):,g}"


# Colour and mark of a verdict, best first; what holds by construction shows less than any other support.
_LOOKS: Mapping[Verdict, tuple[str, str]] = MappingProxyType(
    {
        Verdict.REPRODUCED: ("good", "\u2713"),
        Verdict.DIRECTION: ("half", "\u2248"),
        Verdict.BUILT_IN: ("built", "="),
        Verdict.MIXED: ("half", "\u00b1"),
        Verdict.WORSE: ("half", "\u2193"),
        Verdict.UNJUDGED: ("open", "?"),
        Verdict.NOT: ("bad", "\u2717"),
    }
)
_SUPPORT = tuple(_LOOKS)[:3]


class Chip(NamedTuple):
    """A verdict on the page: class of the style, which sets the colour, a mark with the same meaning, and words."""

    kind: str
    mark: str
    words: str


def chip(finding: Finding) -> Chip:
    """How the verdict of a finding is shown."""
    return Chip(*_LOOKS[finding.verdict], finding.label)


def _rank(finding: Finding) -> tuple[int, str]:
    """Place in the order of verdicts, best first; an overshoot comes after its plain verdict."""
    return (tuple(_LOOKS).index(finding.verdict), finding.label)


def summary(
    sections: Sequence[Section], judgements: Sequence[Judgement], unrun: Sequence[Table], claims: str = ""
) -> tuple[Markup | None, list[Entry]]:
    """The summary, or ``None`` if there is nothing to summarize, and the entries of its parts in the contents list.

    Args:
        sections: Sections of the exhibits, those of one paper next to each other.
        judgements: Verdicts on claims of these exhibits.
        unrun: Tables of what was not run, with titles ``TOPIC: EXTENT``.
        claims: Id of the section of claims.
    """
    groups = [(title, list(members)) for title, members in groupby(sections, lambda section: section.group)]
    papers = [_paper(number, *group, judgements) for number, group in enumerate(groups, 1)]
    papers = [paper for paper in papers if paper["figure"] or paper["claims"]]
    if not papers and not unrun:
        return None, []
    found = {
        "Claims and verdicts": [(f"{each['key']}-claims", each["name"]) for each in papers if each["claims"]],
        "Figures": [(each["key"], each["name"]) for each in papers if each["figure"]],
        "Not run": [(f"unrun-{number}", each.title) for number, each in enumerate(unrun, 1)],
    }
    html = render("summary", papers=papers, tally=_tally(judgements), claims=claims, total=len(judgements), unrun=unrun)
    return html, [Entry(title, links) for title, links in found.items() if links]


def _tally(judgements: Iterable[Judgement]) -> list[tuple[Chip, int]]:
    """Number of claims by verdict, best first."""
    counts = Counter(each.finding._replace(ours="", reason="") for each in judgements)
    return [(chip(finding), counts[finding]) for finding in sorted(counts, key=_rank)]


def _paper(number: int, title: str, members: Sequence[Section], judgements: Sequence[Judgement]) -> dict[str, Any]:
    """What the template shows of a paper."""
    names = {section.exhibit for section in members}
    about = [each for each in judgements if names & {*each.claim.exhibits}]
    # The name that begins the claims, or the title without subtitle, authors and year.
    named, colon, _ = about[0].claim.name.partition(": ") if about else ("", "", "")
    leading = next((section for section in members if section.lead), None)
    return {
        "key": f"paper-{number}",
        "title": title,
        "name": named if colon else title.partition(":")[0].partition(" (")[0].removesuffix("."),
        "figure": Markup(leading.lead if leading else ""),
        "lead": leading.title if leading else "",
        "scale": leading.tag if leading else "",
        "claims": [_claim(each) for each in about],
        "tally": _tally(about),
        "best": _best(about),
    }


def _claim(judgement: Judgement) -> dict[str, Any]:
    """A claim with its verdict, and those on its tasks if there are several."""
    tasks = judgement.tasks if len(judgement.tasks) > 1 else ()
    return {
        "judgement": judgement,
        "chip": chip(judgement.finding),
        "tasks": [(chip(each.finding), each.task) for each in tasks],
    }


def _subject(judgement: Judgement) -> str:
    """The name of a claim without that of its paper."""
    name = judgement.claim.name
    return name.partition(": ")[2] or name


def _parts(judgement: Judgement) -> Sequence[TaskFinding]:
    """Verdicts on tasks; of a claim without tasks the verdict on the claim."""
    return judgement.tasks or [TaskFinding("", judgement.finding, judgement.jobs)]


def _best(judgements: Sequence[Judgement]) -> dict[str, Any] | None:
    """The best of all verdicts on tasks, the first of equals; ``None`` if none supports its claim."""
    found = [(judgement, part) for judgement in judgements for part in _parts(judgement)]
    best = min(found, key=lambda each: _rank(each[1].finding), default=None)
    if best is None or best[1].finding.verdict not in _SUPPORT:
        return None
    judgement, (task, finding, _) = best
    return {
        "claim": _subject(judgement),
        "task": "" if finding.ours.startswith(task) else task,  # figures of a task may begin with its name
        "ours": finding.ours,
        "paper": judgement.claim.published.figure,
        "chip": chip(finding),
    }
