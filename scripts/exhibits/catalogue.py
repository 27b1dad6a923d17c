"""All exhibits of all papers, from the YAML files of papers/; and published trainings that no size of the report runs.

The time of a published training is estimated: seconds of both passes as measured on one core (scripts/profiles), times
the examples of all workers, and an update per worker and step. Examples that are longer than those of the profile count
in proportion. Selection, messages and evaluations are not counted. The profiles are of two machines: those of VGG-19,
ResNet-18 and the LSTMs on AN4 and WikiText-2 were measured on one on which VGG-16 takes 0.44 of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.base import Exhibit
from scripts.exhibits.charts.sheets import Chart, Dots, Lines
from scripts.exhibits.declared import Definitions, Keys, Reader, Variants, entries, parse
from scripts.exhibits.jobs import Training
from scripts.exhibits.kinds.balance import Balance
from scripts.exhibits.kinds.counts import CountedCosts, UpdateBreakdown
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.lab import LabUpdates, Measured, Timed
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.races import Race
from scripts.exhibits.kinds.study import StudyGrid, StudyRates
from scripts.exhibits.kinds.traces import Selections, Thresholds
from scripts.exhibits.kinds.trainings import Contrasts, EveryMethod, MethodComparison
from scripts.exhibits.pages import in_hours
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile

FOLDER = Path(__file__).with_name("papers")
# Definitions for the files of all papers, and these files in the order of the report.
SHARED = "shared"
FILES = ("spardl", "oktopk", "study", "dear", "sketch_fusion", "frontier", "settings")
KINDS: Mapping[str, type[Exhibit]] = MappingProxyType(
    {
        "trainings": MethodComparison,
        "every_method": EveryMethod,
        "contrasts": Contrasts,
        "study_grid": StudyGrid,
        "study_rates": StudyRates,
        "counts": CountedCosts,
        "updates": UpdateBreakdown,
        "lab": Measured,
        "lab_updates": LabUpdates,
        "benchmark": Timed,
        "race": Race,
        "frontier": Frontier,
        "prediction": Computed,
        "balance": Balance,
        "thresholds": Thresholds,
        "xi": Selections,
    }
)
VARIANTS: Variants = MappingProxyType({Exhibit: KINDS, Chart: {"dots": Dots, "lines": Lines}})


class Paper(NamedTuple):
    """A paper, with authors and year, and its exhibits in the order of the report."""

    title: str
    exhibits: tuple[Exhibit, ...]


def load(path: Path, shared: Definitions) -> Paper:
    """Reads the file of a paper with ``paper:``, ``definitions:`` (optional) and ``exhibits:``.

    Raises:
        ConfigError: If the file does not fit to the classes of the exhibits.
    """
    parts = entries(parse(path), path.stem, Keys(("paper", "exhibits"), ("definitions",)))
    own = entries(parts["definitions"], "definitions") if "definitions" in parts else {}
    reader = Reader({**shared, **own}, VARIANTS, "scripts.exhibits.kinds")
    exhibits = entries(parts["exhibits"], "exhibits")
    return Paper(
        reader.read(str, parts["paper"], "paper"),
        tuple(reader.read(Exhibit, node, name, name=name) for name, node in exhibits.items()),
    )


@cache
def load_all() -> tuple[Paper, ...]:
    """Returns all papers in the order of the report.

    Raises:
        ConfigError: If a file is wrong, or two papers have an exhibit of the same name.
    """
    shared = entries(parse(FOLDER / f"{SHARED}.yaml"), SHARED)
    found = tuple(load(FOLDER / f"{name}.yaml", shared) for name in FILES)
    homes: dict[str, str] = {}
    for file, paper in zip(FILES, found, strict=True):
        for exhibit in paper.exhibits:
            if exhibit.name in homes:
                others = f"{homes[exhibit.name]}.yaml and {file}.yaml"
                raise ConfigError(f"{others} both have an exhibit {exhibit.name!r}; rename one")
            homes[exhibit.name] = file
    return found


def catalogue() -> Mapping[str, Exhibit]:
    """Returns all exhibits by name."""
    return {exhibit.name: exhibit for paper in load_all() for exhibit in paper.exhibits}


def papers() -> Mapping[str, str]:
    """Returns the paper of each exhibit, by the exhibit's name."""
    return {exhibit.name: paper.title for paper in load_all() for exhibit in paper.exhibits}


PUBLISHED = Path(__file__).with_name("published.yaml")
PROFILES = Path(__file__).parents[1] / "profiles"
PAPER_SCALE = "paper"  # size of the exhibits' published trainings
PUBLISHED_TITLE = "Published trainings, in place of which smaller ones ran"
PUBLISHED_COLUMNS = ("training", "exhibit", "a run", "measured", "core hours of a run", "runs", "core hours of all")


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
        jobs = [job for job in exhibit.jobs(PAPER_SCALE) if isinstance(job, Training) and word in job.words]
        jobs = jobs or [Training((word,), cluster="process_group")]  # one if the exhibit has none of the preset
        config, runs, profile = jobs[0].config, self.runs or len(jobs), Profile.read(PROFILES / f"{self.profile}.json")
        workers, batch = jobs[0].workers, config["training"]["batch_size"]
        steps = config["training"]["max_steps"]
        if steps is None:
            if not self.examples:
                raise ConfigError(f"{PUBLISHED.name}: {self.preset} counts epochs; state `examples`")
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
    found: Sequence[Published] = reader.read(tuple[Published, ...], parse(PUBLISHED), PUBLISHED.stem)
    known = papers()
    for each in found:
        if each.exhibit not in known:
            raise ConfigError(f"{PUBLISHED.name}: {each.task}: exhibit {each.exhibit!r} does not exist")
    return found


def published_table(exhibits: Mapping[str, Exhibit]) -> Table | None:
    """Returns the published trainings of exhibits, if there are any; needs :func:`scripts.choices.composing`.

    Raises:
        ConfigError: See :func:`published` and :meth:`Published.row`.
    """
    found = [each.row(exhibits[each.exhibit]) for each in published() if each.exhibit in exhibits]
    title = f"{PUBLISHED_TITLE}: about {in_hours(sum(seconds for _, seconds in found))} core hours"
    return Table(title, PUBLISHED_COLUMNS, [row for row, _ in found]) if found else None
