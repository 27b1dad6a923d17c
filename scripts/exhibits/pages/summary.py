"""What stands first in a report: for each paper a figure, who reached what, and what came of its claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from scripts.exhibits.pages.page import Section
from scripts.exhibits.pages.verdicts import Chip, Judged, chip
from scripts.exhibits.templates import render
from scripts.exhibits.tried import Role, Tried

__all__ = ["HERE", "placed", "summary"]

# Where a section's leading figure belongs, if it is not in the summary.
HERE = "<!-- figure -->"


class _Line(NamedTuple):
    """A method on a task, with the claims about it."""

    tried: Tried
    claims: Sequence[Judged]
    proposed: bool

    @property
    def chips(self) -> list[tuple[Chip, str]]:
        """Verdicts, and what each is on."""
        return [(chip(claim.verdict), claim.claim.partition(": ")[2] or claim.claim) for claim in self.claims]

    @property
    def published(self) -> str:
        """What the paper says."""
        return "; ".join(dict.fromkeys(claim.published for claim in self.claims))


class _Task(NamedTuple):
    """Methods on one task."""

    title: str
    measure: str
    scale: str
    lines: Sequence[_Line]


class _Paper(NamedTuple):
    """One paper in the summary."""

    key: str
    title: str
    figure: Markup
    lead: str
    scale: str
    tasks: Sequence[_Task]
    others: Sequence[tuple[Judged, Chip]]


def summary(sections: Sequence[Section]) -> Markup | None:
    """The summary, if there is anything to sum up.

    Args:
        sections: of the report; of several scales of an exhibit the last one counts.
    """
    last = _last(sections)
    claims = [claim for section in last for claim in section.judged]
    groups = [(title, list(members)) for title, members in groupby(_exhibits(last), lambda section: section.group)]
    papers = [_paper(number, title, members, claims) for number, (title, members) in enumerate(groups, 1)]
    papers = [paper for paper in papers if paper.figure or paper.tasks or paper.others]
    if not papers:
        return None
    counts = Counter(claim.verdict for claim in claims)
    tally = [(chip(verdict), count) for verdict, count in counts.most_common()]
    return render("summary", papers=papers, tally=tally, claims=[s for s in last if s.judged], total=len(claims))


def placed(sections: Sequence[Section]) -> list[Section]:
    """The sections with their leading figures, but for those that the summary has."""
    shown = {id(section) for section in _leading(_last(sections))}
    note = '<p class="note">Its first figure is in <a href="#summary">the summary</a>.</p>\n'
    return [
        section._replace(html=section.html.replace(HERE, note if id(section) in shown else section.lead))
        for section in sections
    ]


def _last(sections: Sequence[Section]) -> list[Section]:
    """Of the scales of each exhibit the last one."""
    found = {section.key.removesuffix(f"-{section.tag}"): section for section in sections}
    return [section for section in sections if section in found.values()]


def _exhibits(sections: Sequence[Section]) -> list[Section]:
    return [section for section in sections if section.group]


def _leading(sections: Sequence[Section]) -> list[Section]:
    """The first section of each paper that has a figure to lead with."""
    found: dict[str, Section] = {}
    for section in _exhibits(sections):
        if section.lead:
            found.setdefault(section.group, section)
    return list(found.values())


def _paper(number: int, title: str, members: Sequence[Section], claims: Sequence[Judged]) -> _Paper:
    names = {section.key.removesuffix(f"-{section.tag}") for section in members}
    about = [claim for claim in claims if claim.exhibit in names]
    tasks = [task for section in members for task in _tasks(section, about)]
    seen = {claim.claim for task in tasks for line in task.lines for claim in line.claims}
    others = [(claim, chip(claim.verdict)) for claim in about if claim.claim not in seen]
    leading = next(iter(_leading(members)), None)
    if leading is None:
        return _Paper(f"paper-{number}", title, Markup(""), "", "", tasks, others)
    return _Paper(f"paper-{number}", title, Markup(leading.lead), leading.title, leading.tag, tasks, others)


def _tasks(section: Section, claims: Sequence[Judged]) -> list[_Task]:
    found = []
    for title, members in groupby(section.tried, lambda line: line.task):
        tried = list(members)
        measure = next((line.measure for line in tried if line.measure), "")  # what failed has none
        lines = [_line(section, line, claims) for line in tried]
        found.append(_Task(f"{section.title}: {title}", measure, section.tag, lines))
    return found


def _line(section: Section, line: Tried, claims: Sequence[Judged]) -> _Line:
    """Claims are about what a paper proposes; what it is compared with has a part in them, too."""
    proposed = line.role == Role.PROPOSED.value
    name, own = section.key.removesuffix(f"-{section.tag}"), set(line.jobs)
    about = [claim for claim in claims if claim.exhibit == name and own <= set(claim.jobs)] if proposed else []
    return _Line(line, about, proposed)
