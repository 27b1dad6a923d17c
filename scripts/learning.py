"""Measures the learning cost of compression: trains the rows of the tables in scripts/learning.yaml.

python scripts/learning.py                          print the tables and the number of missing runs
python scripts/learning.py --run --jobs 2           train missing runs; an interrupted command continues
python scripts/learning.py --run --only gpt_chars   train the runs of one table
python scripts/learning.py --run --seeds 1          train with the first seed only
python scripts/learning.py --check                  check that all records are of the runs of today's commands

Each row is trained at each of its learning rates with the first seed, and at the best rate with the other seeds. The
references (dense, alone, published) and PowerSGD are trained at each rate with each seed. Every training leaves a
record in docs/results/learning.jsonl, from which scripts/docs.py makes the tables of the pages in any clone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from scripts import choices
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.measures import spread
from scripts.exhibits.records import Record, Records, on_record, record, unshippable
from scripts.exhibits.tables import Cell, Row, Table, markdown
from scripts.exhibits.working import FAILED, FINISHED, answer, complete
from scripts.pages.marked import replace, without_missing
from spardl.basics.errors import ConfigError, SpardlError
from trainer.report import environment

__all__ = ["Comparison", "Line", "Task", "excerpts_in", "summary_of", "table_of", "tasks_in"]

# The rows that all others are measured by: the ceiling and the floor.
DENSE, ALONE = "dense", "alone"
# A first seed that happens to bear a high rate is no ground to judge a reference or a rival by.
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
        return with_changes(self, seeds=self.seeds[:seeds])

    def training(self, line: Line, rate: float, seed: int) -> Training:
        """Returns the training of a row with a learning rate and a seed."""
        return Training((*self.words, *line.words, f"optimizer.lr={rate:g}", f"seed={seed}"))

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
    return [_task(name, content["rows"], **node) for name, node in content["tasks"].items()]


def excerpts_in(file: Path) -> dict[str, dict[str, Sequence[str]]]:
    """Returns the rows that other pages show, by page and task.

    Args:
        file: File of :func:`tasks_in`, which also contains ``excerpts``.

    Raises:
        ConfigError: If a page refers to a row or table that does not exist.
    """
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    found: dict[str, dict[str, Sequence[str]]] = content["excerpts"]
    for page_name, name, rows in ((page_name, *pair) for page_name, tables in found.items() for pair in tables.items()):
        if missing_rows := {*rows} - {*content["tasks"].get(name, {"rates": ()})["rates"]}:
            raise ConfigError(
                f"page {page_name} shows rows that task {name} does not have: {', '.join(sorted(missing_rows))}; add "
                "or remove them"
            )
    return found


def _task(name: str, described: Mapping[str, str], words: str, rates: Any, compared: Any, **node: Any) -> Task:
    pairs = tuple(Comparison(density, *pair) for density, pair in compared.items())
    needed = [DENSE, ALONE, *(row for pair in pairs for row in pair[1:] if row is not None)]
    if lacking := [each for each in dict.fromkeys(needed) if each not in rates]:
        raise ConfigError(f"task {name} is missing rows that its comparisons need: {', '.join(lacking)}; add them")
    if unknown := [row for row in rates if row not in described]:
        raise ConfigError(f"task {name} has an undefined row {unknown[0]!r}; choose from {', '.join(described)}")
    lines = tuple(Line(row, tuple(described[row].split()), tuple(map(float, found))) for row, found in rates.items())
    return Task(
        name=name, words=tuple(words.split()), lines=lines, compared=pairs, **{**node, "seeds": tuple(node["seeds"])}
    )


_COLUMNS = ("lr", "of each seed", "gap closed", "sent / dense", "waits")


def summary_of(tasks: Sequence[Task], records: Records) -> Table:
    """Returns the learning cost of each density and optimizer, with and without local updates.

    Args:
        tasks: Tasks that contain comparisons.
        records: Records of all trainings.
    """
    columns = ("training", "sent", DENSE, "without", "with `optimizer=`", "single worker")
    return Table("What compression costs", columns, [row for task in tasks for row in _compared(task, records)])


def _compared(task: Task, records: Records) -> Iterator[Row]:
    for each in task.compared:
        names = (DENSE, each.without, each.moved, ALONE)
        yield Row(task.title, [Cell(each.density), *(_mean(task, name, records) for name in names)], ())


def _mean(task: Task, name: str | None, records: Records) -> Cell:
    """Returns the metric of a row over its seeds."""
    if name is None:
        return Cell("")
    found = task.results(task.line(name), records)
    return Cell(spread([each.final(task.metric) for each in found[1].values()]) if found else "not run yet")


def table_of(task: Task, records: Records, shown: Sequence[str] | None = None) -> Table:
    """Returns the table of a task with the recorded results.

    Args:
        task: Task of the table.
        records: Records of all trainings.
        shown: Names of the rows in order (default: all rows).
    """
    lines = task.lines if shown is None else [task.line(name) for name in shown]
    found = {line.name: task.results(line, records) for line in task.lines}
    losses = {name: {seed: task.loss(each) for seed, each in pair[1].items()} for name, pair in found.items() if pair}
    rows = [Row(line.name, _cells(task, line, found[line.name], losses), ()) for line in lines]
    return Table(task.title, ("", _COLUMNS[0], task.metric, *_COLUMNS[1:]), rows)


def _cells(
    task: Task, line: Line, found: tuple[float, dict[int, Record]] | None, losses: Mapping[str, Mapping[int, float]]
) -> list[Cell]:
    if found is None:
        return [Cell("not run yet"), *[Cell("")] * len(_COLUMNS)]
    rate, records = found
    values = [each.final(task.metric) for each in records.values()]
    ages = [each.figures["residual_age"] for each in records.values() if each.figures.get("residual_age")]
    return [
        Cell(f"{rate:g}"),
        Cell(spread(values)),
        Cell(", ".join(f"{value:.4g}" for value in values)),
        Cell(_gap(line.name, losses)),
        Cell("0" if line.name == ALONE else f"{mean(each.share for each in records.values()):.2%}"),
        Cell(f"{mean(ages):.0f} steps" if ages else ""),
    ]


def _gap(name: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    """Share of the gain of dense training over a single worker that a row reaches, on the seeds that all three have."""
    if name in (ALONE, DENSE) or not {DENSE, ALONE} <= losses.keys():
        return ""
    seeds = set.intersection(*(set(losses[each]) for each in (name, DENSE, ALONE)))
    if not seeds:
        return ""
    own, dense, alone = (mean(losses[each][seed] for seed in seeds) for each in (name, DENSE, ALONE))
    if own > alone:
        return "**worse than a single worker**"
    gain = alone - dense
    return f"{(alone - own) / gain:.0%}" if gain > 0 and math.isfinite(gain) else ""


ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "scripts" / "learning.yaml"
PAGE = "docs/tables/learning.md"


def missing(task: Task, records: Records) -> list[Training]:
    """Runs of a task that can be trained next; runs at the best learning rate need those that choose it."""
    return [run for run in (*task.first(), *task.rest(records)) if run.command not in records]


def stale(tasks: Sequence[Task], records: Records) -> list[str]:
    """Recorded commands that now stand for another run or give other results; composes every configuration."""
    runs = (run for task in tasks for run in (*task.first(), *task.rest(records)))
    pairs = ((run, records[run.command]) for run in runs if run.command in records)
    return [run.command for run, found in pairs if found.id != run.id or not run.of_today(found.figures)]


def run(tasks: Sequence[Task], path: Path, outputs: Path, jobs: int) -> int:
    """Trains missing runs, whether or not others fail.

    Args:
        tasks: Tasks to train.
        path: File of the records.
        outputs: Folder of the runs.
        jobs: Number of trainings at a time.

    Returns:
        The number of failed runs.
    """
    failed: set[str] = set()

    def ended(training: Job, fault: SpardlError | None) -> None:
        try:
            if fault is None and isinstance(training, Training) and (found := training.find(outputs)):
                record(training, found, path)
        except ConfigError as error:  # the working tree changed during the training
            fault = error
            print(f"error: {error}", file=sys.stderr)
        if fault is not None:
            failed.add(training.command)

    while True:
        records = on_record(path)
        todo = [each for task in tasks for each in missing(task, records) if each.command not in failed]
        for each in todo:  # finished, but interrupted before it was recorded
            if found := each.find(outputs):
                record(each, found, path)
        if not todo:
            break
        complete(todo, outputs, jobs, ended)
    return len(failed)


def sections(records: Records) -> dict[str, dict[str, Table]]:
    """Returns the tables of each page by section, from the current records; pages by their paths in the repository."""
    tasks = {task.name: task for task in tasks_in(PLANS)}
    found = {PAGE: {name: table_of(task, records) for name, task in tasks.items()}}
    found[PAGE]["learning"] = summary_of([*tasks.values()], records)
    for page_name, shown in excerpts_in(PLANS).items():
        excerpts = {name: table_of(tasks[name], records, rows) for name, rows in shown.items()}
        found.setdefault(f"docs/{page_name}.md", {}).update(excerpts)
    return found


def page(name: str, text: str, records: Records) -> str:
    """Returns a page with its tables replaced.

    Args:
        name: Path of the page in the repository.
        text: Text of the page.
        records: Records of all trainings.

    Raises:
        ConfigError: If the page lacks a section.
    """
    for section, table in sections(records)[name].items():
        text = replace(text, section, f"\n{markdown(without_missing(table))}")
    return text


def act(arguments: argparse.Namespace) -> int:
    """Trains, checks the records or prints.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a table does not exist, trainings could not be recorded, or options exclude each other.
    """
    if arguments.seeds is not None and not arguments.run:
        raise ConfigError("--seeds has no effect without --run; add --run or remove --seeds")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    tasks = [task.cut(arguments.seeds) for task in tasks_in(PLANS) if arguments.only in (None, task.name)]
    if not tasks:
        raise ConfigError(f"table {arguments.only!r} does not exist; choose one from {PLANS.name}")
    if arguments.run:
        if reason := unshippable(environment()):
            raise ConfigError(f"trainings cannot be recorded, because they would be {reason}; commit first")
        with choices.composing():
            return FAILED if run(tasks, arguments.records, arguments.outputs, arguments.jobs) else FINISHED
    records = on_record(arguments.records)
    if arguments.check:
        check(tasks, records)
        return FINISHED
    for task in tasks:
        todo = len(missing(task, records))
        print(f"{task.name}: {task.title}{f'; {todo} runs missing' if todo else ''}\n")
        print(markdown(table_of(task, records)), flush=True)
    return FINISHED


def check(tasks: Sequence[Task], records: Records) -> None:
    """Checks that all records are of the runs that their commands now stand for.

    Raises:
        ConfigError: If some are not.
    """
    with choices.composing():
        if found := stale(tasks, records):
            raise ConfigError(
                f"{len(found)} recorded commands no longer describe their runs (first: {found[0]}); record them again"
            )


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if a training failed, 2 if a record is of another run.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--run", action="store_true", help="train missing runs")
    doing.add_argument(
        "--check", action="store_true", help="check that all records are of the runs of today's commands"
    )
    parser.add_argument("--only", help="name of a table (default: all)")
    parser.add_argument("--seeds", type=int, help="number of seeds to train (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "docs" / "results" / "learning.jsonl", help="file of the records"
    )
    torch.set_num_threads(1)
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
