"""Reproduces tables and figures of the papers, each with one command.

python scripts/reproduce.py --list
python scripts/reproduce.py spardl.residuals --scale smoke
python scripts/reproduce.py spardl.residuals --scale laptop --jobs 2
python scripts/reproduce.py all --scale smoke
python scripts/reproduce.py spardl.residuals --scale smoke --explain GRES
python scripts/reproduce.py all --scale evening --record
python scripts/reproduce.py all --scale evening --done

Finished jobs are found by their id and not repeated: in --outputs, otherwise in the records of --records, which are in
the repository, so that a clone has tables and figures without training. --own ignores records. --record adds the jobs
done here to the records. --done runs nothing and shows the available results. Interrupted jobs continue; failed jobs
are retried, and the table gives the reason if they fail again. Jobs that need a cluster (--scale paper) do not run
here: the commands that submit them to Slurm are printed, and their results are found afterwards. Tables are written to
--report as Markdown, CSV, LaTeX and HTML, figures as PNG and PDF; index.html shows the exhibits of the command. Rows
that were not run are left out of the tables and listed once, with the time they need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts import choices
from scripts.choices import FAILED, FINISHED, answer
from scripts.exhibits.base import SCALES, Exhibit, Results
from scripts.exhibits.catalogue import catalogue, papers, published_table
from scripts.exhibits.charts.style import check_drawing
from scripts.exhibits.claims.catalogue import claims_section, judge_all
from scripts.exhibits.claims.judging import Judgement
from scripts.exhibits.jobs import Job, complete, write_arrays
from scripts.exhibits.pages import exhibit_section, here, page, sources, summary, unrun_table, write
from scripts.exhibits.records import SHIPPED, RecordStore, unshippable
from scripts.exhibits.tables import Table, markdown
from spardl.basics.errors import ConfigError, SpardlError
from spardl.basics.files import write_atomically

EVERYTHING = "all"
TITLE = "Reproduced tables and figures"
LEAD = (
    "Claims of the papers, our figures, and verdicts by rule. Below, every figure lists its runs and states what was "
    "simulated, measured or assumed. A cell with \u2717 marks a failure."
)


def chosen(names: Sequence[str], seeds: int | None = None) -> list[Exhibit]:
    """Returns the exhibits with these names, or all of them, with a number of seeds if one is given.

    Raises:
        ConfigError: If an exhibit does not exist or has no seeds to choose.
    """
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    known = catalogue()
    for name in names:
        if name not in known and name != EVERYTHING:
            raise ConfigError(f"exhibit {name!r} does not exist; choose from {', '.join(known)}, or all")
    found = list(known.values()) if EVERYTHING in names else [known[name] for name in dict.fromkeys(names)]
    return found if seeds is None else [exhibit.with_seeds(seeds) for exhibit in found]


def describe(exhibit: Exhibit) -> str:
    """Returns the entry of an exhibit in --list."""
    same = {scale: exhibit.same_as(scale) for scale in SCALES}
    costs = (f"{scale}: {f'as {other}' if other else exhibit.cost(scale)}" for scale, other in same.items())
    return (
        f"{exhibit.name}: {exhibit.title}\n  source: {exhibit.source}\n  shows: {exhibit.shows}\n"
        f"  cost: {'; '.join(costs)}"
    )


def report(
    exhibits: Sequence[Exhibit],
    scale: str,
    results: Results,
    folder: Path,
    judgements: Sequence[Judgement] = (),
    unrun: Sequence[Table] = (),
) -> Path:
    """Writes the page of exhibits, claims and jobs that were not run into a folder, and returns its path."""
    known = {exhibit.name: exhibit for exhibit in exhibits}
    places = [(name, paper) for name, paper in papers().items() if name in known]
    sections = [exhibit_section(known[name], paper, scale, results) for name, paper in places]
    claims = [claims_section(judgements, scale, results)] if judgements else []
    found, contents = summary(sections, judgements, unrun, claims[0].key if claims else "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    write_atomically(path, page(TITLE, LEAD, here(), [*claims, *sections], found, contents).encode())
    return path


def explain(exhibit: Exhibit, scale: str, name: str, outputs: Path, store: RecordStore | None = None) -> str:
    """Returns the command and folder or record behind a row; raises ConfigError if the exhibit has no such row."""
    results = Results.on_disk(outputs, exhibit.jobs(scale), store)
    rows = [(table, row) for table in exhibit.tables(scale, results) for row in table.rows]
    lines = list[str]()
    for table, row in rows:
        if row.name == name:
            lines.append(f"{table.title}, {name}:")
            for source in sources(row, results):
                lines += [f"  {source.command}", f"    {source.state}"]
    if not lines:
        names = ", ".join(dict.fromkeys(row.name for _, row in rows))
        raise ConfigError(f"{exhibit.name} has no row {name!r}; choose from {names}")
    return "\n".join(lines)


def keep(jobs: Sequence[Job], outputs: Path, store: RecordStore, scale: str) -> bool:
    """Records the jobs that were done here in the file of a size; returns whether all of them could be recorded."""
    done = {job.id: (job, found) for job in jobs if (found := job.find(outputs))}
    refused = {found.where: reason for _, found in done.values() if (reason := unshippable(found.made))}
    for job, found in done.values():
        if found.where not in refused:
            store.keep(job, found, scale)
    print(f"recorded: {len(done) - len(refused)} jobs in {store.folder}", flush=True)
    if refused:
        names, reasons = " ".join(map(str, refused)), "; ".join(sorted(set(refused.values())))
        print(
            f"error: not recorded, because they were {reasons}; commit, delete them and run them again: {names}",
            file=sys.stderr,
        )
    return not refused


def main() -> int:
    """Runs the command line; the exit code is 1 if a job failed or could not be recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exhibits", nargs="*", help="names of exhibits, or all")
    parser.add_argument("--list", action="store_true", help="list all exhibits")
    parser.add_argument("--scale", choices=SCALES, default="smoke", help="size of the runs (default: smoke)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument("--records", type=Path, default=SHIPPED, help=f"folder of the records (default: {SHIPPED})")
    parser.add_argument("--own", action="store_true", help="ignore records and run all jobs here")
    parser.add_argument("--record", action="store_true", help="add the jobs done here to the records")
    parser.add_argument("--done", action="store_true", help="run nothing and show the available results")
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder of the tables (default: report)")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: that of each exhibit)")
    parser.add_argument("--explain", metavar="ROW", help="print where the figures of a row come from")
    torch.set_num_threads(1)
    return answer(act, parser.parse_args())


def act(arguments: argparse.Namespace) -> int:
    """Lists, explains or reproduces, and returns the exit code.

    Raises:
        ConfigError: If a name does not exist, or options exclude each other.
    """
    if arguments.list:
        print("\n".join(map(describe, catalogue().values())))
        return FINISHED
    if not arguments.exhibits:
        raise ConfigError("no exhibit given; name one, or all (--list prints them)")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    exhibits = chosen(arguments.exhibits, arguments.seeds)
    records = RecordStore(arguments.records)
    store = None if arguments.own else records
    judgements, published, recorded = list[Judgement](), None, True

    def ended(job: Job, fault: SpardlError | None) -> None:
        """Records each job when it ends, so that an interruption loses nothing."""
        found = None if fault or not arguments.record else job.find(arguments.outputs)
        if found and unshippable(found.made) is None:  # the others are listed at the end
            records.keep(job, found, arguments.scale)

    with choices.composing():
        if arguments.explain:
            for exhibit in exhibits:
                print(explain(exhibit, arguments.scale, arguments.explain, arguments.outputs, store))
            return FINISHED
        check_drawing()
        jobs = list(dict.fromkeys(job for exhibit in exhibits for job in exhibit.jobs(arguments.scale)))
        todo = [job for job in jobs if store is None or store.find(job) is None]
        if len(todo) < len(jobs):
            print(f"{len(jobs) - len(todo)} of {len(jobs)} jobs are on record", flush=True)
        elsewhere = [] if arguments.done else complete(todo, arguments.outputs, arguments.jobs, ended)
        commands = write_arrays(elsewhere, arguments.outputs, arguments.report, f"trainings-{arguments.scale}")
        results = Results.on_disk(arguments.outputs, jobs, store)
        if arguments.record:
            recorded = keep(jobs, arguments.outputs, records, arguments.scale)
        if EVERYTHING in arguments.exhibits:
            every = {exhibit.name: exhibit for exhibit in exhibits}
            judgements, published = judge_all(every, arguments.scale, results), published_table(every)
    tables = [table for exhibit in exhibits for table in write(exhibit, arguments.scale, results, arguments.report)]
    unrun = [each for each in (unrun_table(exhibits, arguments.scale, results), published) if each]
    for table in (*tables, *unrun):
        print(f"\n{table.title}\n\n{markdown(table)}", flush=True)
    for command in commands:
        print(f"for a cluster: {command}", flush=True)
    print(f"report: {report(exhibits, arguments.scale, results, arguments.report, judgements, unrun)}", flush=True)
    pending = {job.id for job in elsewhere} | {job.id for job in jobs if arguments.done and not results.of(job).started}
    failed = sum(results.of(job).reason is not None for job in jobs if job.id not in pending)
    if failed:
        print(f"error: {failed} jobs failed; see the tables for reasons", file=sys.stderr)
    return FAILED if failed or not recorded else FINISHED


if __name__ == "__main__":
    sys.exit(main())
