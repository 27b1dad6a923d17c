"""Claims of the papers, and how a rule turns our figures into verdicts: per task first, then per claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import SCALES, Basis, Exhibit, Results
from scripts.exhibits.claims.base import OVERSHOT, Figure, Finding, Rule, Verdict
from scripts.exhibits.jobs import Job
from scripts.exhibits.outcomes import any_failed
from scripts.exhibits.tables import Cell, Row, Table

__all__ = [
    "ASSUMED_GPU",
    "LAB",
    "LIMITS",
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
    "TaskFinding",
    "claims_table",
    "judge",
    "summary_table",
]

# Maps an exhibit, the size preset, the results and further arguments to the figures that a rule judges, at least one.
Find: TypeAlias = Callable[..., Sequence[Figure]]

COLUMNS = ("claim", "paper (table or figure)", "ours", "verdict", "because")
TRIVIAL = SCALES[0]
ORDER = tuple(Verdict)
SUPPORTING = (Verdict.REPRODUCED, Verdict.BUILT_IN, Verdict.DIRECTION)


class Known(Enum):
    """How we know a published figure, most reliable first."""

    ABSTRACT = "read in the abstract"
    SUMMARY = "read in a summary by others"
    CODE = "read in the official code"
    DERIVED = "derived from the sources read"
    HIGH = "from memory, high certainty"
    MEDIUM = "from memory, medium certainty"
    LOW = "from memory, low certainty"


class Published(NamedTuple):
    """A published figure.

    Attributes:
        figure: The figure as stated.
        known: How we know it.
        note: Unknown aspects, or facts from other sources.
        place: Table or figure of the paper; empty if we do not know the number.
    """

    figure: str
    known: Known
    note: str = ""
    place: str = ""

    @property
    def origin(self) -> str:
        """Where the figure stands in the paper, and how we know it."""
        if self.known is Known.ABSTRACT:
            return f"{self.place}; abstract" if self.place else "abstract"
        return f"{self.place or 'table or figure number unknown'}; {self.known.value}"


class NoEvidence(Exception):  # noqa: N818 - nothing went wrong here
    """There are no figures to judge.

    Args:
        reason: Reason, for readers.
        jobs: Jobs that should have produced the figures.
    """

    def __init__(self, reason: str, jobs: Sequence[Job] = ()) -> None:
        super().__init__(reason)
        self.jobs = tuple(jobs)


class Limit(NamedTuple):
    """A deviation from the published setting that no figure can make up for.

    Attributes:
        reason: The deviation.
        at_best: Best verdict that remains possible.
        scales: Size presets to which the limit applies.
        at_worst: Worst verdict that remains possible.
    """

    reason: str
    at_best: Verdict
    scales: Sequence[str] = SCALES
    at_worst: Verdict = Verdict.NOT


NOTHING_TRAINED = Limit("runs of this size only show that everything works", Verdict.UNJUDGED, (TRIVIAL,))
STAND_INS = Limit(
    "models, data and lengths of training are not the published ones", Verdict.DIRECTION, ("laptop", "evening")
)
ASSUMED_GPU = Limit(
    "GPU times are assumed with low certainty, not measured", Verdict.DIRECTION, at_worst=Verdict.UNJUDGED
)
MODELLED = Limit("the network is modelled", Verdict.DIRECTION)
# Speeds of another cluster neither prove nor disprove a published maximum, whichever method is measured.
LAB = Limit(
    "four workers on one machine with links of 1 Gbit/s are not the published cluster",
    Verdict.DIRECTION,
    at_worst=Verdict.UNJUDGED,
)
OWN_CHOICES = Limit("the sizes of sketches and the objective of the fusion are our own choices", Verdict.DIRECTION)

LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "stand_ins": STAND_INS,
        "assumed_gpu": ASSUMED_GPU,
        "modelled": MODELLED,
        "lab": LAB,
        "own_choices": OWN_CHOICES,
    }
)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and how it is judged.

    Attributes:
        name: Short, unique name.
        states: The claim as a sentence.
        published: The published figure.
        exhibit: Name of the exhibit with our figures.
        find: Reads the figures from an exhibit.
        rule: Judges the figures.
        measure: What our figures measure.
        limits: Deviations from the published setting.
        construction: Why any figures made in this way must satisfy the claim; empty if they need not.
        remark: Text added to the reason of every verdict.
        also: Names of further exhibits with tasks for the same claim.
        arguments: Further arguments of ``find`` by name.
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
    also: tuple[str, ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def exhibits(self) -> tuple[str, ...]:
        """Names of all exhibits with our figures."""
        return (self.exhibit, *self.also)

    def limits_at(self, scale: str) -> list[Limit]:
        """Limits that apply to a size preset."""
        return [limit for limit in (NOTHING_TRAINED, *self.limits) if scale in limit.scales]

    def where(self, exhibit: Exhibit, scale: str) -> Claim:
        """The claim, without the limit of assumed GPU times if the exhibit measured all of them."""
        if exhibit.guesses(scale):
            return self
        return replace(self, limits=tuple(limit for limit in self.limits if limit is not ASSUMED_GPU))


class TaskFinding(NamedTuple):
    """Verdict on one task of a claim.

    Attributes:
        task: Name of the task.
        finding: Verdict with the figures of this task and the reason.
        jobs: Jobs behind the figures.
    """

    task: str
    finding: Finding
    jobs: Sequence[Job]


@dataclass(frozen=True)
class Judgement:
    """Verdict on a claim.

    Attributes:
        claim: The claim.
        finding: Verdict on the whole claim, with our figures and the reason.
        scale: Size preset of the runs.
        setting: Description of the runs.
        basis: Simulated, measured and assumed quantities.
        jobs: Jobs behind the figures.
        tasks: Verdict on each task that was run, if the claim has tasks.
    """

    claim: Claim
    finding: Finding
    scale: str
    setting: str
    basis: Basis
    jobs: Sequence[Job] = field(default=())
    tasks: Sequence[TaskFinding] = field(default=())


def judge(claim: Claim, exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> Judgement:
    """Judges a claim by the available results.

    Args:
        claim: The claim.
        exhibits: Exhibits by name, those of the claim among them.
        scale: Size preset of the runs.
        results: Results of the jobs of the claim's exhibits.
    """
    exhibit = exhibits[claim.exhibit]
    claim = claim.where(exhibit, scale)
    setting = " ".join(exhibits[name].what_ran(scale) for name in claim.exhibits)
    try:
        figures = _figures(claim, exhibits, scale, results)
    except NoEvidence as missing:
        finding = Finding(Verdict.UNJUDGED, "-", str(missing))
        return Judgement(claim, finding, scale, setting, exhibit.basis, missing.jobs)
    tasks = _by_task(claim.rule, figures)
    finding = _remarked(_limited(_ruled(claim, tasks, scale), claim, scale), claim)
    judged = [
        TaskFinding(task, _limited(_ruled(claim, {task: own}, scale), claim, scale), _jobs(own))
        for task, own in tasks.items()
        if task and _was_run(own, results)
    ]
    return Judgement(claim, finding, scale, setting, exhibit.basis, _jobs(figures), judged)


def _was_run(figures: Sequence[Figure], results: Results) -> bool:
    """Whether a task has figures, or failed; a task that only waits to be run has no verdict."""
    return any(figure.values for figure in figures) or any_failed(map(results.of, _jobs(figures)))


def _figures(claim: Claim, exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> list[Figure]:
    """The figures of all exhibits of a claim; an exhibit without any gives one that says why.

    Raises:
        NoEvidence: if no exhibit has figures.
    """
    found: list[Figure] = []
    missing: list[NoEvidence] = []
    for name in claim.exhibits:
        try:
            found += claim.find(exhibits[name], scale, results, **dict(claim.arguments))
        except NoEvidence as error:
            missing.append(error)
            title = exhibits[name].title
            found.append(Figure(title, (), (), error.jobs, hindrances=(str(error),), task=title))
    if len(missing) == len(claim.exhibits):
        jobs = dict.fromkeys(job for error in missing for job in error.jobs)
        raise NoEvidence("; ".join(dict.fromkeys(map(str, missing))), tuple(jobs))
    return found


def _by_task(rule: Rule, figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Figures by task; figures without a task have an empty name in common."""
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.task or (figure.name if rule.apart else ""), []).append(figure)
    return found


def _jobs(figures: Sequence[Figure]) -> tuple[Job, ...]:
    return tuple(dict.fromkeys(job for figure in figures for job in figure.jobs))


def _ruled(claim: Claim, tasks: Mapping[str, Sequence[Figure]], scale: str) -> Finding:
    """Finding of the claim's rule on all tasks that can be judged; the reason names the others."""
    figures = [figure for own in tasks.values() for figure in own]
    clear = {task: own for task, own in tasks.items() if not any(figure.hindrances for figure in own)}
    reasons = dict.fromkeys(reason for figure in figures for reason in figure.hindrances)
    hit = {
        reason: dict.fromkeys(figure.task or figure.name for figure in figures if reason in figure.hindrances)
        for reason in reasons
    }
    why = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in hit.items())
    if not clear:
        known = {task: own for task, own in tasks.items() if all(figure.values for figure in own)}
        ours = [_of_task(task, claim.rule.judge(own).ours) for task, own in known.items()]
        return Finding(Verdict.UNJUDGED, "; ".join(ours) or "-", why)
    found = _combined({task: claim.rule.judge(own) for task, own in clear.items()}, claim, scale)
    if len(clear) == len(tasks):
        return found
    verdict = max(found.verdict, Verdict.DIRECTION, key=ORDER.index)
    return found._replace(verdict=verdict, reason=f"{found.reason}; not judged: {why}")


def _combined(findings: Mapping[str, Finding], claim: Claim, scale: str) -> Finding:
    """The finding on a claim: the worst of its tasks, unless tasks that support it stand against tasks that do not."""
    if len(findings) == 1:
        return next(iter(findings.values()))
    verdicts = {found.verdict for found in findings.values()}
    verdict = max(verdicts, key=ORDER.index)
    if verdict is Verdict.NOT and verdicts & {*SUPPORTING}:
        verdict = Verdict.MIXED
    # The verdict of a task is within the limits of the claim, as in its own row.
    labels = {task: _limited(found, claim, scale).label for task, found in findings.items()}
    ours = "; ".join(f"{_of_task(task, found.ours)}: {labels[task]}" for task, found in findings.items())
    deciding = {task: found for task, found in findings.items() if verdict is Verdict.MIXED or found.verdict is verdict}
    reason = "; ".join(_of_task(task, found.reason) for task, found in deciding.items())
    return Finding(verdict, ours, reason, any(found.overshoot for found in findings.values()))


def _of_task(task: str, words: str) -> str:
    """Words that name their task."""
    return words if not task or words.startswith(task) else f"{task}: {words}"


def _limited(finding: Finding, claim: Claim, scale: str) -> Finding:
    """The finding within the limits of a claim; the reason names the limits that apply."""
    limits = claim.limits_at(scale)
    unjudged = [limit for limit in limits if limit.at_best is Verdict.UNJUDGED]
    if unjudged:
        return finding._replace(verdict=Verdict.UNJUDGED, reason="; ".join(limit.reason for limit in unjudged))
    if claim.construction and finding.verdict in (Verdict.REPRODUCED, Verdict.DIRECTION):
        words = f"{finding.reason}; by construction: {claim.construction}"
        return finding._replace(verdict=Verdict.BUILT_IN, reason=words)
    capping = [limit for limit in limits if ORDER.index(limit.at_best) > ORDER.index(finding.verdict)]
    if capping:
        lowest = max((limit.at_best for limit in capping), key=ORDER.index)
        return finding._replace(verdict=lowest, reason=f"{finding.reason}; {lowest} at best, because {_why(capping)}")
    lifting = [limit for limit in limits if ORDER.index(limit.at_worst) < ORDER.index(finding.verdict)]
    if lifting:
        verdict = min((limit.at_worst for limit in lifting), key=ORDER.index)
        words = f"{finding.reason}; not enough for {finding.verdict}, because {_why(lifting)}"
        return finding._replace(verdict=verdict, reason=words)
    if limits and finding.verdict in (Verdict.NOT, Verdict.UNJUDGED):
        return finding._replace(reason=f"{finding.reason}; note that {_why(limits)}")
    return finding


def _remarked(finding: Finding, claim: Claim) -> Finding:
    """The finding, with the remark of its claim."""
    return finding._replace(reason=f"{finding.reason}; {claim.remark}") if claim.remark else finding


def _why(limits: Sequence[Limit]) -> str:
    return ", and ".join(limit.reason for limit in limits)


def summary_table(judgements: Sequence[Judgement]) -> Table:
    """Number of claims by verdict; overshoots are counted separately."""
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
    """One row per claim; claims that are not reproduced are marked."""
    return Table("Claims", COLUMNS, [_row(judgement) for judgement in judgements])


def _row(judgement: Judgement) -> Row:
    claim, finding = judgement.claim, judgement.finding
    cells = [
        Cell(f"{claim.published.figure} ({claim.published.origin})"),
        Cell(finding.ours),
        Cell(finding.label, bad=finding.verdict is Verdict.NOT),
        Cell(finding.reason),
    ]
    return Row(claim.name, cells, judgement.jobs)
