"""Base classes of exhibits: jobs, and the tables and figures made of their results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from scripts.exhibits.charts.style import Look
from scripts.exhibits.declared import Keys
from scripts.exhibits.jobs import Job, Outcome, Training
from scripts.exhibits.records import RecordStore
from scripts.exhibits.tables import Table
from spardl.basics.errors import ConfigError

# Size presets from seconds to a cluster. An exhibit without plans for "evening" uses those of "laptop".
SCALES = ("smoke", "laptop", "evening", "paper")
INSTEAD: Mapping[str, str] = MappingProxyType({"evening": "laptop"})
# Times that an entry of average size must be sent before a metric characterizes a method. Shorter trainings mostly show
# entries that wait to be sent for the first time, which takes 1 / density synchronizations.
SWEEPS = 10
EARLY = (
    "The trainings are those of the size {}. "
    f"Trainings of fewer than {SWEEPS}/density steps show how learning begins, not where it ends."
)

T = TypeVar("T")
# A choice for each size preset; a preset that another one replaces may be missing.
SIZES = Keys(tuple(each for each in SCALES if each not in INSTEAD), tuple(INSTEAD))
ByScale: TypeAlias = Annotated[Mapping[str, T], SIZES]


def at(scale: str, choices: Mapping[str, T]) -> T:
    """Returns the choice for a size preset, or for the preset that replaces it."""
    return choices[scale if scale in choices else INSTEAD[scale]]


NO_KEY: Mapping[str, Look] = MappingProxyType({})
# Draws into a matplotlib figure.
Draw: TypeAlias = Callable[[Any], None]


class Basis(NamedTuple):
    """Sources of a value: computed by a model, timed or counted, and assumed."""

    simulated: str
    measured: str
    assumed: str


class Picture(NamedTuple):
    """A figure or a panel of one: consecutive pictures with the same caption form one figure.

    Attributes:
        name: Name, unique in the exhibit.
        caption: Description of all panels.
        draw: Function that draws the picture.
        title: Title of the panel; empty if the caption suffices.
        key: Legend: look by name.
        wide: Whether the picture needs the full width of the page.
    """

    name: str
    caption: str
    draw: Draw
    title: str = ""
    key: Mapping[str, Look] = NO_KEY
    wide: bool = False

    @property
    def file(self) -> str:
        """The name, usable in a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Results:
    """Outcome by job, without those that were not started; folder of all runs, and records to use in addition."""

    outputs: Path
    found: Mapping[Job, Outcome]
    store: RecordStore | None = None

    @classmethod
    def on_disk(cls, outputs: Path, jobs: Sequence[Job], store: RecordStore | None = None) -> Results:
        """Collects results on disk, see :meth:`look`."""
        empty = cls(outputs, {}, store)
        pairs = ((job, empty.look(job)) for job in jobs)
        return cls(outputs, {job: outcome for job, outcome in pairs if outcome}, store)

    def look(self, job: Job) -> Outcome | None:
        """Returns the outcome of a job on disk: its own result, its record, or its failure, in this order."""
        return job.find(self.outputs) or (self.store and self.store.find(job)) or job.failure(self.outputs)

    def of(self, job: Job) -> Outcome:
        """Returns the outcome of a job, also of one that was not started."""
        return self.found.get(job) or Outcome(self.outputs, {}, "not run yet", started=False)


@dataclass(frozen=True)
class Exhibit(ABC):
    """A table or figure of a paper.

    Attributes:
        name: ``paper.subject``, as given to reproduce.py.
        source: Counterpart in the paper, and how well we know it.
        shows: Statement of what the exhibit shows.
        note: Remark on a method that applies to all of its figures.
        leads: Whether the summary of the paper shows its first figure.
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis = field(kw_only=True)
    note: str = field(default="", kw_only=True)
    leads: bool = field(default=False, kw_only=True)

    @abstractmethod
    def jobs(self, scale: str) -> Sequence[Job]:
        """Returns all jobs whose results the exhibit needs."""

    def with_seeds(self, count: int) -> Exhibit:
        """Returns the same exhibit with the seeds 1 to ``count``; raises ConfigError if it has no seeds."""
        raise ConfigError(f"--seeds has no effect on {self.name}, which uses no seeds; remove it")

    @abstractmethod
    def cost(self, scale: str) -> str:
        """Returns the approximate duration of the jobs."""

    @abstractmethod
    def caption(self, scale: str) -> str:
        """Describes the runs in one or two sentences."""

    def what_ran(self, scale: str) -> str:
        """Returns the caption and the note, and whether trainings are those of a smaller size."""
        other = self.same_as(scale)
        early = EARLY.format(other) if other and any(isinstance(job, Training) for job in self.jobs(scale)) else ""
        return " ".join(part for part in (self.caption(scale), self.note, early) if part)

    def same_as(self, scale: str) -> str:
        """Returns the smaller size with the same jobs; empty if this size has different jobs."""
        other = INSTEAD.get(scale, "")
        return other if other and self.jobs(scale) == self.jobs(other) else ""

    @abstractmethod
    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """Tables of the results; failed jobs show with their reason."""

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """Figures of the results, if any."""
        return ()


class Planned(Exhibit):
    """An exhibit whose jobs are trainings; its plan for each size has a ``cost``, its approximate duration."""

    plans: ByScale[Any]

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} trainings, {at(scale, self.plans).cost}"
