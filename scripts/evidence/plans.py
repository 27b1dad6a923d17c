"""Plans of the learning tables: tasks, rows, learning rates and seeds, read from YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from scripts.exhibits.jobs import Training
from scripts.exhibits.records import Record, Records
from spardl.basics.errors import ConfigError

__all__ = [
    "ALONE",
    "DENSE",
    "Comparison",
    "Line",
    "Overview",
    "Task",
    "excerpts_in",
    "first_recorded",
    "overview_in",
    "tasks_in",
]

# The rows that all others are measured by: the ceiling and the floor.
DENSE, ALONE = "dense", "alone"
# Rates of references and rivals are chosen by all seeds: the first seed alone may favor an unsuitable rate.
_TUNED = frozenset({DENSE, ALONE, "published", "powersgd"})


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        name: Name of the row.
        words: Arguments of train.py.
        rates: Learning rates to choose from.
    """

    name: str
    words: tuple[str, ...]
    rates: tuple[float, ...]


class Comparison(NamedTuple):
    """Comparison of a method with and without a local update (momentum before compression).

    Attributes:
        density: Density of both rows, as text.
        without: Name of the row whose optimizer keeps its state; ``None`` if that was not trained.
        moved: Name of the row with a local update.
    """

    density: str
    without: str | None
    moved: str


@dataclass(frozen=True)
class Task:
    """A task with its table of trainings.

    Attributes:
        name: Name of the task.
        title: Title for readers.
        words: Arguments of train.py that all rows share.
        metric: Metric to compare.
        lower: Whether lower values of the metric are better.
        seeds: Seeds of the runs; see ``choosing``.
        lines: Rows of the table.
        compared: Comparisons in the summary of all tasks.
    """

    name: str
    title: str
    words: tuple[str, ...]
    metric: str
    lower: bool
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]
    compared: tuple[Comparison, ...] = ()

    def cut(self, seeds: int | None) -> Task:
        """Returns the task with only its first seeds.

        Raises:
            ConfigError: If the number of seeds is below one.
        """
        if seeds is not None and seeds < 1:
            raise ConfigError(f"a table needs at least one seed, got {seeds}")
        return replace(self, seeds=self.seeds[:seeds])

    def training(self, line: Line, rate: float, seed: int) -> Training:
        """Returns the training of a row with a learning rate and a seed."""
        # A row's arguments replace those of the task. Tasks that differ only in replaced arguments, such as the number
        # of workers of a single worker, share the run and its record.
        replaced = {word.partition("=")[0] for word in line.words}
        shared = (word for word in self.words if word.partition("=")[0] not in replaced)
        return Training((*shared, *line.words, f"optimizer.lr={rate:g}", f"seed={seed}"))

    def choosing(self, line: Line) -> tuple[int, ...]:
        """Seeds that determine the learning rate of a row: all for references and rivals, otherwise the first."""
        return self.seeds if line.name in _TUNED else self.seeds[:1]

    def first(self) -> list[Training]:
        """Runs that determine the learning rates."""
        pairs = ((line, seed) for line in self.lines for seed in self.choosing(line))
        return [self.training(line, rate, seed) for line, seed in pairs for rate in line.rates]

    def rest(self, records: Records) -> list[Training]:
        """Runs of the other seeds with the best learning rates in ``records``."""
        chosen = [(line, self.rate(line, records)) for line in self.lines]
        return [
            self.training(line, rate, seed)
            for line, rate in chosen
            if rate is not None
            for seed in self.seeds
            if seed not in self.choosing(line)
        ]

    def rate(self, line: Line, records: Records) -> float | None:
        """Returns the best learning rate of a row, by the selection seeds with records of all rates."""
        found = {
            (rate, seed): records.get(self.training(line, rate, seed).command)
            for rate in line.rates
            for seed in self.choosing(line)
        }
        losses = {pair: self.loss(each) for pair, each in found.items() if each is not None}
        seeds = [seed for seed in self.choosing(line) if all((rate, seed) in losses for rate in line.rates)]
        return min(line.rates, key=lambda rate: sum(losses[rate, seed] for seed in seeds)) if seeds else None

    def line(self, name: str) -> Line:
        """Returns the row of this ``name``."""
        return next(line for line in self.lines if line.name == name)

    def loss(self, record: Record) -> float:
        """Returns the metric, with a sign so that smaller is better."""
        return record.final(self.metric) if self.lower else -record.final(self.metric)

    def results(self, line: Line, records: Records) -> tuple[float, dict[int, Record]] | None:
        """Returns the best learning rate of a row and its records by seed; ``None`` if it is not known."""
        rate = self.rate(line, records)
        if rate is None:
            return None
        found = {seed: records.get(self.training(line, rate, seed).command) for seed in self.seeds}
        return rate, {seed: each for seed, each in found.items() if each is not None}


class Overview(NamedTuple):
    """Contents of the figure and of the tables of several tasks.

    Attributes:
        titles: Short titles of the tasks.
        panels: Tasks of the figure.
        marks: Rows of each method in the figure; of each inner list, the first row with a record is shown.
        costs: Tasks of the table of costs.
        methods: Rows of each method in that table; the first with a record is shown.
        ablated: Tasks of the ablation.
        ablation: Rows of the ablation.
    """

    titles: Mapping[str, str]
    panels: Sequence[Task]
    marks: Mapping[str, Sequence[Sequence[str]]]
    costs: Sequence[Task]
    methods: Mapping[str, Sequence[str]]
    ablated: Sequence[Task]
    ablation: Sequence[str]


def first_recorded(task: Task, names: Sequence[str], records: Records) -> str | None:
    """Returns the first of several rows that the task has and that has a record; ``None`` without one."""
    known = {line.name: line for line in task.lines}
    return next((name for name in names if name in known and task.results(known[name], records)), None)


def tasks_in(file: Path) -> list[Task]:
    """Reads the tables that a file describes.

    Args:
        file: YAML: ``tasks``, each with ``title``, ``words``, ``metric``, ``lower``, ``seeds``, ``rates`` (the names of
            rows, each with its learning rates) and ``compared`` (densities, each with the names of the rows without and
            with a moved optimizer), and ``rows``, the words of each.

    Raises:
        ConfigError: If a task has a row that is not described, or lacks one of those that all are measured by, or that
            it compares.
    """
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    return [_task(name, node, content["rows"]) for name, node in content["tasks"].items()]


def excerpts_in(file: Path) -> dict[str, dict[str, Sequence[str]]]:
    """Returns the rows that other pages show, by page and task.

    Args:
        file: File of :func:`tasks_in`, which also contains ``excerpts``.

    Raises:
        ConfigError: If a page refers to a row or table that does not exist.
    """
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    found: dict[str, dict[str, Sequence[str]]] = content["excerpts"]
    for page, tables in found.items():
        for name, rows in tables.items():
            missing = {*rows} - {*content["tasks"].get(name, {"rates": ()})["rates"]}
            if missing:
                raise ConfigError(
                    f"page {page} shows rows that task {name} does not have: {', '.join(sorted(missing))}; add or "
                    "remove them"
                )
    return found


def overview_in(file: Path) -> Overview:
    """Reads the contents of the figure and of the tables of several tasks.

    Args:
        file: File of :func:`tasks_in`, which also contains ``titles``, ``figure``, ``costs`` and ``ablation``.

    Raises:
        ConfigError: If one of them refers to a task or row that does not exist.
    """
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    tasks = {task.name: task for task in tasks_in(file)}
    marks, costs, ablation = content["figure"], content["costs"], content["ablation"]
    _known("task", [*content["titles"], *costs["tasks"], *ablation["tasks"]], tasks, file)
    _known("title", [*costs["tasks"], *ablation["tasks"]], content["titles"], file)
    rows = [row for each in marks.values() for choices in each for row in choices]
    _known("row", [*rows, *(row for each in costs["methods"].values() for row in each)], content["rows"], file)
    ablated = [tasks[name] for name in ablation["tasks"]]
    _known("row of the ablation", ablation["rows"], {line.name for task in ablated for line in task.lines}, file)
    return Overview(
        content["titles"],
        [tasks[name] for name in content["titles"]],
        marks,
        [tasks[name] for name in costs["tasks"]],
        costs["methods"],
        ablated,
        ablation["rows"],
    )


def _known(kind: str, names: Sequence[str], known: Collection[str], file: Path) -> None:
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"{file.name} refers to {kind} {missing[0]!r}, which does not exist; add or remove it")


def _task(name: str, node: Mapping[str, Any], rows: Mapping[str, str]) -> Task:
    compared = [Comparison(density, *pair) for density, pair in node["compared"].items()]
    needed = [DENSE, ALONE, *(row for pair in compared for row in pair[1:] if row is not None)]
    missing = [each for each in dict.fromkeys(needed) if each not in node["rates"]]
    if missing:
        raise ConfigError(f"task {name} is missing rows that its comparisons need: {', '.join(missing)}; add them")
    return Task(
        name,
        node["title"],
        tuple(node["words"].split()),
        node["metric"],
        node["lower"],
        tuple(node["seeds"]),
        tuple(_lines(name, node["rates"], rows)),
        tuple(compared),
    )


def _lines(task: str, rates: Mapping[str, Sequence[float]], rows: Mapping[str, str]) -> Iterator[Line]:
    for row, choices in rates.items():
        if row not in rows:
            raise ConfigError(f"task {task} has an undefined row {row!r}; choose from {', '.join(rows)}")
        yield Line(row, tuple(rows[row].split()), tuple(map(float, choices)))
