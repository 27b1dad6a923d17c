"""Exhibits that measure whole updates in the network lab, with sleeping passes and real messages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from scripts.exhibits.base import Basis, ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.kinds.gpu import basis_of
from scripts.exhibits.kinds.lab import EDITION, LINKS, Measurement, asleep, in_lab, slept, typed
from scripts.exhibits.outcomes import failed
from scripts.exhibits.passes import MeasuredPasses
from scripts.exhibits.tables import Cell, Row, Table

BASIS = Basis(
    simulated="only the predictions",
    measured=f"seconds of steps over {LINKS}; gradients, messages and updates are real, of a model of this size",
    assumed="the passes: workers sleep for the times of a profile, scaled, as if each had a GPU",
)
SCRIPT, SCHEDULE = "scripts/bench_overlap.py", "after_backward"
PREDICTED, TURNS = "predicted", "every turn"


class Place(NamedTuple):
    """Setting in which methods are compared.

    Attributes:
        workers: Number of workers (P).
        gbit: Bandwidth of each link in Gbit/s.
    """

    workers: int
    gbit: float

    @property
    def title(self) -> str:
        """Name of a row."""
        return f"P = {self.workers}, {self.gbit:g} Gbit/s"


class Course(NamedTuple):
    """Plan of one size preset.

    Attributes:
        places: Places to compare.
        words: Options of bench.py overlap without methods and schedule.
        limit: Time limit of a lab in seconds.
        cost: Approximate duration of all runs, in words.
        measured: Digest of the profile that determines how long workers sleep, unless it is part of the repository.
    """

    places: tuple[Place, ...]
    words: tuple[str, ...]
    limit: float
    cost: str
    measured: str = ""

    def asleep(self, given: Mapping[str, MeasuredPasses]) -> Course:
        """The same plan with measured passes if they are given."""
        taken = given.get(slept(self.words))
        return self._replace(words=asleep(self.words, taken), measured=taken.digest) if taken else self


def timed_updates(**setting: Any) -> dict[str, Any]:
    """Seconds per step of each method, by turn.

    Args:
        setting: Arguments of :func:`in_lab`; the benchmark is bench.py overlap.
    """
    return {"rows": in_lab(**setting), "cores": os.cpu_count()}


@dataclass(frozen=True)
class LabUpdates(Exhibit):
    """One method against others at several numbers of workers, each on links of several speeds.

    Attributes:
        methods: Choices of ``compressor=`` by name; the first one is compared with all others.
        courses: Course by size preset.
        model: The model, for readers.
    """

    methods: Mapping[str, str]
    courses: ByScale[Course]
    model: str
    basis: Basis = field(default=BASIS, kw_only=True)

    def assumes(self, scale: str) -> Sequence[str]:
        model = slept(at(scale, self.courses).words)
        return [model] if model else []

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> LabUpdates:
        models = {slept(course.words) for course in self.courses.values()}
        own = {model: given[model] for model in models if model in given}
        courses = {scale: course.asleep(own) for scale, course in self.courses.items()}
        return replace(self, courses=courses, basis=basis_of(self.basis, own))

    def job(self, course: Course, place: Place) -> Measurement:
        """Job that measures all methods in turns in one setting."""
        words = (SCRIPT, *course.words, "--methods", ",".join(self.methods.values()), "--schedules", SCHEDULE)
        arguments = (("workers", place.workers), ("gbit", place.gbit), ("limit", course.limit), ("words", words))
        measured = (("measured", course.measured),) if course.measured else ()
        return Measurement(self.name, timed_updates, (*arguments, *measured), typed(*place, words), EDITION)

    def jobs(self, scale: str) -> Sequence[Measurement]:
        course = at(scale, self.courses)
        return [self.job(course, place) for place in course.places]

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} labs, {at(scale, self.courses).cost}"

    def caption(self, scale: str) -> str:
        return (
            f"{self.model}. A step: both passes, then the synchronization, then the update; nothing overlaps. Medians "
            "of turns that alternate between methods; ratios are turn by turn. Predicted: the passes, a worker's own "
            "work as measured while all did theirs, and counted rounds and bytes on the network as measured just "
            "before. All workers share the cores of one machine: where workers are many and links are fast, steps wait "
            "for cores and not for the network, and methods that compute little look better than on machines of their "
            f"own. {' '.join(at(scale, self.courses).words)}"
        )

    def found(self, course: Course, place: Place, results: Results) -> dict[str, Mapping[str, Any]] | None:
        """Measurements by method; ``None`` without a result."""
        outcome = results.of(self.job(course, place))
        if outcome.reason is not None:
            return None
        by_choice = {row["method"]: row for row in outcome.data["rows"]}
        return {name: by_choice[choice] for name, choice in self.methods.items()}

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        course = at(scale, self.courses)
        ours, *others = self.methods
        columns = ("place", *(f"{ours} over {each}{how}" for each in others for how in ("", f", {PREDICTED}")), "cores")
        ratios = [self._row(course, place, results, self._ratio_cells, len(columns) - 1) for place in course.places]
        head = ("place", *(f"{each}, {what}" for each in self.methods for what in ("ms", PREDICTED)), TURNS)
        seconds = [self._row(course, place, results, self._second_cells, len(head) - 1) for place in course.places]
        return [
            Table(f"{self.title}: how many times as fast {ours}'s steps are", columns, ratios),
            Table(f"{self.title}: milliseconds of a step, medians", head, seconds),
        ]

    def _row(self, course: Course, place: Place, results: Results, cells: Any, count: int) -> Row:
        job, found = self.job(course, place), self.found(course, place, results)
        outcome = results.of(job)
        return Row(place.title, cells(found, outcome.data) if found else failed([outcome], count), [job])

    def _ratio_cells(self, found: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any]) -> list[Cell]:
        ours, *others = found.values()
        pairs = [(_turn_ratios(each, ours), each[PREDICTED] / ours[PREDICTED]) for each in others]
        cells = [
            cell
            for measured, predicted in pairs
            for cell in (
                Cell(f"{median(measured):.3g}x ({min(measured):.3g}..{max(measured):.3g})", median(measured)),
                Cell(f"{predicted:.3g}x", predicted),
            )
        ]
        return [*cells, Cell(str(data["cores"]), float(data["cores"]))]

    def _second_cells(self, found: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any]) -> list[Cell]:
        del data
        figures = [1000 * value for row in found.values() for value in (median(row["seconds"]), row[PREDICTED])]
        told = "; ".join(
            f"{name}: {', '.join(f'{1000 * each:.3g}' for each in row['seconds'])}" for name, row in found.items()
        )
        return [*(Cell(f"{value:.3g}", value) for value in figures), Cell(told)]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        course = at(scale, self.courses)
        caption = (
            f"{next(iter(self.methods))}'s steps: how many times as fast as those of other methods, over the number of "
            "workers; medians of turns, with the least and the most; dotted: predicted"
        )
        key, panels = dict(list(palette.looks(list(self.methods)).items())[1:]), {}
        for gbit in dict.fromkeys(place.gbit for place in course.places):
            found = {
                place.workers: rows
                for place in course.places
                if place.gbit == gbit and (rows := self.found(course, place, results))
            }
            if found:
                panels[gbit] = found
        return [
            Picture(f"{gbit:g} Gbit/s", caption, partial(self._draw, found), f"{gbit:g} Gbit/s", key)
            for gbit, found in panels.items()
        ]

    def _draw(self, found: Mapping[int, Mapping[str, Mapping[str, Any]]], figure: Any) -> None:
        ours, *others = self.methods
        axes, looks = figure.subplots(), palette.looks(list(self.methods))
        axes_of.plain(axes, "workers", "times as fast, logarithmic")
        drawn = [1.0]
        for name in others:
            turns = [_turn_ratios(rows[name], rows[ours]) for rows in found.values()]
            guessed = [rows[name][PREDICTED] / rows[ours][PREDICTED] for rows in found.values()]
            middle = [median(each) for each in turns]
            reach = [
                [value - min(each) for value, each in zip(middle, turns, strict=True)],
                [max(each) - value for value, each in zip(middle, turns, strict=True)],
            ]
            color = looks[name].color
            axes.errorbar(list(found), middle, yerr=reach, color=color, marker=looks[name].marker, capsize=2.5)
            axes.plot(list(found), guessed, color=color, linestyle=":", linewidth=1)
            drawn += [*guessed, *(value for each in turns for value in each)]
        axes.axhline(1, color=palette.SOFT, linewidth=0.9)
        axes.set_xticks(list(found))
        axes_of.logarithmic(axes.yaxis, drawn, "\u00d7")


def _turn_ratios(other: Mapping[str, Any], ours: Mapping[str, Any]) -> list[float]:
    return [one / own for one, own in zip(other["seconds"], ours["seconds"], strict=True)]
