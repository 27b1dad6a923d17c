"""Makes tables and figures of the papers anew, each with one command.

python scripts/reproduce.py --list
python scripts/reproduce.py spardl.residuals --scale smoke
python scripts/reproduce.py spardl.residuals --scale laptop --jobs 2
python scripts/reproduce.py all --scale smoke
python scripts/reproduce.py spardl.residuals --scale smoke --explain GRES

Work that was done before is found by its id and not done again; what was interrupted goes on; what failed is tried
again, and shows in the table with its reason if it fails once more. Tables go to --report as Markdown, CSV, LaTeX and
HTML, figures as PNG and PDF; index.html there shows all exhibits that were ever made into that folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import choices
import torch
from exhibits import dear, oktopk, sketch_fusion, study
from exhibits import spardl as spardl_paper
from exhibits.base import SCALES, Exhibit, Results
from exhibits.claims_of import claims_section, judge_all
from exhibits.jobs import Job
from exhibits.page import Section
from exhibits.sections import add, exhibit_section, key, sources
from exhibits.tables import Row, Table, markdown
from exhibits.writing import write
from hydra.core.global_hydra import GlobalHydra

from spardl.errors import ConfigError, SpardlError
from spardl.training.processes import run_each

FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
EVERYTHING, CLAIMS = "all", "claims"
PAPERS = (spardl_paper, oktopk, study, dear, sketch_fusion)


def catalogue() -> Mapping[str, Exhibit]:
    """All exhibits by name."""
    return {exhibit.name: exhibit for paper in PAPERS for exhibit in paper.EXHIBITS}


def papers() -> Mapping[str, str]:
    """The paper of each exhibit, by the exhibit's name."""
    return {exhibit.name: str(paper.__doc__).strip() for paper in PAPERS for exhibit in paper.EXHIBITS}


def chosen(names: Sequence[str]) -> list[Exhibit]:
    """The exhibits of these names.

    Raises:
        ConfigError: there is no such exhibit.
    """
    known = catalogue()
    for name in names:
        if name not in known and name != EVERYTHING:
            raise ConfigError(f"there is no exhibit {name}; choose from {', '.join(known)}, or all")
    return list(known.values()) if EVERYTHING in names else [known[name] for name in dict.fromkeys(names)]


def describe(exhibit: Exhibit) -> str:
    """What --list says of an exhibit."""
    costs = "; ".join(f"{scale}: {exhibit.cost(scale)}" for scale in SCALES)
    return f"{exhibit.name}: {exhibit.title}\n  source: {exhibit.source}\n  shows: {exhibit.shows}\n  cost: {costs}"


def complete(jobs: Sequence[Job], outputs: Path, at_once: int) -> None:
    """Does the work of which there is no result yet, and says how it goes; what must run alone comes last."""
    missing = [job for job in jobs if job.find(outputs) is None]
    if not missing:
        return
    outputs.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {len(jobs)} jobs to do", flush=True)
    began, done = time.perf_counter(), 0

    def ended(job: Job, fault: SpardlError | None) -> None:
        nonlocal done
        done += 1
        job.note(outputs, fault)
        left = (time.perf_counter() - began) / done * (len(missing) - done)
        how = "done" if fault is None else f"failed: {fault}"
        print(f"[{done}/{len(missing)}, {left:.0f} s left] {job.command}: {how}", flush=True)

    _import_once()
    _perform([job for job in missing if not job.alone], outputs, at_once, ended)
    _perform([job for job in missing if job.alone], outputs, 1, ended)


def _perform(
    jobs: Sequence[Job], outputs: Path, at_once: int, ended: Callable[[Job, SpardlError | None], None]
) -> None:
    def work(number: int, heartbeat: Callable[[int], None]) -> None:
        GlobalHydra.instance().clear()  # this process composes configurations; train.py wants to do so itself
        jobs[number].perform(outputs)

    if jobs:
        run_each(len(jobs), work, outputs / "logs", at_once, lambda number, fault: ended(jobs[number], fault))


def _import_once() -> None:
    """Loads what every training would load: seconds in each of the processes that are forked from this one."""
    import sklearn.datasets  # noqa: F401, PLC0415
    import torch._dynamo  # noqa: F401, PLC0415


def report(
    exhibits: Sequence[Exhibit], scale: str, results: Results, folder: Path, judged: Sequence[Section] = ()
) -> Path:
    """Adds exhibits, and what was judged, to the report, and returns its page; claims come first on it."""
    groups = papers()
    sections = [exhibit_section(exhibit, groups[exhibit.name], scale, results) for exhibit in exhibits]
    return add(folder, [*judged, *sections], [key(name, each) for name in (CLAIMS, *groups) for each in SCALES])


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
    for source in sources(row, results):
        lines += [f"  {source.command}", f"    {source.state}"]
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
    judged: list[Section] = []
    with choices.composing():
        if arguments.explain:
            for exhibit in exhibits:
                print(explain(exhibit, arguments.scale, arguments.explain, arguments.outputs))
            return FINISHED
        jobs = list(dict.fromkeys(job for exhibit in exhibits for job in exhibit.jobs(arguments.scale)))
        complete(jobs, arguments.outputs, arguments.jobs)
        results = Results.on_disk(arguments.outputs, jobs)
        if EVERYTHING in arguments.exhibits:
            judgements = judge_all(catalogue(), arguments.scale, arguments.outputs)
            judged = [claims_section(judgements, arguments.scale, arguments.outputs)]
    for exhibit in exhibits:
        for table in write(exhibit, arguments.scale, results, arguments.report):
            print(f"\n{table.title}\n\n{markdown(table)}", flush=True)
    print(f"report: {report(exhibits, arguments.scale, results, arguments.report, judged)}", flush=True)
    failed = sum(results.of(job).reason is not None for job in jobs)
    if failed:
        print(f"error: {failed} jobs failed; their reasons are in the tables", file=sys.stderr)
    return FAILED if failed else FINISHED


if __name__ == "__main__":
    sys.exit(main())
