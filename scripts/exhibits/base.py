"""What an exhibit is: work to be done, and the tables and pictures made of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.tables import Table

__all__ = ["SCALES", "Basis", "Exhibit", "Picture", "Results"]

SCALES = ("smoke", "laptop", "paper")

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
    """A figure.

    Attributes:
        name: unique in the exhibit.
        caption: what is to be seen.
        draw: draws it.
    """

    name: str
    caption: str
    draw: Draw

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
    """

    outputs: Path
    found: Mapping[Job, Outcome]

    @classmethod
    def on_disk(cls, outputs: Path, jobs: Sequence[Job]) -> Results:
        """Collects what is there: results, else failures."""
        pairs = ((job, job.find(outputs) or job.failure(outputs)) for job in jobs)
        return cls(outputs, {job: outcome for job, outcome in pairs if outcome})

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
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis
    note: str = ""

    @abstractmethod
    def jobs(self, scale: str) -> Sequence[Job]:
        """All work whose results the exhibit needs."""

    @abstractmethod
    def cost(self, scale: str) -> str:
        """About how long the work takes, in words."""

    @abstractmethod
    def caption(self, scale: str) -> str:
        """What was run, in a sentence or two."""

    def what_ran(self, scale: str) -> str:
        """The caption, and the note."""
        return f"{self.caption(scale)} {self.note}".strip()

    @abstractmethod
    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """The tables; failed work shows with its reason."""

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """The figures, if there are any."""
        return ()
