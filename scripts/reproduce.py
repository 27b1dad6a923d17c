"""Makes tables and figures of the papers anew, each with one command.

python scripts/reproduce.py --list
python scripts/reproduce.py spardl.residuals --scale smoke
python scripts/reproduce.py spardl.residuals --scale laptop --jobs 2
python scripts/reproduce.py all --scale smoke
python scripts/reproduce.py spardl.residuals --scale smoke --explain GRES
python scripts/reproduce.py all --scale evening --record
python scripts/reproduce.py all --scale evening --done
python scripts/reproduce.py spardl.breakdown --scale laptop --profile vgg16=vgg16.json

Work that was done before is found by its id and not done again: in --outputs, else among the records of --records,
which are in the repository, so that a clone has tables and figures without any training; --own does all work here.
--record adds what was done here to the records. --done works no more, and shows what there is. --profile MODEL=FILE has
passes that scripts/profile_model.py measured in place of assumed ones. What was interrupted goes on; what failed is
tried again, and shows in the table with its reason if it fails once more. What takes a cluster (--scale paper) is not
done here: the commands that submit it to Slurm are printed, and its results are found afterwards. Tables go to --report
as Markdown, CSV, LaTeX and HTML, figures as PNG and PDF; index.html there shows all exhibits that were ever made into
that folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from scripts import choices
from scripts.exhibits.base import SCALES, Exhibit, Results
from scripts.exhibits.charts.axes import check_drawing
from scripts.exhibits.claims.catalogue import claims_section, judge_all
from scripts.exhibits.jobs import Job
from scripts.exhibits.pages.page import Section
from scripts.exhibits.pages.sections import add, exhibit_section, key, sources
from scripts.exhibits.pages.writing import write
from scripts.exhibits.papers.catalogue import catalogue, papers
from scripts.exhibits.passes import MeasuredPasses, read_passes, said_of
from scripts.exhibits.records import SHIPPED, RecordStore, unshippable
from scripts.exhibits.slurm_arrays import write_arrays
from scripts.exhibits.tables import Row, Table, markdown
from scripts.exhibits.working import FAILED, FINISHED, Ended, answer, complete, nothing
from spardl.basics.errors import ConfigError, SpardlError

EVERYTHING, CLAIMS = "all", "claims"


def chosen(names: Sequence[str], seeds: int | None = None) -> list[Exhibit]:
    """The exhibits of these names.

    Args:
        names: of exhibits, or all.
        seeds: how many; ``None``: as many as each has.

    Raises:
        ConfigError: there is no such exhibit, or it has no seeds to choose.
    """
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    known = catalogue()
    for name in names:
        if name not in known and name != EVERYTHING:
            raise ConfigError(f"there is no exhibit {name}; choose from {', '.join(known)}, or all")
    found = list(known.values()) if EVERYTHING in names else [known[name] for name in dict.fromkeys(names)]
    return found if seeds is None else [exhibit.with_seeds(seeds) for exhibit in found]


def measured(exhibits: Sequence[Exhibit], scale: str, given: Mapping[str, MeasuredPasses]) -> list[Exhibit]:
    """The exhibits with measured passes in place of assumed ones; says of each what that changes.

    Args:
        exhibits: that are asked for.
        scale: of the work.
        given: by model.

    Raises:
        ConfigError: none of them assumes the passes of a model that is given, or it is of another size.
    """
    if not given:
        return list(exhibits)
    assumed = {exhibit.name: exhibit.assumes(scale) for exhibit in exhibits}
    known = sorted({model for models in assumed.values() for model in models})
    for model in given:
        if model not in known:
            those = f"they assume those of {', '.join(known)}" if known else "they assume none"
            raise ConfigError(f"--profile {model}: no exhibit that was named assumes its passes at {scale}; {those}")
    for name, models in assumed.items():
        print(said_of(name, models, given), flush=True)
    return [exhibit.with_passes(given) for exhibit in exhibits]


def describe(exhibit: Exhibit) -> str:
    """What --list says of an exhibit."""
    costs = "; ".join(f"{scale}: {_cost(exhibit, scale)}" for scale in SCALES)
    return f"{exhibit.name}: {exhibit.title}\n  source: {exhibit.source}\n  shows: {exhibit.shows}\n  cost: {costs}"


def _cost(exhibit: Exhibit, scale: str) -> str:
    other = exhibit.same_as(scale)
    return f"as {other}" if other else exhibit.cost(scale)


def report(
    exhibits: Sequence[Exhibit], scale: str, results: Results, folder: Path, judged: Sequence[Section] = ()
) -> Path:
    """Adds exhibits, and what was judged, to the report, and returns its page; claims come first on it."""
    groups = papers()
    sections = [exhibit_section(exhibit, groups[exhibit.name], scale, results) for exhibit in exhibits]
    return add(folder, [*judged, *sections], [key(name, each) for name in (CLAIMS, *groups) for each in SCALES])


def explain(exhibit: Exhibit, scale: str, name: str, outputs: Path, store: RecordStore | None = None) -> str:
    """Where a row's figures come from: which command, and which folder or record.

    Raises:
        ConfigError: the exhibit has no such row.
    """
    results = Results.on_disk(outputs, exhibit.jobs(scale), store)
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


def missing(jobs: Sequence[Job], store: RecordStore | None) -> list[Job]:
    """What is not on record; says how much is."""
    found = [job for job in jobs if store is None or store.find(job) is None]
    if len(found) < len(jobs):
        print(f"{len(jobs) - len(found)} of {len(jobs)} jobs are on record", flush=True)
    return found


def standing(exhibits: Sequence[Exhibit], scale: str, todo: Sequence[Job]) -> list[str]:
    """How much of each exhibit is on record, where there are several and one lacks something."""
    waiting, lines = set(todo), []
    for exhibit in exhibits if len(exhibits) > 1 else ():
        jobs = set(exhibit.jobs(scale))  # not by their ids, for which each would compose its configuration again
        if left := len(jobs & waiting):
            lines.append(f"{exhibit.name}: {len(jobs) - left} of {len(jobs)}")
    return lines


def keep(jobs: Sequence[Job], outputs: Path, folder: Path, scale: str) -> bool:
    """Records what was done here.

    Args:
        jobs: of which those that are done are recorded.
        outputs: the folder of all runs.
        folder: Folder of the record files.
        scale: Size preset; names the file of new records.

    Returns:
        Whether all that was done could be recorded.
    """
    store, done = RecordStore(folder), {job.id: (job, found) for job in jobs if (found := job.find(outputs))}
    refused = {found.where: reason for _, found in done.values() if (reason := unshippable(found.made))}
    for job, found in done.values():
        if found.where not in refused:
            store.keep(job, found, scale)
    print(f"recorded: {len(done) - len(refused)} jobs in {folder}", flush=True)
    if refused:
        names, reasons = " ".join(map(str, refused)), "; ".join(sorted(set(refused.values())))
        print(
            f"error: not recorded, for they were {reasons}; commit, delete them, do them again: {names}",
            file=sys.stderr,
        )
    return not refused


def _keeper(arguments: argparse.Namespace) -> Ended:
    """What records each job as soon as it is done, so that nothing is lost if the rest never ends."""
    store = RecordStore(arguments.records)

    def ended(job: Job, fault: SpardlError | None) -> None:
        found = None if fault else job.find(arguments.outputs)
        if found and unshippable(found.made) is None:  # what cannot be recorded is named when all is done
            store.keep(job, found, arguments.scale)

    return ended


def main() -> int:
    """Does what the command line asks for.

    Returns:
        The exit code: 1 if some work failed, or could not be recorded.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exhibits", nargs="*", help="names, or all")
    parser.add_argument("--list", action="store_true", help="name all exhibits")
    parser.add_argument("--scale", choices=SCALES, default="smoke", help="how much work (default: smoke)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument("--records", type=Path, default=SHIPPED, help=f"folder of the records (default: {SHIPPED})")
    parser.add_argument("--own", action="store_true", help="do not use records: do all work here")
    parser.add_argument("--record", action="store_true", help="add what was done here to the records")
    parser.add_argument("--done", action="store_true", help="do nothing more: show what was done so far")
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder of the tables (default: report)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--seeds", type=int, help="how many seeds, of exhibits that have some (default: their own)")
    parser.add_argument("--explain", metavar="ROW", help="say where a row's figures come from, and do nothing")
    parser.add_argument(
        "--profile",
        metavar="MODEL=FILE",
        action="append",
        default=[],
        help="passes as measured, in place of assumed ones; once for each model",
    )
    torch.set_num_threads(1)
    return answer(act, parser.parse_args())


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
    if arguments.profile and arguments.record:
        raise ConfigError("--record keeps what every clone finds again, without files of yours; leave out --profile")
    given = read_passes(arguments.profile)
    exhibits = measured(chosen(arguments.exhibits, arguments.seeds), arguments.scale, given)
    store = None if arguments.own else RecordStore(arguments.records)
    judged: list[Section] = []
    recorded = True
    with choices.composing():
        if arguments.explain:
            for exhibit in exhibits:
                print(explain(exhibit, arguments.scale, arguments.explain, arguments.outputs, store))
            return FINISHED
        check_drawing()
        jobs = list(dict.fromkeys(job for exhibit in exhibits for job in exhibit.jobs(arguments.scale)))
        todo = missing(jobs, store)
        sys.stdout.writelines(f"{line}\n" for line in standing(exhibits, arguments.scale, todo))
        then = _keeper(arguments) if arguments.record else nothing
        elsewhere = [] if arguments.done else complete(todo, arguments.outputs, arguments.jobs, then)
        commands = write_arrays(elsewhere, arguments.outputs, arguments.report, f"trainings-{arguments.scale}")
        results = Results.on_disk(arguments.outputs, jobs, store)
        if arguments.record:
            recorded = keep(jobs, arguments.outputs, arguments.records, arguments.scale)
        if EVERYTHING in arguments.exhibits:
            every = {exhibit.name: exhibit for exhibit in exhibits}
            judged = [claims_section(judge_all(every, arguments.scale, results), arguments.scale, results)]
    for exhibit in exhibits:
        for table in write(exhibit, arguments.scale, results, arguments.report):
            print(f"\n{table.title}\n\n{markdown(table)}", flush=True)
    for command in commands:
        print(f"for a cluster: {command}", flush=True)
    print(f"report: {report(exhibits, arguments.scale, results, arguments.report, judged)}", flush=True)
    waiting = {job.id for job in elsewhere} | {job.id for job in jobs if arguments.done and not results.of(job).started}
    failed = sum(results.of(job).reason is not None for job in jobs if job.id not in waiting)
    if failed:
        print(f"error: {failed} jobs failed; their reasons are in the tables", file=sys.stderr)
    return FAILED if failed or not recorded else FINISHED


if __name__ == "__main__":
    sys.exit(main())
