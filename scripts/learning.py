"""Measures the learning cost of compression: trains the rows of the tables in scripts/evidence/learning.yaml.

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
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch

from scripts import choices
from scripts.choices import FAILED, FINISHED, answer
from scripts.evidence import overviews
from scripts.evidence.overviews import WORSE, gap, losses_of
from scripts.evidence.plans import ALONE, DENSE, Line, Task, excerpts_in, overview_in, tasks_in
from scripts.exhibits.jobs import Job, Training, complete
from scripts.exhibits.measures import spread
from scripts.exhibits.records import Record, Records, on_record, record, unshippable
from scripts.exhibits.tables import Cell, Row, Table, markdown, replace_section, without_missing
from spardl.basics.errors import ConfigError, SpardlError
from trainer.report import environment

__all__ = ["summary_of", "table_of"]

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
        if not task.results(task.line(each.moved), records):
            continue
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
    losses = losses_of(task, records)
    rows = [Row(line.name, _cells(task, line, found[line.name], losses), ()) for line in lines]
    return Table(task.title, ("", _COLUMNS[0], task.metric, *_COLUMNS[1:]), rows)


def _cells(
    task: Task, line: Line, found: tuple[float, dict[int, Record]] | None, losses: Mapping[str, Mapping[int, float]]
) -> list[Cell]:
    if found is None:
        return [Cell("not run yet"), *[Cell("")] * len(_COLUMNS)]
    rate, records = found
    values = [each.final(task.metric) for each in records.values()]
    closed = gap(line.name, losses)
    ages = [each.figures["residual_age"] for each in records.values() if each.figures.get("residual_age")]
    return [
        Cell(f"{rate:g}"),
        Cell(spread(values)),
        Cell(", ".join(f"{value:.4g}" for value in values)),
        Cell("**worse than a single worker**" if closed == WORSE else closed),
        Cell("0" if line.name == ALONE else f"{mean(each.share for each in records.values()):.2%}"),
        Cell(f"{mean(ages):.0f} steps" if ages else ""),
    ]


ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "scripts" / "evidence" / "learning.yaml"
PAGE, CHOOSING = "docs/tables/learning.md", "docs/choosing-a-method.md"


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
    plan = overview_in(PLANS)
    found[CHOOSING] |= {"costs": overviews.costs(plan, records), "ablation": overviews.ablation(plan, records)}
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
        found = without_missing(table)
        text = replace_section(text, section, f"\n{markdown(found)}" if found.rows else "\nNot trained yet.\n")
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
