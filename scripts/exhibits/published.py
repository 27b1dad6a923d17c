"""Published trainings that no size of the report runs, with the time they would need.

Core hours are estimated: seconds of both passes as measured on one core (scripts/profiles), times the examples of all
workers, and an update per worker and step. Examples that are longer than those of the profile count in proportion.
Selection, messages and evaluations are not counted. The profiles are of two machines: those of VGG-19, ResNet-18 and
the LSTMs on AN4 and WikiText-2 were measured on one on which VGG-16 takes 0.44 of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.base import Exhibit
from scripts.exhibits.declared import Reader, parse
from scripts.exhibits.jobs import Training
from scripts.exhibits.pages.sections import in_hours
from scripts.exhibits.papers.catalogue import papers
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile

FILE = Path(__file__).with_name("published.yaml")
PROFILES = Path(__file__).parents[1] / "profiles"
PAPER = "paper"  # size of the exhibits' published trainings
TITLE = "Published trainings, in place of which smaller ones ran"
COLUMNS = ("training", "exhibit", "a run", "measured", "core hours of a run", "runs", "core hours of all")


class Published(NamedTuple):
    """A published training.

    Attributes:
        task: Model and data, for readers.
        exhibit: Name of the exhibit that it belongs to.
        preset: Choice of ``experiment=``.
        profile: Name of the model's profile in ``scripts/profiles``.
        examples: Number of training examples; 0 if the preset states its steps.
        longer: Length of an example over that of the profile.
        runs: Number of trainings; 0 stands for those that the exhibit has at the size "paper".
    """

    task: str
    exhibit: str
    preset: str
    profile: str
    examples: int = 0
    longer: float = 1.0
    runs: int = 0

    def row(self, exhibit: Exhibit) -> tuple[Row, float]:
        """Returns the row of the table, and the core seconds of all runs.

        Raises:
            ConfigError: If the number of steps or runs is unknown, or the profile cannot be read.
        """
        word = f"experiment={self.preset}"
        jobs = [job for job in exhibit.jobs(PAPER) if isinstance(job, Training) and word in job.words]
        jobs = jobs or [Training((word,), cluster="process_group")]  # one if the exhibit has none of the preset
        config, runs, profile = jobs[0].config, self.runs or len(jobs), Profile.read(PROFILES / f"{self.profile}.json")
        workers, batch = jobs[0].workers, config["training"]["batch_size"]
        steps = config["training"]["max_steps"]
        if steps is None:
            if not self.examples:
                raise ConfigError(f"{FILE.name}: {self.preset} counts epochs; state `examples`")
            steps = round(config["training"]["epochs"] * (self.examples // (workers * batch)))
        example = profile.compute / profile.batch * self.longer
        seconds = steps * workers * (batch * example + profile.update * sum(profile.entries))
        cells = [
            Cell(exhibit.name),
            Cell(f"{steps:,} steps of {workers} workers with {batch} examples each"),
            Cell(f"{example:.2g} s per example ({self.profile}.json)"),
            Cell(in_hours(seconds), seconds / 3600),
            Cell(str(runs), float(runs)),
            Cell(in_hours(runs * seconds), runs * seconds / 3600),
        ]
        return Row(self.task, cells, jobs), runs * seconds


def published() -> Sequence[Published]:
    """Reads the list of published trainings.

    Raises:
        ConfigError: If the file does not fit to :class:`Published`, or names an exhibit that does not exist.
    """
    reader = Reader(MappingProxyType({}), MappingProxyType({}), __package__)
    found: Sequence[Published] = reader.read(tuple[Published, ...], parse(FILE), FILE.stem)
    known = papers()
    for each in found:
        if each.exhibit not in known:
            raise ConfigError(f"{FILE.name}: {each.task}: exhibit {each.exhibit!r} does not exist")
    return found


def published_table(exhibits: Mapping[str, Exhibit]) -> Table | None:
    """Returns the published trainings of exhibits, if there are any; needs :func:`scripts.choices.composing`.

    Raises:
        ConfigError: See :func:`published` and :meth:`Published.row`.
    """
    found = [each.row(exhibits[each.exhibit]) for each in published() if each.exhibit in exhibits]
    total = in_hours(sum(seconds for _, seconds in found))
    return Table(f"{TITLE}: about {total} core hours", COLUMNS, [row for row, _ in found]) if found else None
