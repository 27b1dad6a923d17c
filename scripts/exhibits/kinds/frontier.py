"""Synchronous steps against local steps: loss over time, for methods x links x tasks.

Learning curves by step and step times on links are measured apart; whole trainings in the network lab check both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch.distributed as dist

from scripts import bench
from scripts.benchmarks.accuracy import trained
from scripts.benchmarks.ddp_hooks import ALONE, TIMEOUT
from scripts.benchmarks.plain_loop import planned
from scripts.exhibits.base import ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts.curves import draw_means, panel_pictures
from scripts.exhibits.charts.style import logarithmic, looks
from scripts.exhibits.jobs import Computation, Job, Outcome, any_failed, machines, succeeded
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.lab import Measurement, in_lab, local, typed
from scripts.exhibits.kinds.races import Lap, between, raced, stretches, with_tests
from scripts.exhibits.kinds.trainings import OTHER_MACHINE
from scripts.exhibits.measures import Curve, Target, figure_of, reached, spread
from scripts.exhibits.tables import Cell, Row, Table, failed
from spardl.basics.files import write_atomically
from spardl.clusters.workers.processes import run_processes

NAME = "frontier"
ACCURACY, HOOKS = "scripts/bench_accuracy.py", "scripts/bench_hooks.py"
# Time limit of a lab in seconds: several times the duration of the longest one.
LIMIT = 1200.0
# Turns of each case on a link, at a share of the dense learning rate: steps take longer if weights diverge.
TURNS, CALM = 5, 0.1
# Startup time of a lab and its workers in seconds; only for the plan, as are the step times of a course.
START = 15.0


class Entrant(NamedTuple):
    """A way to average, with the learning rate and outer steps that ended best of all trials with the first seed.

    Attributes:
        name: Name of its rows.
        case: Case of bench.py accuracy.
        rate: Learning rate.
        tried: Tried learning rates; with local steps, those for the published outer steps.
        steps: With local steps, the cases of all outer steps, the published ones first.
        around: Learning rates at which the other outer steps are tried.
        whole: Whether whole trainings on the slowest and the fastest link check the combined seconds.
    """

    name: str
    case: str
    rate: float
    tried: tuple[float, ...]
    steps: tuple[str, ...] = ()
    around: tuple[float, ...] = ()
    whole: bool = False

    @property
    def published(self) -> str:
        """Case with published outer steps; only its steps are timed, because all others have equal costs."""
        return (*self.steps, self.case)[0]

    @property
    def trials(self) -> Mapping[str, tuple[float, ...]]:
        """Tried learning rates by case."""
        others = dict.fromkeys(self.steps[1:], self.around)
        return {self.published: tuple(sorted({self.rate, *self.tried})), **others}


@dataclass(frozen=True)
class Course:
    """Plan of one size preset for one task; the first entrant is dense training, which determines the targets.

    Attributes:
        name: Name of the task in titles.
        words: Arguments of train.py without the learning rate.
        gbits: Bandwidths of the links in Gbit/s, the slowest first.
        seeds: Seeds, with one learning curve each.
        every: Steps between two tests, per turn and before the first turn; a multiple of all periods of local steps.
        pace: Approximate seconds of a step on the slowest link, for the plan.
    """

    name: str
    words: tuple[str, ...]
    entrants: tuple[Entrant, ...]
    gbits: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    every: int
    pace: float
    workers: int = 4

    def train(self, rate: float) -> str:
        """Choices of train.py with a learning rate."""
        return ",".join((*self.words, f"optimizer.lr={rate:g}"))

    def _words(self, entrant: Entrant, rate: float, seed: int) -> tuple[str, ...]:
        counts = ("--steps", str(self.steps), "--every", str(self.every), "--seed", str(seed))
        return (ACCURACY, "--case", entrant.case, *counts, "--train", self.train(rate))

    def lesson(self, entrant: Entrant, rate: float, seed: int) -> Lesson:
        """Job of a learning curve: loss by step."""
        given = {"workers": self.workers, "case": entrant.case, "seed": seed, "steps": self.steps, "every": self.every}
        arguments = (*given.items(), ("train", self.train(rate)))
        start = " ".join(("torchrun", *local(self.workers)))
        shell = f"{start} {' '.join(bench.current(self._words(entrant, rate, seed)))}"
        return Lesson(f"{NAME}.learned", learned, arguments, shell)

    def lessons(self) -> list[Lesson]:
        """All learning curves: chosen settings first, then the other tried settings, then the other seeds."""
        first, *others = self.seeds
        own = [self.lesson(each, each.rate, first) for each in self.entrants]
        tried = [job for each in self.entrants for jobs in self.trials(each).values() for job in jobs.values()]
        rest = [self.lesson(each, each.rate, seed) for seed in others for each in self.entrants]
        return list(dict.fromkeys((*own, *tried, *rest)))

    def trials(self, entrant: Entrant) -> dict[str, dict[float, Lesson]]:
        """Learning curves that determine learning rate and outer steps of an entrant, by case and rate."""
        return {
            case: {rate: self.lesson(entrant._replace(case=case), rate, self.seeds[0]) for rate in rates}
            for case, rates in entrant.trials.items()
        }

    def pacing(self, gbit: float) -> Measurement:
        """Job that measures seconds and bytes per step of all entrants in turns on one link."""
        cases = (ALONE, *dict.fromkeys(entrant.published for entrant in self.entrants))
        counts = ("--seeds", "1", "--settle", str(self.every), "--rounds", str(TURNS), "--steps", str(self.every))
        words = (HOOKS, *counts, "--train", self.train(CALM * self.entrants[0].rate), "--cases", *cases)
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        seconds = START + self.pace * self.every * (1 + TURNS) * len(cases) / 2
        return Measurement(f"{NAME}.paced", paced, arguments, typed(self.workers, gbit, words), 1, seconds)

    def whole(self, entrant: Entrant, gbit: float) -> Lap:
        """Job of a whole timed training of an entrant on a link."""
        words = self._words(entrant, entrant.rate, self.seeds[0])
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        shell = typed(self.workers, gbit, words)
        return Lap(f"{NAME}.whole", raced, arguments, shell, 1, START + self.steps * self.pace)

    def wholes(self) -> list[tuple[Entrant, float]]:
        """Entrants with whole timed trainings, and their links."""
        ends = dict.fromkeys((self.gbits[0], self.gbits[-1]))
        return [(entrant, gbit) for gbit in ends for entrant in self.entrants if entrant.whole]


@dataclass(frozen=True)
class Lesson(Computation):
    """A learning curve by step, which does not depend on the link."""

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome:
        return with_tests(content, where)


def learned(workers: int, case: str, seed: int, steps: int, every: int, train: str) -> dict[str, Any]:
    """Test results of a training with real processes on this machine, whose other load does not matter."""
    plan = planned(train)
    with TemporaryDirectory() as name:
        folder = Path(name)

        def work(rank: int, heartbeat: Callable[[int], None]) -> None:
            store = dist.FileStore(str(folder / "store"), workers)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", None, timedelta(seconds=TIMEOUT), workers, rank, store)
            tests = trained(plan, case, seed, steps, every)
            if rank == 0:
                write_atomically(folder / "tests.json", json.dumps(tests).encode())
            dist.barrier()

        run_processes(workers, work, folder)
        tests = json.loads((folder / "tests.json").read_bytes())
    entries = sum(parameter.numel() for parameter in plan.task.build_model().parameters())
    untimed = [{name: value for name, value in test.items() if name not in ("seconds", "sent")} for test in tests]
    return {"metric": plan.task.metric, "steps": steps, "parameters": entries, "evaluations": untimed}


def paced(**setting: Any) -> dict[str, Any]:
    """Seconds and bytes per worker and step of each case, by turn: bench.py hooks, with arguments of in_lab."""
    rows = in_lab(**setting)["rows"]
    return {"cases": {row["case"]: {"seconds": _short(row["seconds"]), "sent": _short(row["sent"])} for row in rows}}


def _short(figures: Sequence[float]) -> list[float]:
    """Rounds to five digits, which exceeds the precision of the clock."""
    return [float(f"{figure:.5g}") if math.isfinite(figure) else figure for figure in figures]


LOSS = "loss"
# The near target allows a shortfall of MARGIN of the improvement of dense training since its first test; the final loss
# is the mean of the LAST tests. The far target is the loss of dense training after the share EARLY of its steps.
MARGIN, LAST, EARLY = 0.02, 3, 0.5
COLUMNS = ("method", "to as good as dense", "to half-way", "final loss", "seeds", "ms a step", "MB a step", "computing")
WHERE = ("between Mbit/s", "fastest", "seconds", "dense takes", "next")
NEVER = "none"


class Goal(NamedTuple):
    """A target loss, and its name in titles."""

    name: str
    target: Target


class Pace(NamedTuple):
    """Cost of a step on a link: seconds, bytes per worker, and the share of a step without communication."""

    seconds: float
    sent: float
    computing: float


@dataclass(frozen=True)
class Frontier(Exhibit):
    """Learning curves by step, combined with step times measured on links; courses by size preset, one per task."""

    courses: ByScale[Sequence[Course]]

    def jobs(self, scale: str) -> Sequence[Job]:
        courses = at(scale, self.courses)
        lessons = [lesson for course in courses for lesson in course.lessons()]
        paces = [course.pacing(gbit) for course in courses for gbit in course.gbits]
        return [*lessons, *paces, *(course.whole(*each) for course in courses for each in course.wholes())]

    def with_seeds(self, count: int) -> Frontier:
        seeds = tuple(range(1, count + 1))
        return replace(
            self,
            courses={scale: [replace(each, seeds=seeds) for each in found] for scale, found in self.courses.items()},
        )

    def cost(self, scale: str) -> str:
        jobs = self.jobs(scale)
        timed = [job for job in jobs if job.alone]
        minutes = math.ceil(sum(job.expected or 0 for job in timed) / 60)
        return f"{len(jobs) - len(timed)} trainings, a minute of two cores each; {minutes} minutes alone on the machine"

    def caption(self, scale: str) -> str:
        rules = (
            "The loss after a step does not depend on the link, and the time of a step hardly depends on the loss. "
            "Losses are therefore those of whole untimed trainings by real workers, and seconds are steps times the "
            f"median step of {TURNS} turns in the network lab, where the methods alternate, at {CALM:g} of the "
            "learning rate of dense training; a turn has whole periods of local steps. The last tables compare these "
            "seconds with those of whole trainings in the lab. Computing: time of a step without communication, as a "
            f"share of that of a step. As good as dense: the mean of the last {LAST} tests of dense training, plus "
            f"{MARGIN:.0%} of what it learned since its first test. Half-way: the loss of dense training after "
            f"{EARLY:.0%} of the steps. All trainings have the same number of steps and tokens. Learning rates, outer "
            "rates and momenta are the best of those tried with the first seed, which the tables list."
        )
        return " ".join((rules, *(self._what(course) for course in at(scale, self.courses))))

    def _what(self, course: Course) -> str:
        own = "; ".join(f"{each.name}: {each.case} at {each.rate:g}" for each in course.entrants)
        return f"{course.name}, {course.workers} workers, {course.steps} steps: {' '.join(course.words)}. {own}."

    def _outcomes(self, course: Course, entrant: Entrant, results: Results) -> list[Outcome]:
        return [results.of(course.lesson(entrant, entrant.rate, seed)) for seed in course.seeds]

    def goals(self, course: Course, results: Results) -> list[Goal]:
        """Near and far target; empty until dense training has a curve."""
        curves = [_curve(each) for each in succeeded(self._outcomes(course, course.entrants[0], results))]
        if not curves:
            return []
        first, last = mean(curve.values[0] for curve in curves), mean(mean(curve.values[-LAST:]) for curve in curves)
        near = last + MARGIN * (first - last)
        early = mean(curve.values[math.ceil(EARLY * len(curve.values)) - 1] for curve in curves)
        losses = {"as good as dense": near, "half-way": early}
        return [Goal(name, Target.near(loss, True, LOSS, 0.0)) for name, loss in losses.items()]

    def pace(self, course: Course, gbit: float, entrant: Entrant, results: Results) -> Pace | None:
        """Cost of a step of an entrant on a link, or ``None`` if it was not measured."""
        found = results.of(course.pacing(gbit))
        if found.reason is not None:
            return None
        own, alone = (found.data["cases"][case] for case in (entrant.published, ALONE))
        seconds = median(own["seconds"])
        return Pace(seconds, mean(own["sent"]), median(alone["seconds"]) / seconds)

    def _until(self, course: Course, entrant: Entrant, goal: Goal, results: Results) -> float | None:
        """Mean number of steps to a goal; ``None`` unless all finished seeds reach it."""
        found = [reached(_curve(each), goal.target) for each in succeeded(self._outcomes(course, entrant, results))]
        steps = [each for each in found if each is not None]
        return mean(steps) if steps and len(steps) == len(found) else None

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        courses = at(scale, self.courses)
        return [
            *(self.advice(course, goal, results) for course in courses for goal in self.goals(course, results)),
            *(self.link(course, gbit, results) for course in courses for gbit in course.gbits),
            *(self.rates(course, results) for course in courses),
            *(self.check(course, results) for course in courses),
        ]

    def advice(self, course: Course, goal: Goal, results: Results) -> Table:
        """Table of the fastest method by bandwidth, within the measured range."""
        ways = {}
        for entrant in course.entrants:
            paces = {1000 * gbit: self.pace(course, gbit, entrant, results) for gbit in course.gbits}
            steps = self._until(course, entrant, goal, results)
            if steps is not None and any(paces.values()):
                ways[entrant.name] = {mbit: steps * pace.seconds for mbit, pace in paces.items() if pace}
        jobs = [*course.lessons(), *map(course.pacing, course.gbits)]
        dense = ways.get(course.entrants[0].name)
        rows = [
            Row(f"{_digits(low)} to {_digits(high)}", _best(name, low, high, ways, dense), jobs)
            for low, high, name in stretches(ways)
        ]
        title = f"{course.name}: which method where, to a loss of {goal.target.value:.4g} ({goal.name})"
        return Table(title, WHERE, rows)

    def link(self, course: Course, gbit: float, results: Results) -> Table:
        """Table of losses and times to the targets of each method on a link."""
        goals = self.goals(course, results)
        words = "; ".join(f"{goal.name}: {goal.target.value:.4g}" for goal in goals) or "no target yet"
        rows = [
            Row(
                entrant.name,
                self._cells(course, gbit, entrant, goals, results),
                [*(course.lesson(entrant, entrant.rate, seed) for seed in course.seeds), course.pacing(gbit)],
            )
            for entrant in course.entrants
        ]
        return Table(f"{course.name}, {course.workers} workers, {1000 * gbit:g} Mbit/s; {words}", COLUMNS, rows)

    def _cells(
        self, course: Course, gbit: float, entrant: Entrant, goals: Sequence[Goal], results: Results
    ) -> list[Cell]:
        outcomes, pace = self._outcomes(course, entrant, results), self.pace(course, gbit, entrant, results)
        good = succeeded(outcomes)
        timed = _timed(pace) if pace else failed([results.of(course.pacing(gbit))], 3)
        if not good:
            return [*failed(outcomes, 4), *timed]
        until = [_seconds(self._until(course, entrant, goal, results), pace) for goal in goals]
        last = [_curve(each).values[-1] for each in good]
        count = f"{len(good)} of {len(outcomes)}" if len(good) < len(outcomes) else f"{len(good)}"
        lost = any_failed(outcomes)
        return [
            *(until or [Cell("no target yet")] * 2),
            Cell(spread(last), mean(last)),
            Cell(count, bad=lost),
            *timed,
        ]

    def rates(self, course: Course, results: Results) -> Table:
        """Table of final losses by the tried learning rates and outer steps."""
        rates = sorted({rate for each in course.entrants for tried in each.trials.values() for rate in tried})
        rows = []
        for entrant in course.entrants:
            for case, jobs in course.trials(entrant).items():
                used = entrant.rate if case == entrant.case else None
                cells = [_tried(results.of(jobs[rate]), rate == used) if rate in jobs else Cell("") for rate in rates]
                rows.append(Row(_named(entrant, case), cells, list(jobs.values())))
        columns = ("method", *(f"{rate:g}" for rate in rates))
        what = "final loss at the learning rates, and with the outer steps, that were tried"
        return Table(f"{course.name}: {what}, seed {course.seeds[0]}; * is used", columns, rows)

    def check(self, course: Course, results: Results) -> Table:
        """Table that compares combined seconds with those of whole trainings."""
        rows = []
        for entrant, gbit in course.wholes():
            job, pace = course.whole(entrant, gbit), self.pace(course, gbit, entrant, results)
            found, lesson = results.of(job), results.of(course.lesson(entrant, entrant.rate, course.seeds[0]))
            if found.reason is not None or pace is None or lesson.reason is not None:
                cells = failed([each for each in (found, lesson, results.of(course.pacing(gbit))) if each.reason], 5)
            else:
                put, clock = course.steps * pace.seconds, found.data["cluster_seconds"]
                same = _curve(found).values == _curve(lesson).values
                sent = found.data["step_bytes"]
                cells = [
                    number(put, ".4g"),
                    number(clock, ".4g"),
                    _ratio(put / clock, [found, results.of(course.pacing(gbit))]),
                    Cell(f"{pace.sent / sent:.3g}" if sent else "", pace.sent / sent if sent else None),
                    Cell("the same" if same else "others", bad=not same),
                ]
            rows.append(Row(f"{entrant.name}, {1000 * gbit:g} Mbit/s", cells, [job, course.pacing(gbit)]))
        columns = ("whole training", "seconds put together", "by the clock", "ratio", "ratio of bytes", "losses")
        return Table(f"{course.name}: combined figures, checked", columns, rows)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        courses = at(scale, self.courses)
        seeds = max(
            len(succeeded(self._outcomes(course, entrant, results)))
            for course in courses
            for entrant in course.entrants
        )
        caption = (
            "Loss of texts or pictures that were not trained on, against seconds of training: a panel for each link "
            f"and task, bands from the least to the most of up to {seeds} seeds, both axes logarithmic. Dotted: as "
            "good as dense."
        )
        pictures = []
        for course in courses:
            names = [entrant.name for entrant in course.entrants]
            titles = {gbit: f"{course.name}, {1000 * gbit:g} Mbit/s" for gbit in course.gbits}
            own = [
                Picture(title, caption, partial(self._draw, course, gbit, results), title)
                for gbit, title in titles.items()
            ]
            pictures += panel_pictures(own, names, looks(names), names[:1])
        return pictures

    def _draw(self, course: Course, gbit: float, results: Results, names: Sequence[str], figure: Any) -> None:
        axes, goals = figure.subplots(), self.goals(course, results)
        curves = {}
        for entrant in course.entrants:
            pace = self.pace(course, gbit, entrant, results)
            good = succeeded(self._outcomes(course, entrant, results)) if pace else []
            curves[entrant.name] = [_curve(each, pace.seconds if pace else 1.0) for each in good]
        near = goals[0].target.value if goals else None
        draw_means(axes, curves, "seconds", "seconds of training", LOSS, target=near, ratios=True, shown=names)
        shown = [curve for each in curves.values() for curve in each]
        if goals and shown:  # trainings may be finished before the first measured step
            _look_at_the_end(axes, shown, goals)


def _look_at_the_end(axes: Any, curves: Sequence[Curve], goals: Sequence[Goal]) -> None:
    """Curve without the first tests of untrained models, which would compress the axis of the rest."""
    near, half = (goal.target.value for goal in goals)
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    least, most = min(*values, near), max(2 * half - 0.8 * near, math.sqrt(max(values) * near))
    logarithmic(axes.yaxis, [least, most])
    seen = [
        place for curve in curves for place, value in zip(curve.seconds, curve.values, strict=True) if value <= most
    ]
    axes.set_xlim(left=0.9 * min(seen))


def _curve(outcome: Outcome, pace: float = 1.0) -> Curve:
    """Losses by step, with seconds computed from the time per step."""
    tests = list(outcome.events("eval"))
    steps = [test["step"] for test in tests]
    return Curve(steps, [pace * step for step in steps], [figure_of(test, LOSS) for test in tests])


def _ratio(ratio: float, outcomes: Sequence[Outcome]) -> Cell:
    """Ratio of seconds, replaced by a remark if they are from several machines."""
    return Cell(OTHER_MACHINE) if len(machines(outcomes)) > 1 else number(ratio)


def _seconds(steps: float | None, pace: Pace | None) -> Cell:
    if steps is None:
        return Cell("never")
    return number(steps * pace.seconds, after=" s") if pace else Cell(f"{steps:g} steps")


def _timed(pace: Pace) -> list[Cell]:
    return [number(1000 * pace.seconds), number(pace.sent / 1e6), number(pace.computing, ".0%")]


def _tried(outcome: Outcome, used: bool) -> Cell:
    if outcome.reason is not None:
        return Cell(outcome.fault, bad=outcome.started)
    return number(_curve(outcome).values[-1], ".4g", " *" if used else "")


def _digits(value: float) -> str:
    """Formats a number with three digits and without an exponent."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _named(entrant: Entrant, case: str) -> str:
    """Name of an entrant with the options of its case that differ between the tried cases."""
    if len(entrant.trials) == 1:
        return entrant.name
    tried = [set(each.split(",")) for each in entrant.trials]
    return f"{entrant.name}: {', '.join(word for word in case.split(',') if word not in set.intersection(*tried))}"


def _best(
    name: str, low: float, high: float, ways: Mapping[str, Mapping[float, float]], dense: Mapping[float, float] | None
) -> list[Cell]:
    """Row of the fastest method, at both ends of its range."""

    def ends(paces: Mapping[float, float]) -> str:
        return f"{between(paces, low):.3g} to {between(paces, high):.3g}"

    middle = math.sqrt(low * high)
    others = {other: between(paces, middle) for other, paces in ways.items() if other != name}
    second = min(others, key=lambda other: others[other], default=None)
    behind = f"{second}, {others[second] / between(ways[name], middle):.2f}x" if second else NEVER
    return [Cell(name), Cell(ends(ways[name])), Cell(ends(dense) if dense else NEVER), Cell(behind)]
