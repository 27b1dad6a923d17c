"""First part of a report: a line per paper, all claims with their verdicts, then figures and results of the methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from scripts.exhibits.pages.page import Entry, Section
from scripts.exhibits.pages.verdicts import Chip, Judged, Part, best_part, chip
from scripts.exhibits.tables import Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Role, Tried
from scripts.exhibits.unrun import unrun_table

# Marks the place of a section's leading figure if it is not in the summary.
HERE = "<!-- figure -->"


def summary(sections: Sequence[Section]) -> Markup | None:
    """The summary, or ``None`` if there is nothing to summarize.

    Args:
        sections: Sections of the report; of several sizes of an exhibit the last one counts.
    """
    last = _last(sections)
    claims = [claim for section in last for claim in section.judged]
    papers, waiting = _papers(last), _waiting(last)
    if not papers and waiting is None:
        return None
    judged = [section for section in last if section.judged]
    return render("summary", papers=papers, tally=_tally(claims), claims=judged, total=len(claims), waiting=waiting)


def contents(sections: Sequence[Section]) -> list[Entry]:
    """Entries of the contents list for the parts of the summary.

    Args:
        sections: Sections of the report.
    """
    last = _last(sections)
    papers, waiting = _papers(last), _waiting(last)
    found = {
        "Claims and verdicts": [(f"{each['key']}-claims", each["name"]) for each in papers if each["claims"]],
        "Figures and results": [(each["key"], each["name"]) for each in papers if each["figure"] or each["tasks"]],
        "Not run yet": [("unrun", waiting.title.partition(": ")[2])] if waiting else [],
    }
    return [Entry(title, links) for title, links in found.items() if links]


def placed(sections: Sequence[Section]) -> list[Section]:
    """The sections with their leading figures, except those in the summary."""
    shown = {id(section) for _, members in _groups(_last(sections)) if (section := _leading(members))}
    note = '<p class="note">Its first figure is in <a href="#summary">the summary</a>.</p>\n'
    return [
        section._replace(html=section.html.replace(HERE, note if id(section) in shown else section.lead))
        for section in sections
    ]


def _name(section: Section) -> str:
    """Name of the exhibit of a section."""
    return section.key.removesuffix(f"-{section.tag}")


def _last(sections: Sequence[Section]) -> list[Section]:
    """The last size of each exhibit."""
    found = {_name(section): section for section in sections}
    return [section for section in sections if section in found.values()]


def _groups(sections: Sequence[Section]) -> list[tuple[str, list[Section]]]:
    """Sections of exhibits by paper."""
    exhibits = (section for section in sections if section.group)
    return [(title, list(members)) for title, members in groupby(exhibits, lambda section: section.group)]


def _leading(members: Sequence[Section]) -> Section | None:
    """The first section that has a leading figure."""
    return next((section for section in members if section.lead), None)


def _waiting(sections: Sequence[Section]) -> Table | None:
    return unrun_table([each for section in sections for each in section.waiting])


def _tally(claims: Iterable[Judged]) -> list[tuple[Chip, int]]:
    """Number of claims by verdict, best first."""
    counts = Counter(claim.verdict for claim in claims)
    return [(chip(verdict), counts[verdict]) for verdict in sorted(counts, key=lambda each: Part("", each, ()).rank)]


def _subject(claim: Judged) -> str:
    """The name of a claim without that of its paper."""
    return claim.claim.partition(": ")[2] or claim.claim


def _papers(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """What the template shows of each paper; papers of which nothing is known are left out."""
    claims = [claim for section in sections for claim in section.judged]
    papers = [_paper(number, *group, claims) for number, group in enumerate(_groups(sections), 1)]
    return [paper for paper in papers if paper["figure"] or paper["tasks"] or paper["claims"]]


def _paper(number: int, title: str, members: Sequence[Section], claims: Sequence[Judged]) -> dict[str, Any]:
    names = {_name(section) for section in members}
    about = [claim for claim in claims if names & {*claim.exhibits}]
    # The name that begins the claims, or the title without subtitle, authors and year.
    named, colon, _ = about[0].claim.partition(": ") if about else ("", "", "")
    leading = _leading(members)
    return {
        "key": f"paper-{number}",
        "title": title,
        "name": named if colon else title.partition(":")[0].partition(" (")[0].removesuffix("."),
        "figure": Markup(leading.lead if leading else ""),
        "lead": leading.title if leading else "",
        "scale": leading.tag if leading else "",
        "tasks": [task for section in members for task in _tasks(section, about)],
        "claims": [_claim(claim) for claim in about],
        "tally": _tally(about),
        "best": _best(about),
    }


def _claim(claim: Judged) -> dict[str, Any]:
    """A claim with its verdict, and those on its tasks if there are several."""
    tasks = [(chip(part.verdict), part.task) for part in claim.tasks] if len(claim.tasks) > 1 else []
    return {"claim": claim, "chip": chip(claim.verdict), "tasks": tasks}


def _best(claims: Sequence[Judged]) -> dict[str, Any] | None:
    """The best result, if one supports its claim."""
    found = best_part(claims)
    if found is None:
        return None
    claim, part = found
    task = "" if part.ours.startswith(part.task) else part.task  # figures of a task may begin with its name
    about = {"claim": _subject(claim), "task": task, "ours": part.ours, "paper": claim.figure}
    return {**about, "chip": chip(part.verdict)}


def _tasks(section: Section, claims: Sequence[Judged]) -> list[dict[str, Any]]:
    """Tasks of a section; methods that were not run are in the list of these instead."""
    found = []
    for title, members in groupby((line for line in section.tried if line.ran), lambda line: line.task):
        tried = list(members)
        machines = {line.machine for line in tried if line.machine}
        task = {
            "title": f"{section.title}: {title}",
            "measure": next((line.measure for line in tried if line.measure), ""),  # a failed method has none
            "scale": section.tag,
            "machine": machines.pop() if len(machines) == 1 else "",
            "lines": [_line(section, line, claims) for line in tried],
        }
        found.append(task)
    return found


def _line(section: Section, line: Tried, claims: Sequence[Judged]) -> dict[str, Any]:
    """The verdicts are those on this task, and only proposed methods have any: rivals are no claim of the paper."""
    proposed, own = line.role == Role.PROPOSED.value, set(line.jobs)
    about = [
        (claim, part.verdict)
        for claim in claims
        if proposed and _name(section) in claim.exhibits
        for part in claim.parts
        if own <= set(part.jobs)
    ]
    return {
        "tried": line,
        "verdicts": [(chip(verdict), _subject(claim)) for claim, verdict in about],
        "paper": "; ".join(dict.fromkeys(claim.paper for claim, _ in about)),
        "proposed": proposed,
    }
