"""What the papers claim, beside what our exhibits found, with a verdict that a rule makes of the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import SCALES, Basis, Exhibit, Results
from scripts.exhibits.claims.base import OVERSHOT, Figure, Finding, Rule, Verdict
from scripts.exhibits.jobs import Job
from scripts.exhibits.tables import Cell, Row, Table

__all__ = [
    "ASSUMED_GPU",
    "LAB",
    "MODELLED",
    "OWN_CHOICES",
    "STAND_INS",
    "TRIVIAL",
    "Claim",
    "Judgement",
    "Known",
    "Limit",
    "NoEvidence",
    "Published",
    "claims_table",
    "judge",
    "summary_table",
]

# A claim's exhibit, the scale, and the results, to the figures that a rule judges, at least one.
Find: TypeAlias = Callable[[Any, str, Results], Sequence[Figure]]

COLUMNS = ("claim", "published", "known", "ours", "verdict", "because")
TRIVIAL = SCALES[0]
ORDER = tuple(Verdict)


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
        at_worst: likewise; what rests on figures that are hardly known cannot disprove anything either.
    """

    reason: str
    at_best: Verdict
    scales: Sequence[str] = SCALES
    at_worst: Verdict = Verdict.NOT


NOTHING_TRAINED = Limit("work of this scale shows that everything runs, and nothing else", Verdict.UNJUDGED, (TRIVIAL,))
STAND_INS = Limit(
    "models, data and lengths of training are not the published ones", Verdict.DIRECTION, ("laptop", "evening")
)
ASSUMED_GPU = Limit(
    "what a GPU takes is assumed with low certainty, not measured", Verdict.DIRECTION, at_worst=Verdict.UNJUDGED
)
MODELLED = Limit("the network is modelled", Verdict.DIRECTION)
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
        construction: why it has to be true of any figures that are made in this way; empty if it has not.
        remark: what is said beside the verdict, whichever it is.
    """

    name: str
    states: str
    published: Published
    exhibit: str
    find: Find
    rule: Rule
    measure: str
    limits: tuple[Limit, ...] = ()
    construction: str = ""
    remark: str = ""

    def limits_at(self, scale: str) -> list[Limit]:
        """Those that hold at a scale."""
        return [limit for limit in (NOTHING_TRAINED, *self.limits) if scale in limit.scales]

    def where(self, exhibit: Exhibit, scale: str) -> Claim:
        """The claim without the limit of assumed passes, where none of the exhibit's is assumed."""
        if exhibit.guesses(scale):
            return self
        return replace(self, limits=tuple(limit for limit in self.limits if limit is not ASSUMED_GPU))


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
    claim = claim.where(exhibit, scale)
    try:
        figures = claim.find(exhibit, scale, results)
        finding = _ruled(claim.rule, figures)
        jobs = tuple(dict.fromkeys(job for figure in figures for job in figure.jobs))
    except NoEvidence as missing:
        finding, jobs = Finding(Verdict.UNJUDGED, "-", str(missing)), missing.jobs
    else:
        finding = _remarked(_limited(finding, claim, scale), claim)
    return Judgement(claim, finding, scale, exhibit.what_ran(scale), exhibit.basis, jobs)


def _ruled(rule: Rule, figures: Sequence[Figure]) -> Finding:
    """What a rule says of the figures that something can be judged by; the others are named."""
    clear = [figure for figure in figures if not figure.hindrances]
    if len(clear) == len(figures):
        return rule.judge(figures)
    found = rule.judge(clear if clear and rule.apart else [figure for figure in figures if figure.values])
    reasons = dict.fromkeys(reason for figure in figures for reason in figure.hindrances)
    hit = {reason: [figure.name for figure in figures if reason in figure.hindrances] for reason in reasons}
    why = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in hit.items())
    if not (clear and rule.apart):
        return found._replace(verdict=Verdict.UNJUDGED, reason=why)
    verdict = max(found.verdict, Verdict.DIRECTION, key=ORDER.index)
    return found._replace(verdict=verdict, reason=f"{found.reason}; left out, for they cannot be judged: {why}")


def _limited(finding: Finding, claim: Claim, scale: str) -> Finding:
    """The finding, within what limits allow, which say so; a bad one tells where it holds."""
    limits = claim.limits_at(scale)
    unjudged = [limit for limit in limits if limit.at_best is Verdict.UNJUDGED]
    if unjudged:
        return finding._replace(verdict=Verdict.UNJUDGED, reason="; ".join(limit.reason for limit in unjudged))
    if claim.construction and finding.verdict in (Verdict.REPRODUCED, Verdict.DIRECTION):
        told = f"{finding.reason}; by construction: {claim.construction}"
        return finding._replace(verdict=Verdict.BUILT_IN, reason=told)
    capping = [limit for limit in limits if ORDER.index(limit.at_best) > ORDER.index(finding.verdict)]
    if capping:
        lowest = max((limit.at_best for limit in capping), key=ORDER.index)
        return finding._replace(verdict=lowest, reason=f"{finding.reason}; {lowest} at best, because {_why(capping)}")
    lifting = [limit for limit in limits if ORDER.index(limit.at_worst) < ORDER.index(finding.verdict)]
    if lifting:
        verdict = min((limit.at_worst for limit in lifting), key=ORDER.index)
        told = f"{finding.reason}; not enough for {finding.verdict}, because {_why(lifting)}"
        return finding._replace(verdict=verdict, reason=told)
    if limits and finding.verdict in (Verdict.NOT, Verdict.UNJUDGED):
        return finding._replace(reason=f"{finding.reason}; here, where {_why(limits)}")
    return finding


def _remarked(finding: Finding, claim: Claim) -> Finding:
    """The finding, with what a reader must know whichever way it falls."""
    return finding._replace(reason=f"{finding.reason}; {claim.remark}") if claim.remark else finding


def _why(limits: Sequence[Limit]) -> str:
    return ", and ".join(limit.reason for limit in limits)


def summary_table(judgements: Sequence[Judgement]) -> Table:
    """How many claims got which verdict; overshoots count apart."""
    labels = [judgement.finding.label for judgement in judgements]
    named = [label for verdict in Verdict for label in (str(verdict), f"{verdict}{OVERSHOT}")]
    wanted = [label for label in named if label in labels or not label.endswith(OVERSHOT)]
    return Table("Verdicts", ("verdict", "claims", "which"), [_counted(label, judgements) for label in wanted])


def _counted(label: str, judgements: Sequence[Judgement]) -> Row:
    found = [judgement for judgement in judgements if judgement.finding.label == label]
    names = "; ".join(judgement.claim.name for judgement in found)
    jobs = list(dict.fromkeys(job for judgement in found for job in judgement.jobs))
    return Row(label, [Cell(str(len(found)), len(found)), Cell(names or "-")], jobs)


def claims_table(judgements: Sequence[Judgement]) -> Table:
    """One row for each claim; what is not reproduced is marked."""
    return Table("Claims", COLUMNS, [_row(judgement) for judgement in judgements])


def _row(judgement: Judgement) -> Row:
    claim, finding = judgement.claim, judgement.finding
    cells = [
        Cell(claim.published.figure),
        Cell(claim.published.known.value),
        Cell(finding.ours),
        Cell(finding.label, bad=finding.verdict is Verdict.NOT),
        Cell(finding.reason),
    ]
    return Row(claim.name, cells, judgement.jobs)
