"""Makes tables and figures of the papers anew, each with one command.

python scripts/reproduce.py --list
python scripts/reproduce.py spardl.residuals --scale smoke
python scripts/reproduce.py spardl.residuals --scale laptop --jobs 2
python scripts/reproduce.py all --scale smoke
python scripts/reproduce.py spardl.residuals --scale smoke --explain GRES

Work that was done before is found by its id and not done again; what was interrupted goes on; what failed is tried
again, and shows in the table with its reason if it fails once more. Tables go to --report as Markdown, CSV and LaTeX,
figures as PNG and PDF.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import choices
import torch
from exhibits import dear, oktopk, sketch_fusion
from exhibits import spardl as spardl_paper
from exhibits.base import SCALES, Exhibit, Results
from exhibits.jobs import Job
from exhibits.tables import WRITERS, Row, Table, markdown
from hydra.core.global_hydra import GlobalHydra

from spardl.errors import ConfigError, SpardlError
from spardl.files import write_atomically
from spardl.training.processes import run_each

FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def catalogue() -> Mapping[str, Exhibit]:
    """All exhibits by name."""
    papers = (spardl_paper, oktopk, dear, sketch_fusion)
    return {exhibit.name: exhibit for paper in papers for exhibit in paper.EXHIBITS}


def chosen(names: Sequence[str]) -> list[Exhibit]:
    """The exhibits of these names.

    Raises:
        ConfigError: there is no such exhibit.
    """
    known = catalogue()
    for name in names:
        if name not in known and name != "all":
            raise ConfigError(f"there is no exhibit {name}; choose from {', '.join(known)}, or all")
    return list(known.values()) if "all" in names else [known[name] for name in dict.fromkeys(names)]


def describe(exhibit: Exhibit) -> str:
    """What --list says of an exhibit."""
    costs = "; ".join(f"{scale}: {exhibit.cost(scale)}" for scale in SCALES)
    return f"{exhibit.name}: {exhibit.title}\n  source: {exhibit.source}\n  shows: {exhibit.shows}\n  cost: {costs}"


def complete(jobs: Sequence[Job], outputs: Path, at_once: int) -> None:
    """Does the work of which there is no result yet, and says how it goes."""
    missing = [job for job in jobs if job.find(outputs) is None]
    if not missing:
        return
    outputs.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {len(jobs)} jobs to do", flush=True)
    began, done = time.perf_counter(), 0

    def ended(number: int, fault: SpardlError | None) -> None:
        nonlocal done
        done += 1
        missing[number].note(outputs, fault)
        left = (time.perf_counter() - began) / done * (len(missing) - done)
        how = "done" if fault is None else f"failed: {fault}"
        print(f"[{done}/{len(missing)}, {left:.0f} s left] {missing[number].command}: {how}", flush=True)

    _import_once()

    def work(number: int, heartbeat: Callable[[int], None]) -> None:
        GlobalHydra.instance().clear()  # this process composes configurations; train.py wants to do so itself
        missing[number].perform(outputs)

    run_each(len(missing), work, outputs / "logs", at_once, ended)


def _import_once() -> None:
    """Loads what every training would load: seconds in each of the processes that are forked from this one."""
    import sklearn.datasets  # noqa: F401, PLC0415
    import torch._dynamo  # noqa: F401, PLC0415


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes an exhibit's tables and figures."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = exhibit.tables(scale, results)
    for number, table in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(table).encode())
    draw(exhibit, scale, results, folder)
    return tables


def draw(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> None:
    """Draws an exhibit's figures as PNG and PDF."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    for picture in exhibit.pictures(scale, results):
        figure = Figure(figsize=(7, 4), layout="constrained")
        picture.draw(figure)
        for ending in ("png", "pdf"):
            figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.name}.{ending}", dpi=130)


def explain(exhibit: Exhibit, scale: str, name: str, outputs: Path) -> str:
    """Where a row's figures come from.

    Raises:
        ConfigError: the exhibit has no such row.
    """
    results = Results.on_disk(outputs, exhibit.jobs(scale))
    tables = exhibit.tables(scale, results)
    rows = [(table, row) for table in tables for row in table.rows if row.name == name]
    if not rows:
        names = ", ".join(dict.fromkeys(row.name for table in tables for row in table.rows))
        raise ConfigError(f"{exhibit.name} has no row {name}; its rows are {names}")
    return "\n".join(_explain_row(table, row, results) for table, row in rows)


def _explain_row(table: Table, row: Row, results: Results) -> str:
    lines = [f"{table.title}, {row.name}:"]
    for job in row.jobs:
        outcome = results.of(job)
        state = f"failed: {outcome.reason}; see {outcome.where}" if outcome.reason else outcome.where
        lines += [f"  {job.command}", f"    {state}"]
    return "\n".join(lines)


def main() -> int:
    """Does what the command line asks for.

    Returns:
        The exit code: 1 if some work failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exhibits", nargs="*", help="names, or all")
    parser.add_argument("--list", action="store_true", help="name all exhibits")
    parser.add_argument("--scale", choices=SCALES, default="smoke", help="how much work (default: smoke)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder of the tables (default: report)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--explain", metavar="ROW", help="say where a row's figures come from, and do nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        return act(arguments)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def act(arguments: argparse.Namespace) -> int:
    """Lists, explains or reproduces.

    Raises:
        ConfigError: for names that do not exist, or nothing to do it with.
    """
    if arguments.list:
        print("\n".join(map(describe, catalogue().values())))
        return FINISHED
    if not arguments.exhibits:
        raise ConfigError("name an exhibit, or all; --list names them")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    exhibits = chosen(arguments.exhibits)
    with choices.composing():
        if arguments.explain:
            for exhibit in exhibits:
                print(explain(exhibit, arguments.scale, arguments.explain, arguments.outputs))
            return FINISHED
        jobs = list(dict.fromkeys(job for exhibit in exhibits for job in exhibit.jobs(arguments.scale)))
        complete(jobs, arguments.outputs, arguments.jobs)
        results = Results.on_disk(arguments.outputs, jobs)
    for exhibit in exhibits:
        for table in write(exhibit, arguments.scale, results, arguments.report):
            print(f"\n{table.title}\n\n{markdown(table)}", flush=True)
    failed = sum(results.of(job).reason is not None for job in jobs)
    if failed:
        print(f"error: {failed} jobs failed; their reasons are in the tables", file=sys.stderr)
    return FAILED if failed else FINISHED


if __name__ == "__main__":
    sys.exit(main())
