"""What an exhibit is: work to be done, and the tables and pictures made of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from scripts.exhibits.charts.palette import Look
from scripts.exhibits.jobs import Job, Outcome, Training
from scripts.exhibits.passes import MeasuredPasses
from scripts.exhibits.records import RecordStore
from scripts.exhibits.tables import Table
from scripts.exhibits.tried import Tried
from spardl.basics.errors import ConfigError

__all__ = ["INSTEAD", "SCALES", "SWEEPS", "Basis", "Exhibit", "Picture", "Planned", "Results", "at"]

# From seconds to what takes a cluster. Where an exhibit has nothing of its own for an evening, the laptop's will do.
SCALES = ("smoke", "laptop", "evening", "paper")
INSTEAD: Mapping[str, str] = MappingProxyType({"evening": "laptop"})
# Times that an entry of average size is to be sent before a metric says anything of a method: what waits for its first
# time, one synchronization in 1 / density, is most of what a shorter training shows.
SWEEPS = 10
EARLY = (
    "The trainings are those of the scale {}. "
    f"What has fewer than {SWEEPS}/density steps shows how learning begins, and not where it ends."
)

T = TypeVar("T")


def at(scale: str, choices: Mapping[str, T]) -> T:
    """What a scale means to an exhibit: what it has for it, or for the scale that stands in for that."""
    return choices[scale if scale in choices else INSTEAD[scale]]


NO_KEY: Mapping[str, Look] = MappingProxyType({})
# Draws into a matplotlib figure.
Draw: TypeAlias = Callable[[Any], None]


class Basis(NamedTuple):
    """What a reader must know to believe a figure.

    Attributes:
        simulated: what is a model's result.
        measured: what ran, and was timed or counted.
        assumed: what was neither.
    """

    simulated: str
    measured: str
    assumed: str


class Picture(NamedTuple):
    """A figure, or one panel of it: pictures that follow each other with the same caption are one figure.

    Attributes:
        name: unique in the exhibit.
        caption: what is to be seen in all panels.
        draw: draws it.
        title: what this panel is of; nothing, if the caption says so.
        key: how what is drawn looks, by name, as far as no name stands beside it.
        wide: whether it cannot be read on half the page.
    """

    name: str
    caption: str
    draw: Draw
    title: str = ""
    key: Mapping[str, Look] = NO_KEY
    wide: bool = False

    @property
    def file(self) -> str:
        """The name as part of a file's."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Results:
    """What jobs found.

    Attributes:
        outputs: the folder of all runs.
        found: by job; one is missing here if it was not started.
        store: records of what was done elsewhere, if they count, too.
    """

    outputs: Path
    found: Mapping[Job, Outcome]
    store: RecordStore | None = None

    @classmethod
    def on_disk(cls, outputs: Path, jobs: Sequence[Job], store: RecordStore | None = None) -> Results:
        """Collects what is there: own results, else records, else failures."""
        empty = cls(outputs, {}, store)
        pairs = ((job, empty.look(job)) for job in jobs)
        return cls(outputs, {job: outcome for job, outcome in pairs if outcome}, store)

    def look(self, job: Job) -> Outcome | None:
        """What is on disk of a job: its own result, else its record, else its failure."""
        return job.find(self.outputs) or (self.store and self.store.find(job)) or job.failure(self.outputs)

    def of(self, job: Job) -> Outcome:
        """The job's result, or a failure that says that it was not started."""
        return self.found.get(job) or Outcome(self.outputs, {}, "not run yet", started=False)


class Exhibit(ABC):
    """A table or figure of a paper.

    Attributes:
        name: ``paper.subject``, as reproduce.py is told it.
        title: in words.
        source: what it is in the paper, and how well we know that.
        shows: what one can learn of it.
        basis: what is simulated, measured and assumed.
        note: what else must be known of a method wherever its figures are.
        leads: whether its first figure is the one that a summary shows of the paper.
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis
    note: str = ""
    leads: bool = False

    @abstractmethod
    def jobs(self, scale: str) -> Sequence[Job]:
        """All work whose results the exhibit needs."""

    def with_seeds(self, count: int) -> Exhibit:
        """The same with other seeds: 1, 2, ... up to ``count``.

        Raises:
            ConfigError: if no work of it is done once for each seed.
        """
        raise ConfigError(f"{self.name} has no seeds to choose; leave out --seeds")

    def assumes(self, scale: str) -> Sequence[str]:
        """The models whose passes are assumed to take so long, and not measured; of most exhibits none."""
        del scale
        return ()

    def guesses(self, scale: str) -> bool:
        """Whether what a GPU takes may be assumed; only an exhibit that knows it all measured says no."""
        del scale
        return True

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> Exhibit:
        """The same with measured passes in place of assumed ones.

        Args:
            given: by model; of others than it assumes, none counts.

        Raises:
            ConfigError: if one is of a model of another size.
        """
        del given
        return self

    @abstractmethod
    def cost(self, scale: str) -> str:
        """About how long the work takes, in words."""

    @abstractmethod
    def caption(self, scale: str) -> str:
        """What was run, in a sentence or two."""

    def what_ran(self, scale: str) -> str:
        """The caption, the note, and whether trainings are those of a shorter scale."""
        other = self.same_as(scale)
        early = EARLY.format(other) if other and any(isinstance(job, Training) for job in self.jobs(scale)) else ""
        return " ".join(part for part in (self.caption(scale), self.note, early) if part)

    def same_as(self, scale: str) -> str:
        """The shorter scale whose work is that of this one, too; empty if this one has its own."""
        other = INSTEAD.get(scale, "")
        return other if other and self.jobs(scale) == self.jobs(other) else ""

    @abstractmethod
    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """The tables; failed work shows with its reason."""

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """The figures, if there are any."""
        return ()

    def tried(self, scale: str, results: Results) -> Sequence[Tried]:
        """What methods reached on tasks, if that is what the exhibit is about."""
        return ()


class Planned(Exhibit):
    """An exhibit whose jobs are trainings, as planned for each scale.

    Attributes:
        plans: by scale; each has a ``cost``, about how long all of it takes, in words.
    """

    plans: Mapping[str, Any]

    def cost(self, scale: str) -> str:
        """See :meth:`Exhibit.cost`."""
        return f"{len(self.jobs(scale))} trainings, {at(scale, self.plans).cost}"
