"""First part of a report: a line per paper, all claims with their verdicts, then figures and results of the methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from scripts.exhibits.pages.page import Entry, Section
from scripts.exhibits.pages.verdicts import Chip, Judged, Part, best_part, chip
from scripts.exhibits.tables import Table
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Role, Tried
from scripts.exhibits.unrun import unrun_table

# Marks the place of a section's leading figure if it is not in the summary.
HERE = "<!-- figure -->"


class _Line(NamedTuple):
    """A method on a task, with the verdicts on this task."""

    tried: Tried
    verdicts: Sequence[tuple[Chip, str]]
    papers: Sequence[str]
    proposed: bool

    @property
    def paper(self) -> str:
        """Figures of the paper."""
        return "; ".join(dict.fromkeys(self.papers))


class _Task(NamedTuple):
    """Methods on one task."""

    title: str
    measure: str
    scale: str
    machine: str
    lines: Sequence[_Line]


class _Claim(NamedTuple):
    """A claim with its verdict, and those on its tasks if there are several."""

    claim: Judged
    chip: Chip
    tasks: Sequence[tuple[Chip, str]]


class _Best(NamedTuple):
    """The best result of a paper: a claim, or one of its tasks."""

    claim: str
    task: str
    chip: Chip
    ours: str
    paper: str


class _Paper(NamedTuple):
    """One paper in the summary."""

    key: str
    title: str
    figure: Markup
    lead: str
    scale: str
    tasks: Sequence[_Task]
    claims: Sequence[_Claim]

    @property
    def name(self) -> str:
        """The name that begins the claims, or the title without subtitle, authors and year."""
        named, colon, _ = self.claims[0].claim.claim.partition(": ") if self.claims else ("", "", "")
        return named if colon else self.title.partition(":")[0].partition(" (")[0].removesuffix(".")

    @property
    def tally(self) -> Sequence[tuple[Chip, int]]:
        """Number of claims by verdict, best first."""
        return _tally([each.claim for each in self.claims])

    @property
    def best(self) -> _Best | None:
        """The best result, if one supports its claim."""
        found = best_part(each.claim for each in self.claims)
        if found is None:
            return None
        claim, part = found
        task = "" if part.ours.startswith(part.task) else part.task  # figures of a task may begin with its name
        return _Best(_subject(claim), task, chip(part.verdict), part.ours, claim.figure)


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
    tally = _tally(claims)
    judged = [section for section in last if section.judged]
    return render("summary", papers=papers, tally=tally, claims=judged, total=len(claims), waiting=waiting)


def _tally(claims: Sequence[Judged]) -> list[tuple[Chip, int]]:
    """Number of claims by verdict, best first."""
    counts = Counter(claim.verdict for claim in claims)
    ranks = {claim.verdict: Part("", claim.verdict, ()).rank for claim in claims}
    return [(chip(verdict), counts[verdict]) for verdict in sorted(counts, key=lambda each: ranks[each])]


def _subject(claim: Judged) -> str:
    """The name of a claim without that of its paper."""
    return claim.claim.partition(": ")[2] or claim.claim


def contents(sections: Sequence[Section]) -> list[Entry]:
    """Entries of the contents list for the parts of the summary.

    Args:
        sections: Sections of the report.
    """
    last = _last(sections)
    papers = _papers(last)
    claims = [(f"{paper.key}-claims", paper.name) for paper in papers if paper.claims]
    results = [(paper.key, paper.name) for paper in papers if paper.figure or paper.tasks]
    lists = [("unrun", waiting.title.partition(": ")[2])] if (waiting := _waiting(last)) else []
    found = {"Claims and verdicts": claims, "Figures and results": results, "Not run yet": lists}
    return [Entry(title, links) for title, links in found.items() if links]


def placed(sections: Sequence[Section]) -> list[Section]:
    """The sections with their leading figures, except those in the summary."""
    shown = {id(section) for section in _leading(_last(sections))}
    note = '<p class="note">Its first figure is in <a href="#summary">the summary</a>.</p>\n'
    return [
        section._replace(html=section.html.replace(HERE, note if id(section) in shown else section.lead))
        for section in sections
    ]


def _papers(sections: Sequence[Section]) -> list[_Paper]:
    claims = [claim for section in sections for claim in section.judged]
    groups = [(title, list(members)) for title, members in groupby(_exhibits(sections), lambda section: section.group)]
    papers = [_paper(number, title, members, claims) for number, (title, members) in enumerate(groups, 1)]
    return [paper for paper in papers if paper.figure or paper.tasks or paper.claims]


def _waiting(sections: Sequence[Section]) -> Table | None:
    return unrun_table([each for section in sections for each in section.waiting])


def _last(sections: Sequence[Section]) -> list[Section]:
    """The last size of each exhibit."""
    found = {section.key.removesuffix(f"-{section.tag}"): section for section in sections}
    return [section for section in sections if section in found.values()]


def _exhibits(sections: Sequence[Section]) -> list[Section]:
    return [section for section in sections if section.group]


def _leading(sections: Sequence[Section]) -> list[Section]:
    """The first section of each paper that has a leading figure."""
    found: dict[str, Section] = {}
    for section in _exhibits(sections):
        if section.lead:
            found.setdefault(section.group, section)
    return list(found.values())


def _paper(number: int, title: str, members: Sequence[Section], claims: Sequence[Judged]) -> _Paper:
    names = {section.key.removesuffix(f"-{section.tag}") for section in members}
    about = [claim for claim in claims if names & {*claim.exhibits}]
    tasks = [task for section in members for task in _tasks(section, about)]
    judged = [_claim(claim) for claim in about]
    leading = next(iter(_leading(members)), None)
    if leading is None:
        return _Paper(f"paper-{number}", title, Markup(""), "", "", tasks, judged)
    return _Paper(f"paper-{number}", title, Markup(leading.lead), leading.title, leading.tag, tasks, judged)


def _claim(claim: Judged) -> _Claim:
    tasks = [(chip(part.verdict), part.task) for part in claim.tasks] if len(claim.tasks) > 1 else []
    return _Claim(claim, chip(claim.verdict), tasks)


def _tasks(section: Section, claims: Sequence[Judged]) -> list[_Task]:
    """Tasks of a section; methods that were not run are in the list of these instead."""
    found = []
    for title, members in groupby((line for line in section.tried if line.ran), lambda line: line.task):
        tried = list(members)
        measure = next((line.measure for line in tried if line.measure), "")  # a failed method has none
        lines = [_line(section, line, claims) for line in tried]
        several = {line.machine for line in tried if line.machine}
        machine = several.pop() if len(several) == 1 else ""
        found.append(_Task(f"{section.title}: {title}", measure, section.tag, machine, lines))
    return found


def _line(section: Section, line: Tried, claims: Sequence[Judged]) -> _Line:
    """The verdicts are those on this task, and only proposed methods have any: rivals are no claim of the paper."""
    proposed = line.role == Role.PROPOSED.value
    name, own = section.key.removesuffix(f"-{section.tag}"), set(line.jobs)
    about = [
        (claim, part.verdict)
        for claim in claims
        if proposed and name in claim.exhibits
        for part in claim.parts
        if own <= set(part.jobs)
    ]
    verdicts = [(chip(verdict), _subject(claim)) for claim, verdict in about]
    return _Line(line, verdicts, [claim.paper for claim, _ in about], proposed)
