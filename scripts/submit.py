"""Submits runs of train.py to Slurm, or runs them locally a few at a time, and manages them.

python scripts/submit.py -m compressor=spardl,oktopk seed=1,2,3 cluster=slurm
python scripts/submit.py -m compressor=spardl,oktopk seed=1,2,3 cluster=slurm site.time=60 site.at_once=2
python scripts/submit.py compressor=spardl cluster=slurm cluster.workers=8
python scripts/submit.py -m compressor=spardl,oktopk seed=1,2,3 cluster=local site.at_once=2
python scripts/submit.py status|logs|cancel|resubmit [SUBMISSION] [--outputs FOLDER]

Words are those of train.py; with -m they are a sweep, as in train.py -m. All runs are composed and checked before any
is submitted. Finished runs are skipped (force=true repeats them), and interrupted runs resume. A sweep is one job
array, or one array per number of workers. A submission is a folder of output_dir/.submissions with logs.

cluster=slurm, process_group and simulated are submitted to Slurm, and the command returns at once; cluster=local runs
in the foreground.

Settings of the site are in slurm/site.yaml (or --site FILE); site.KEY=VALUE overrides one.

  status     state of each run, from the run folders and the queue
  logs N     print the log of run N of the table of status; without N, of all runs that did not end well
  cancel     cancel waiting and running jobs; running ones save a checkpoint if there is time
  resubmit   submit runs that are neither finished nor queued, with the settings of the submission and site.KEY=VALUE

Without a name, the newest submission is used. Exit codes: 0; 1: a local run failed; 2: bad input; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from scripts.choices import REFUSALS, complain
from scripts.submission.cluster import Slurm
from scripts.submission.here import Here
from scripts.submission.site import DEFAULT, SITE, Place, Queued, Site, changed, read_site
from scripts.submission.standing import FINISHED, GOOD, Standing, print_table, standing
from scripts.submission.submissions import (
    Entry,
    Submission,
    all_submissions,
    find_submission,
    near,
    new_submission,
    submitting,
)
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_text
from trainer.runs import finished_run

PLACES: dict[str, Callable[[], Place]] = {Here.name: Here, Slurm.name: Slurm}
LOCAL, OUTPUTS = "local", Path("outputs")
BAD_INPUT, INTERRUPTED = 2, 130


def submit(arguments: argparse.Namespace) -> int:
    """Composes, checks and submits all runs that are not finished.

    Returns:
        The exit code.

    Raises:
        ConfigError: If the input is invalid; nothing is submitted then.
    """
    from scripts import choices  # noqa: PLC0415 - imports everything that training needs
    from scripts.submission.sweeps import Planned, expand, plan  # noqa: PLC0415

    site = read_site(arguments.site, [word for word in arguments.words if word.startswith(SITE)])
    words = [word for word in arguments.words if not word.startswith(SITE)]
    with choices.composing():
        planned = [plan(run) for run in expand(words, arguments.multirun)]
    first: Planned = planned[0]
    place = _place({run.cluster for run in planned})
    if len({(run.outputs, run.force) for run in planned}) > 1:
        raise ConfigError("the runs have different output_dir or force; submit them separately")
    kept = {run.id: run for run in planned}
    if len(planned) > len(kept):
        print(
            "some runs differ only in settings that do not change the result; each of these is submitted once",
            file=sys.stderr,
        )
    done = {} if first.force else {name: finished_run(first.outputs, name) for name in kept}
    for found_run in filter(None, done.values()):
        print(f"skipped: {found_run.folder} is finished (force=true runs it again)", flush=True)
    entries = [Entry(run.words, run.id, run.tasks) for run in kept.values() if not done.get(run.id)]
    if not entries:
        print("nothing to submit")
        return 0
    return _hand_over(place, first.outputs, first.force, site, entries)


def _place(clusters: set[str]) -> Place:
    if LOCAL in clusters and len(clusters) > 1:
        raise ConfigError(
            f"cluster={','.join(sorted(clusters))} contains local runs and Slurm runs; submit them separately"
        )
    place = PLACES[Here.name if LOCAL in clusters else Slurm.name]()
    place.check()
    return place


def _hand_over(place: Place, outputs: Path, force: bool, site: Site, entries: Sequence[Entry]) -> int:
    with ExitStack() as stack:
        stack.enter_context(submitting(outputs))
        live = _live(outputs, {entry.id for entry in entries})
        for entry in entries:
            if entry.id in live:
                print(f"skipped: {entry.id} waits or runs in submission {live[entry.id].name}", flush=True)
        entries = [entry for entry in entries if entry.id not in live]
        if not entries:
            print("nothing to submit")
            return 0
        submission = new_submission(outputs, place.name, force, asdict(site), entries)
        if place.attached:
            stack.close()  # each run has its own lock, and local runs may take days
        try:
            code = place.submit(submission)
        except ConfigError:
            if not any(entry.job for entry in find_submission(outputs, submission.name).entries):
                submission.discard()
            raise
    elsewhere = f" --outputs {near(outputs)}" if near(outputs) != OUTPUTS else ""
    print(f"check with: python scripts/submit.py status{elsewhere}", flush=True)
    return code


def _live(outputs: Path, wanted: Collection[str]) -> dict[str, Submission]:
    """Submissions of the wanted runs that already wait or run, by run id."""
    found = dict[str, Submission]()
    for recorded in all_submissions(outputs)[0]:
        if not any(entry.id in wanted for entry in recorded.entries):
            continue
        place = PLACES[recorded.place]()
        submission = place.recover(recorded)
        if any(entry.job for entry in submission.entries):
            queue = place.queue(submission)
            known = {name for name, job in queue.items() if job.state is not Queued.UNKNOWN}
            found |= {entry.id: submission for entry in submission.entries if entry.job in known}
    return found


def _stand(submission: Submission, place: Place) -> list[Standing]:
    queue = place.queue(submission)
    return [standing(submission, entry, queue) for entry in submission.entries]


def status(submission: Submission, place: Place, arguments: argparse.Namespace) -> int:
    """Prints the state of each run."""
    print_table(submission, _stand(submission, place))
    return 0


def logs(submission: Submission, place: Place, arguments: argparse.Namespace) -> int:
    """Prints the log of one run, or of all runs that did not end well.

    Raises:
        ConfigError: If there is no such run.
    """
    numbers = range(1, len(submission.entries) + 1)
    if arguments.run is not None and arguments.run not in numbers:
        raise ConfigError(f"submission {submission.name} has no run {arguments.run}; choose from 1 to {numbers[-1]}")
    found = _stand(submission, place)
    wanted = [arguments.run] if arguments.run else [n for n in numbers if found[n - 1].state not in GOOD]
    for number in wanted:
        path = submission.log(submission.entries[number - 1])
        print(f"==> {number}: {submission.label(submission.entries[number - 1])}: {path and near(path)} <==")
        if path and path.exists():
            print(read_text(path, errors="replace"), end="")
    return 0


def cancel(submission: Submission, place: Place, arguments: argparse.Namespace) -> int:
    """Cancels waiting and running jobs."""
    found = _stand(submission, place)
    jobs = [str(entry.job) for entry, one in zip(submission.entries, found, strict=True) if one.live]
    if jobs:
        place.cancel(submission, jobs)
    print(f"cancelled: {len(jobs)} of {len(found)} runs")
    return 0


def resubmit(submission: Submission, place: Place, arguments: argparse.Namespace) -> int:
    """Submits runs that are neither finished nor queued."""
    found = _stand(submission, place)
    pairs = list(zip(submission.entries, found, strict=True))
    entries = [
        Entry(entry.words, entry.id, entry.tasks) for entry, one in pairs if not one.live and one.state != FINISHED
    ]
    print(f"skipped: {len(pairs) - len(entries)} of {len(pairs)} runs, finished or queued")
    if not entries:
        return 0
    place.check()
    site = changed(submission.site, arguments.settings)
    return _hand_over(place, submission.outputs, submission.force, site, entries)


COMMANDS = {"status": status, "logs": logs, "cancel": cancel, "resubmit": resubmit}


def _attend(name: str, words: Sequence[str]) -> int:
    settings = [word for word in words if word.startswith(SITE)] if name == "resubmit" else []
    arguments = _later_parser(name).parse_args([word for word in words if word not in settings])
    arguments.settings = settings
    submission = find_submission(arguments.outputs.absolute(), arguments.submission)
    place = PLACES[submission.place]()
    return COMMANDS[name](place.recover(submission), place, arguments)


def _later_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"submit.py {name}", description=COMMANDS[name].__doc__)
    if name == "logs":
        parser.add_argument("run", nargs="?", type=int, metavar="N", help="number of a run in the table")
        parser.add_argument("--submission", help="name of the submission (default: the newest)")
    else:
        parser.add_argument("submission", nargs="?", help="name of the submission (default: the newest)")
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="output_dir of the runs")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="treat the words as a sweep")
    parser.add_argument("--site", type=Path, default=DEFAULT, help=f"settings of the site (default: {DEFAULT})")
    parser.add_argument("words", nargs="*", metavar="GROUP=CHOICE|KEY=VALUE|site.KEY=VALUE")
    return parser


def main() -> int:
    """Runs the command line, and returns the exit code."""
    words = sys.argv[1:]
    try:
        if words and words[0] in COMMANDS:
            return _attend(words[0], words[1:])
        return submit(_parser().parse_intermixed_args(words))
    except REFUSALS as error:
        complain(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
