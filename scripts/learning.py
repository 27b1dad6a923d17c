"""What compression costs in learning: trains the rows of the tables in scripts/evidence/learning.yaml, and writes them.

python scripts/learning.py                          what is there, and what is missing
python scripts/learning.py --run --jobs 2           trains what is missing, and goes on where it was stopped
python scripts/learning.py --run --only gpt_chars   of one table only
python scripts/learning.py --run --seeds 1          with the first seed only, where hours are few
python scripts/learning.py --write                  writes the pages' tables from the records
python scripts/learning.py --check                  says whether the pages are those of the records

Each row is trained at each of its learning rates with the first seed, and at the best one with the others; those that
all others are measured by (dense, alone, published), and PowerSGD, at each rate with each seed. Every training leaves a
record in docs/results/learning.jsonl, from which any clone makes the tables; its run folder is not needed then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from scripts import choices
from scripts.docs.marked import replace, without_missing
from scripts.docs.settling import add_options, settle
from scripts.evidence.plans import Task, excerpts_in, tasks_in
from scripts.evidence.tables import summary_of, table_of
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.records import Records, on_record, record, unshippable
from scripts.exhibits.tables import Table, markdown
from scripts.exhibits.working import FAILED, FINISHED, answer, complete
from spardl.basics.errors import ConfigError, SpardlError
from trainer.report import environment

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "scripts" / "evidence" / "learning.yaml"
DOCS = ROOT / "docs"
PAGE = DOCS / "tables" / "learning.md"


def missing(task: Task, records: Records) -> list[Training]:
    """The runs of a task that can be done next: those that choose learning rates, and others where a rate is chosen."""
    return [run for run in (*task.first(), *task.rest(records)) if run.command not in records]


def stale(tasks: Sequence[Task], records: Records) -> list[str]:
    """Commands on record that today mean another run, or have other results; takes a second for each few."""
    runs = (run for task in tasks for run in (*task.first(), *task.rest(records)))
    pairs = ((run, records[run.command]) for run in runs if run.command in records)
    return [run.command for run, found in pairs if found.id != run.id or not run.of_today(found.figures)]


def run(tasks: Sequence[Task], path: Path, outputs: Path, jobs: int) -> int:
    """Trains what is missing; returns how many runs failed, which keep no others from being trained."""
    failed: set[str] = set()

    def ended(training: Job, fault: SpardlError | None) -> None:
        try:
            if fault is None and isinstance(training, Training) and (found := training.find(outputs)):
                record(training, found, path)
        except ConfigError as error:  # the code was changed meanwhile
            fault = error
            print(f"error: {error}", file=sys.stderr)
        if fault is not None:
            failed.add(training.command)

    while True:
        records = on_record(path)
        todo = [each for task in tasks for each in missing(task, records) if each.command not in failed]
        for each in todo:  # done, but stopped before it was recorded
            if found := each.find(outputs):
                record(each, found, path)
        if not todo:
            break
        complete(todo, outputs, jobs, ended)
    return len(failed)


def pages(records: Records) -> dict[Path, str]:
    """The pages with the tables of today's records."""
    tasks = {task.name: task for task in tasks_in(PLANS)}
    sections = {PAGE: {name: table_of(task, records) for name, task in tasks.items()}}
    sections[PAGE]["learning"] = summary_of([*tasks.values()], records)
    for page, shown in excerpts_in(PLANS).items():
        excerpts = {name: table_of(tasks[name], records, rows) for name, rows in shown.items()}
        sections.setdefault(DOCS / f"{page}.md", {}).update(excerpts)
    return {path: _written(path.read_text(), tables) for path, tables in sections.items()}


def _written(text: str, tables: Mapping[str, Table]) -> str:
    """A page with today's tables."""
    for section, table in tables.items():
        text = replace(text, section, f"\n{markdown(without_missing(table))}")
    return text


def act(arguments: argparse.Namespace) -> int:
    """Does what the command line asks for.

    Raises:
        ConfigError: for a table that does not exist, trainings that could not be recorded, and fewer seeds of tables
            that are not to be trained.
    """
    if arguments.seeds is not None and not arguments.run:
        raise ConfigError("--seeds says what to train: it goes with --run")
    if arguments.only and arguments.write:
        raise ConfigError("--write makes the tables of both pages: leave out --only")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    tasks = [task.cut(arguments.seeds) for task in tasks_in(PLANS) if arguments.only in (None, task.name)]
    if not tasks:
        raise ConfigError(f"there is no table {arguments.only}; {PLANS.name} has them")
    if arguments.run:
        if reason := unshippable(environment()):
            raise ConfigError(f"trainings would be {reason}, and have no record; commit first")
        with choices.composing():
            return FAILED if run(tasks, arguments.records, arguments.outputs, arguments.jobs) else FINISHED
    records = on_record(arguments.records)
    if arguments.check or arguments.write:
        code = settle(pages(records), "python scripts/learning.py --write", check=arguments.check)
        if arguments.check:
            check(tasks, records)
        return code
    for task in tasks:
        todo = len(missing(task, records))
        print(f"{task.name}: {task.title}{f'; {todo} runs are next' if todo else ''}\n")
        print(markdown(table_of(task, records)), flush=True)
    return FINISHED


def check(tasks: Sequence[Task], records: Records) -> None:
    """Accepts records of runs as they would be made today.

    Raises:
        ConfigError: if they are others.
    """
    with choices.composing():
        if found := stale(tasks, records):
            raise ConfigError(f"{len(found)} records are of other runs than their commands today: {found[0]}")


def main() -> int:
    """Does what the command line asks for.

    Returns:
        The exit code: 1 if a training failed, or a page is to be made again.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "the pages", run="train what is missing")
    parser.add_argument("--only", help="name of a table (default: all)")
    parser.add_argument("--seeds", type=int, help="how many of each task's seeds to train (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "docs" / "results" / "learning.jsonl", help="file of the records"
    )
    torch.set_num_threads(1)
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
