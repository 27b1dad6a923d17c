"""Claims of the papers, and how a rule turns our figures into verdicts: per task first, then per claim."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import mean
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from scripts.exhibits.base import SCALES, Basis, Exhibit, Results
from scripts.exhibits.jobs import Job, any_failed
from scripts.exhibits.measures import LEAST, Range, range_of_mean

T = TypeVar("T")
OVERSHOT = ", overshoot"  # appended to a verdict if our figure far exceeds the published one
TRIVIAL = SCALES[0]


class Verdict(Enum):
    """Verdicts, best first."""

    REPRODUCED = "reproduced"
    BUILT_IN = "checked by construction"
    DIRECTION = "in the same direction"
    MIXED = "depends on the task"
    WORSE = "slightly worse"
    UNJUDGED = "cannot be judged here"
    NOT = "not reproduced"

    def __str__(self) -> str:
        return self.value


ORDER = tuple(Verdict)
SUPPORTING = {Verdict.REPRODUCED, Verdict.BUILT_IN, Verdict.DIRECTION}


class Figure(NamedTuple):
    """One of our results.

    Attributes:
        name: Name for readers.
        values: One value per seed; a single value if the result is deterministic.
        against: Values to compare with, in the same order; some rules need none.
        jobs: Jobs that the values come from.
        remark: Further words for readers, such as the ratio to another rival.
        hindrances: Reasons why the values cannot be judged; empty if they can.
        floor: Values of a single worker without communication, by seed; empty if unknown.
        task: Name of the task; figures of one task are judged together.
    """

    name: str
    values: Sequence[float]
    against: Sequence[float] = ()
    jobs: Sequence[Job] = ()
    remark: str = ""
    hindrances: Sequence[str] = ()
    floor: Sequence[float] = ()
    task: str = ""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return mean(self.values)

    @property
    def range(self) -> Range:
        """Confidence interval of the mean; a point if the result is deterministic."""
        return range_of_mean(self.values) if len(self.values) > 1 else Range(*[self.values[0]] * 3)

    def describe(self, unit: str = "") -> str:
        """The figure with its name and its remark."""
        return f"{shown(self.range, unit)} ({'; '.join(filter(None, (self.name, self.remark)))})"


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Range:
    """Mean of the paired differences, with its confidence interval if there are several values."""
    return Figure("", [our - their for our, their in zip(ours, theirs, strict=True)]).range


def show(number: float, unit: str = "") -> str:
    """A number with four significant digits; the unit ``%`` formats it as a percentage."""
    return f"{100 * number:.4g}%" if unit == "%" else f"{number:.4g}{unit}"


def shown(found: Range, unit: str = "") -> str:
    """The mean, with its confidence interval if there is one."""
    if found.low == found.high:
        return show(found.mean, unit)
    if math.isinf(found.high):
        return f"{show(found.mean, unit)} (fewer than {LEAST} seeds: no interval)"
    return f"{show(found.mean, unit)} ({show(found.low, unit)} to {show(found.high, unit)})"


def jobs_of(figures: Iterable[Figure | Judgement]) -> tuple[Job, ...]:
    """Jobs behind figures or judgements, each once."""
    return tuple(dict.fromkeys(job for figure in figures for job in figure.jobs))


class Finding(NamedTuple):
    """The outcome of a rule: a verdict, the deciding figures and the reason, as text.

    An overshoot far exceeds the published figures, so that something else must differ.
    """

    verdict: Verdict
    ours: str
    reason: str
    overshoot: bool = False

    @property
    def label(self) -> str:
        """The verdict, marked if it is an overshoot."""
        return f"{self.verdict}{OVERSHOT}" if self.overshoot else str(self.verdict)


class Rule(ABC):
    """Turns figures into a verdict.

    Attributes:
        text: The rule for readers, a format string of the rule itself.
        apart: Whether each figure is a task that is judged on its own.
    """

    text: ClassVar[str]
    apart: ClassVar[bool] = False

    @property
    def words(self) -> str:
        """The rule with its numbers, for readers."""
        return self.text.format(self)

    @abstractmethod
    def judge(self, figures: Sequence[Figure]) -> Finding:
        """Judges at least one figure; all of them belong to one task unless the rule is ``apart``."""


class Known(Enum):
    """How we know a published figure, most reliable first."""

    ABSTRACT = "read in the abstract"
    SUMMARY = "read in a summary by others"
    DERIVED = "derived from the sources read"
    HIGH = "from memory, high certainty"
    MEDIUM = "from memory, medium certainty"
    LOW = "from memory, low certainty"


class Published(NamedTuple):
    """A published figure as stated, how it is known, a note, and its table or figure."""

    figure: str
    known: Known
    note: str = ""
    place: str = ""

    def __str__(self) -> str:
        """The figure, where it stands in the paper, and how we know it."""
        if self.known is Known.ABSTRACT:
            return f"{self.figure} ({self.place + '; ' if self.place else ''}abstract)"
        return f"{self.figure} ({self.place or 'table or figure number unknown'}; {self.known.value})"


class NoEvidence(Exception):  # noqa: N818 - nothing went wrong here
    """There are no figures to judge, for a reason; ``jobs`` should have produced them."""

    def __init__(self, reason: str, jobs: Sequence[Job] = ()) -> None:
        super().__init__(reason)
        self.jobs = tuple(jobs)


class Limit(Enum):
    """Deviations from the published setting that no figure can make up for, and the verdicts that remain possible."""

    STAND_INS = (
        "models, data and lengths of training are not the published ones",
        Verdict.DIRECTION,
        Verdict.NOT,
        ("laptop", "evening"),
    )
    ASSUMED_GPU = ("GPU times are assumed with low certainty, not measured", Verdict.DIRECTION, Verdict.UNJUDGED)
    MODELLED = ("the network is modelled", Verdict.DIRECTION)
    # Speeds of another cluster neither prove nor disprove a published maximum, whichever method is measured.
    LAB = (
        "four workers on one machine with links of 1 Gbit/s are not the published cluster",
        Verdict.DIRECTION,
        Verdict.UNJUDGED,
    )
    OWN_CHOICES = ("the sizes of sketches and the objective of the fusion are our own choices", Verdict.DIRECTION)
    NOTHING_TRAINED = (
        "runs of this size only show that everything works",
        Verdict.UNJUDGED,
        Verdict.NOT,
        (TRIVIAL,),
    )

    def __init__(
        self, reason: str, at_best: Verdict, at_worst: Verdict = Verdict.NOT, scales: Sequence[str] = SCALES
    ) -> None:
        self.reason, self.at_best, self.at_worst, self.scales = reason, at_best, at_worst, scales


# Maps an exhibit, the size preset, the results and further arguments to the figures that a rule judges, at least one.
Find: TypeAlias = Callable[..., Sequence[Figure]]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and how it is judged.

    Attributes:
        states: The claim as a sentence.
        exhibit: Name of the exhibit with our figures.
        find: Reads the figures from an exhibit.
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

    def at(self, scale: str) -> Claim:
        """The claim with the limits that apply at a size."""
        limits = (each for each in (Limit.NOTHING_TRAINED, *self.limits) if scale in each.scales)
        return replace(self, limits=tuple(limits))


class TaskFinding(NamedTuple):
    """Verdict on one task of a claim, and the jobs behind its figures."""

    task: str
    finding: Finding
    jobs: Sequence[Job]


class Judgement(NamedTuple):
    """Verdict on a claim, with the limits that applied; a description and the basis of the runs, and their jobs.

    If the claim has tasks, each task that was run has its own verdict.
    """

    claim: Claim
    finding: Finding
    scale: str
    setting: str
    basis: Basis
    jobs: Sequence[Job] = ()
    tasks: Sequence[TaskFinding] = ()


def judge(claim: Claim, exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> Judgement:
    """Judges a claim by the available results of the jobs of its exhibits."""
    exhibit = exhibits[claim.exhibit]
    claim = claim.at(scale)
    setting = " ".join(exhibits[name].what_ran(scale) for name in claim.exhibits)

    def find(name: str) -> Sequence[Figure]:
        return claim.find(exhibits[name], scale, results, **dict(claim.arguments))

    try:
        figures = gathered(((exhibits[name].title, name) for name in claim.exhibits), find)
    except NoEvidence as missing:
        finding = Finding(Verdict.UNJUDGED, "-", str(missing))
        return Judgement(claim, finding, scale, setting, exhibit.basis, missing.jobs)
    tasks: dict[str, list[Figure]] = {}
    for figure in figures:
        tasks.setdefault(figure.task or (figure.name if claim.rule.apart else ""), []).append(figure)
    finding = _limited(_ruled(claim, tasks), claim)
    if claim.remark:
        finding = finding._replace(reason=f"{finding.reason}; {claim.remark}")
    judged = [
        TaskFinding(task, _limited(_ruled(claim, {task: own}), claim), jobs_of(own))
        for task, own in tasks.items()
        if task and (any(figure.values for figure in own) or any_failed(map(results.of, jobs_of(own))))
    ]
    return Judgement(claim, finding, scale, setting, exhibit.basis, jobs_of(figures), judged)


def gathered(parts: Iterable[tuple[str, T]], find: Callable[[T], Sequence[Figure]]) -> list[Figure]:
    """The figures of all parts of a claim, by title; one without any says why. Raises NoEvidence if none has any."""
    found, missing = list[Figure](), list[Figure]()
    for title, part in parts:
        try:
            found += find(part)
        except NoEvidence as error:
            missing.append(Figure(title, (), (), error.jobs, hindrances=(str(error),), task=title))
    if not found:
        reasons = dict.fromkeys(reason for figure in missing for reason in figure.hindrances)
        raise NoEvidence("; ".join(reasons), jobs_of(missing))
    return [*found, *missing]


def _ruled(claim: Claim, tasks: Mapping[str, Sequence[Figure]]) -> Finding:
    """Finding of the claim's rule on all tasks that can be judged; the reason names the others."""
    clear = {task: own for task, own in tasks.items() if not any(figure.hindrances for figure in own)}
    hit: dict[str, dict[str, None]] = {}
    for figure in (figure for own in tasks.values() for figure in own):
        for reason in figure.hindrances:
            hit.setdefault(reason, {})[figure.task or figure.name] = None
    why = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in hit.items())
    if not clear:
        known = {task: own for task, own in tasks.items() if all(figure.values for figure in own)}
        ours = [_of_task(task, claim.rule.judge(own).ours) for task, own in known.items()]
        return Finding(Verdict.UNJUDGED, "; ".join(ours) or "-", why)
    found = _combined({task: claim.rule.judge(own) for task, own in clear.items()}, claim)
    if len(clear) == len(tasks):
        return found
    verdict = max(found.verdict, Verdict.DIRECTION, key=ORDER.index)
    return found._replace(verdict=verdict, reason=f"{found.reason}; not judged: {why}")


def _combined(findings: Mapping[str, Finding], claim: Claim) -> Finding:
    """The finding on a claim: the worst of its tasks, unless tasks that support it stand against tasks that do not."""
    if len(findings) == 1:
        return next(iter(findings.values()))
    verdicts = {found.verdict for found in findings.values()}
    verdict = max(verdicts, key=ORDER.index)
    if verdict is Verdict.NOT and verdicts & SUPPORTING:
        verdict = Verdict.MIXED
    # The verdict of a task is within the limits of the claim, as in its own row.
    ours = (f"{_of_task(task, found.ours)}: {_limited(found, claim).label}" for task, found in findings.items())
    deciding = {task: found for task, found in findings.items() if verdict in (Verdict.MIXED, found.verdict)}
    reason = "; ".join(_of_task(task, found.reason) for task, found in deciding.items())
    return Finding(verdict, "; ".join(ours), reason, any(found.overshoot for found in findings.values()))


def _of_task(task: str, words: str) -> str:
    """Words that name their task."""
    return words if not task or words.startswith(task) else f"{task}: {words}"


def _limited(finding: Finding, claim: Claim) -> Finding:
    """The finding within the limits of a claim; the reason names the limits that apply."""

    def bounded(verdict: Verdict, words: str = "", limits: Sequence[Limit] = ()) -> Finding:
        return finding._replace(verdict=verdict, reason=finding.reason + words + ", and ".join(_reasons(limits)))

    rank, limits = ORDER.index(finding.verdict), claim.limits
    unjudged = [limit for limit in limits if limit.at_best is Verdict.UNJUDGED]
    if unjudged:
        return finding._replace(verdict=Verdict.UNJUDGED, reason="; ".join(_reasons(unjudged)))
    if claim.construction and finding.verdict in (Verdict.REPRODUCED, Verdict.DIRECTION):
        return bounded(Verdict.BUILT_IN, f"; by construction: {claim.construction}")
    if capping := [limit for limit in limits if ORDER.index(limit.at_best) > rank]:
        lowest = max((limit.at_best for limit in capping), key=ORDER.index)
        return bounded(lowest, f"; {lowest} at best, because ", capping)
    if lifting := [limit for limit in limits if ORDER.index(limit.at_worst) < rank]:
        least = min((limit.at_worst for limit in lifting), key=ORDER.index)
        return bounded(least, f"; not enough for {finding.verdict}, because ", lifting)
    if limits and finding.verdict in (Verdict.NOT, Verdict.UNJUDGED):
        return bounded(finding.verdict, "; note that ", limits)
    return finding


def _reasons(limits: Iterable[Limit]) -> list[str]:
    return [limit.reason for limit in limits]
