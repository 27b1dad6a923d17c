"""What the papers claim, beside what our exhibits found, with a verdict that a rule makes of the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import SCALES, Basis, Exhibit, Results
from scripts.exhibits.claims.base import Figure, Finding, Rule, Verdict
from scripts.exhibits.jobs import Job
from scripts.exhibits.tables import Cell, Row, Table, markdown

__all__ = [
    "ASSUMED_GPU",
    "FORMULAS",
    "LAB",
    "MODELLED",
    "OWN_CHOICES",
    "STAND_INS",
    "Claim",
    "Judgement",
    "Known",
    "Limit",
    "NoEvidence",
    "Published",
    "claims_table",
    "judge",
    "page",
    "summary_table",
]

# A claim's exhibit, the scale, and the results, to the figures that a rule judges, at least one.
Find: TypeAlias = Callable[[Any, str, Results], Sequence[Figure]]

COLUMNS = ("claim", "published", "known", "ours", "exhibit", "basis", "verdict", "because")
TRIVIAL = SCALES[0]


class Known(Enum):
    """How a published figure is known to us, the surest first."""

    ABSTRACT = "read in the abstract"
    SUMMARY = "read in a summary by others"
    CODE = "read in the official code"
    DERIVED = "derived from what was read"
    HIGH = "from memory, high certainty"
    MEDIUM = "from memory, medium certainty"
    LOW = "from memory, low certainty"


class Published(NamedTuple):
    """A published figure.

    Attributes:
        figure: as it is stated.
        known: how we know it.
        note: what is unknown of it, or was read elsewhere.
    """

    figure: str
    known: Known
    note: str = ""


class NoEvidence(Exception):  # noqa: N818 - nothing went wrong here
    """There are no figures to judge.

    Args:
        reason: why, in words.
        jobs: that should have given them.
    """

    def __init__(self, reason: str, jobs: Sequence[Job] = ()) -> None:
        super().__init__(reason)
        self.jobs = tuple(jobs)


class Limit(NamedTuple):
    """A setting that is not the published one, in a way that no figure makes up for.

    Attributes:
        reason: what differs.
        at_best: the verdict that can be reached.
        scales: at which it holds.
    """

    reason: str
    at_best: Verdict
    scales: Sequence[str] = SCALES


NOTHING_TRAINED = Limit("work of this scale shows that everything runs, and nothing else", Verdict.UNJUDGED, (TRIVIAL,))
STAND_INS = Limit("models, data and lengths of training are not the published ones", Verdict.DIRECTION, ("laptop",))
ASSUMED_GPU = Limit("what a GPU takes is assumed, not measured", Verdict.DIRECTION)
MODELLED = Limit("the network is modelled", Verdict.DIRECTION)
FORMULAS = Limit("the model computes both from formulas, which tests hold against counts", Verdict.DIRECTION)
LAB = Limit("four workers on one machine, with links of 1 Gbit/s, are not the published cluster", Verdict.DIRECTION)
OWN_CHOICES = Limit("sizes of sketches, and what fusion minimises, are our own choices", Verdict.DIRECTION)


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and how it is judged.

    Attributes:
        name: short, unique.
        states: the claim in words.
        published: its figure.
        exhibit: the name of the exhibit with our figures.
        find: reads them.
        rule: judges them.
        measure: what our figures are, in words.
        limits: what keeps the setting from being the published one.
    """

    name: str
    states: str
    published: Published
    exhibit: str
    find: Find
    rule: Rule
    measure: str
    limits: tuple[Limit, ...] = ()

    def limits_at(self, scale: str) -> list[Limit]:
        """Those that hold at a scale."""
        return [limit for limit in (NOTHING_TRAINED, *self.limits) if scale in limit.scales]


@dataclass(frozen=True)
class Judgement:
    """What became of a claim.

    Attributes:
        claim: it.
        finding: the verdict, our figures and the reason.
        scale: of the work.
        setting: what was run.
        basis: what of it was simulated, measured and assumed.
        jobs: the work that was looked at.
    """

    claim: Claim
    finding: Finding
    scale: str
    setting: str
    basis: Basis
    jobs: Sequence[Job] = field(default=())


def judge(claim: Claim, exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> Judgement:
    """Judges a claim by what is on disk.

    Args:
        claim: it.
        exhibits: all, by name; the claim's is among them.
        scale: of the work.
        results: of all jobs of the claim's exhibit that were done or failed.
    """
    exhibit = exhibits[claim.exhibit]
    try:
        figures = claim.find(exhibit, scale, results)
        finding = claim.rule.judge(figures)
        jobs = tuple(dict.fromkeys(job for figure in figures for job in figure.jobs))
    except NoEvidence as missing:
        finding, jobs = Finding(Verdict.UNJUDGED, "-", str(missing)), missing.jobs
    else:
        finding = _limited(finding, claim.limits_at(scale))
    return Judgement(claim, finding, scale, exhibit.what_ran(scale), exhibit.basis, jobs)


def _limited(finding: Finding, limits: Sequence[Limit]) -> Finding:
    """The finding, no better than limits allow, which say so; a bad one tells where it holds."""
    order = list(Verdict)
    unjudged = [limit for limit in limits if limit.at_best is Verdict.UNJUDGED]
    if unjudged:
        return finding._replace(verdict=Verdict.UNJUDGED, reason="; ".join(limit.reason for limit in unjudged))
    capping = [limit for limit in limits if order.index(limit.at_best) > order.index(finding.verdict)]
    if capping:
        lowest = max((limit.at_best for limit in capping), key=order.index)
        reasons = ", and ".join(limit.reason for limit in capping)
        return finding._replace(verdict=lowest, reason=f"{finding.reason}; {lowest} at best, because {reasons}")
    if limits and finding.verdict in (Verdict.NOT, Verdict.UNJUDGED):
        where = ", and ".join(limit.reason for limit in limits)
        return finding._replace(reason=f"{finding.reason}; here, where {where}")
    return finding


def summary_table(judgements: Sequence[Judgement]) -> Table:
    """How many claims got which verdict."""
    rows = []
    for verdict in Verdict:
        found = [judgement for judgement in judgements if judgement.finding.verdict is verdict]
        names = "; ".join(judgement.claim.name for judgement in found)
        jobs = list(dict.fromkeys(job for judgement in found for job in judgement.jobs))
        rows.append(Row(str(verdict), [Cell(str(len(found)), len(found)), Cell(names or "-")], jobs))
    return Table("Verdicts", ("verdict", "claims", "which"), rows)


def claims_table(judgements: Sequence[Judgement]) -> Table:
    """One row for each claim; what is not reproduced is marked."""
    return Table("Claims", COLUMNS, [_row(judgement) for judgement in judgements])


def _row(judgement: Judgement) -> Row:
    claim, finding = judgement.claim, judgement.finding
    cells = [
        Cell(claim.published.figure),
        Cell(claim.published.known.value),
        Cell(finding.ours),
        Cell(f"{claim.exhibit}, {judgement.scale}"),
        Cell(", ".join(_kinds(judgement.basis))),
        Cell(str(finding.verdict), bad=finding.verdict is Verdict.NOT),
        Cell(finding.reason),
    ]
    return Row(claim.name, cells, judgement.jobs)


def _kinds(basis: Basis) -> list[str]:
    """Which of the three there are."""
    return [kind for kind, text in basis._asdict().items() if not text.startswith("nothing")]


INTRODUCTION = """\
# Claims

What the five papers claim, and what was found here. All of this page is generated from results on disk; no verdict on
it was written by hand:

```sh
{making}
{command}
```

How surely a published figure is known is said beside it: we did not have the papers' full texts. What a rule says of
figures is cut down where the setting is not the published one; the reason then says so. A claim whose work is missing
or has failed is not judged. Figures over seeds have Student's 95% interval in brackets behind them, which is wider than
the bootstrap intervals of the exhibits' tables: three seeds are few. Work of the scale `{trivial}` is never judged.
"""


def page(judgements: Sequence[Judgement], scale: str, outputs: Path, path: Path) -> str:
    """The whole page, as Markdown.

    Args:
        judgements: of all claims, at least one.
        scale: of the work.
        outputs: where it was found.
        path: of the page, for the command that makes it again.
    """
    making = f"python scripts/reproduce.py all --scale {scale} --jobs 2 --outputs {outputs.as_posix()}"
    command = f"python scripts/claims.py --scale {scale} --outputs {outputs.as_posix()} --write {path.as_posix()}"
    head = INTRODUCTION.format(making=making, command=command, trivial=TRIVIAL)
    sections = "\n".join(map(_section, judgements))
    tables = f"{markdown(summary_table(judgements))}\n## Claim by claim\n\n{markdown(claims_table(judgements))}"
    return f"{head}\n## Verdicts\n\n{tables}\n## How each was judged\n\n{sections}"


def _section(judgement: Judgement) -> str:
    claim, basis = judgement.claim, judgement.basis
    note = f"; {claim.published.note}" if claim.published.note else ""
    limits = [f"{limit.reason} ({limit.at_best} at best)" for limit in claim.limits_at(judgement.scale)]
    lines = {
        "Published": f"{claim.published.figure} ({claim.published.known.value}{note})",
        "Ours": f"{claim.measure}: {judgement.finding.ours}",
        "Rule": claim.rule.words,
        "Verdict": f"{judgement.finding.verdict}. Because: {judgement.finding.reason}",
        "Limits": "; ".join(limits) or "none",
        "Setting": f"`{claim.exhibit}`, scale {judgement.scale}. {judgement.setting}",
        **{kind.capitalize(): text for kind, text in basis._asdict().items()},
    }
    told = "\n".join(f"* **{name}:** {_escaped(text)}" for name, text in lines.items())
    return f"### {claim.name}\n\n{claim.states}\n\n{told}\n"


def _escaped(text: str) -> str:
    """Without marks that Markdown would take for its own, such as in names of variables."""
    return text.replace("*", "\\*").replace("<", "&lt;")
