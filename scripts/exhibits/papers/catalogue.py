"""All exhibits of all papers, from the YAML files of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.base import Exhibit
from scripts.exhibits.charts.sheets import Chart, Dots, Lines
from scripts.exhibits.declared import Definitions, Keys, Reader, Variants, entries, parse
from scripts.exhibits.kinds.balance import Balance
from scripts.exhibits.kinds.counts import CountedCosts, UpdateBreakdown
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.lab import LabUpdates, Measured, Timed
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.races import Race
from scripts.exhibits.kinds.study import StudyGrid, StudyRates
from scripts.exhibits.kinds.traces import Selections, Thresholds
from scripts.exhibits.kinds.trainings import Contrasts, EveryMethod, MethodComparison
from spardl.basics.errors import ConfigError

FOLDER = Path(__file__).parent
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
