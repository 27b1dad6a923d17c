"""First part of a report: a line per paper, all claims with their verdicts, then figures and results of the methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from markupsafe import Markup

from scripts.exhibits.claims.judging import Finding, Judgement, TaskFinding, Verdict
from scripts.exhibits.pages.page import Entry, Section
from scripts.exhibits.tables import Table, render
from scripts.exhibits.tried import Role, Tried

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
    sections: Sequence[Section], judgements: Sequence[Judgement], waiting: Table | None, claims: str = ""
) -> tuple[Markup | None, list[Entry]]:
    """The summary, or ``None`` if there is nothing to summarize, and the entries of its parts in the contents list.

    Args:
        sections: Sections of the exhibits, those of one paper next to each other.
        judgements: Verdicts on claims of these exhibits.
        waiting: Jobs that were not run.
        claims: Id of the section of claims.
    """
    groups = [(title, list(members)) for title, members in groupby(sections, lambda section: section.group)]
    papers = [_paper(number, *group, judgements) for number, group in enumerate(groups, 1)]
    papers = [paper for paper in papers if paper["figure"] or paper["tasks"] or paper["claims"]]
    if not papers and waiting is None:
        return None, []
    found = {
        "Claims and verdicts": [(f"{each['key']}-claims", each["name"]) for each in papers if each["claims"]],
        "Figures and results": [(each["key"], each["name"]) for each in papers if each["figure"] or each["tasks"]],
        "Not run yet": [("unrun", waiting.title.partition(": ")[2])] if waiting else [],
    }
    html = render(
        "summary", papers=papers, tally=_tally(judgements), claims=claims, total=len(judgements), waiting=waiting
    )
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
        "tasks": [task for section in members for task in _tasks(section, about)],
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


def _tasks(section: Section, judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
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
            "lines": [_line(section, line, judgements) for line in tried],
        }
        found.append(task)
    return found


def _line(section: Section, line: Tried, judgements: Sequence[Judgement]) -> dict[str, Any]:
    """The verdicts are those on this task, and only proposed methods have any: rivals are no claim of the paper."""
    proposed = line.role == Role.PROPOSED.value
    about = [
        (judgement, part.finding)
        for judgement in judgements
        if proposed and section.exhibit in judgement.claim.exhibits
        for part in _parts(judgement)
        if set(line.jobs) <= set(part.jobs)
    ]
    return {
        "tried": line,
        "verdicts": [(chip(finding), _subject(judgement)) for judgement, finding in about],
        "paper": "; ".join(dict.fromkeys(str(judgement.claim.published) for judgement, _ in about)),
        "proposed": proposed,
    }
