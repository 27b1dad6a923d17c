"""Runs the jobs that exhibits need and that are not finished; those for a cluster become Slurm arrays."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hydra.core.global_hydra import GlobalHydra

from scripts.choices import REFUSALS, complain
from scripts.exhibits.jobs import Job, Training
from spardl.basics.errors import SpardlError
from spardl.basics.files import write_atomically
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.processes import run_each

FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
# Plans of more seconds are given in hours.
HOURS = 7200.0
# Of long jobs, which share the machine; measurements run at normal priority.
NICENESS = 10
# Called when a job ends, with its error if it failed.
Ended: TypeAlias = Callable[[Job, SpardlError | None], None]


def answer(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command, which returns the exit code; input errors and Ctrl-C become one line."""
    try:
        return act(arguments)
    except REFUSALS as error:
        complain(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted; the same command continues from here", file=sys.stderr)
        return INTERRUPTED


def complete(jobs: Sequence[Job], outputs: Path, at_once: int, then: Ended | None = None) -> list[Training]:
    """Runs unfinished jobs, some at a time, and prints the progress; measurements, which must run alone, come last.

    Jobs with equal ids run once. Returns the trainings that need a cluster and were not run.
    """
    missing = [job for job in {job.id: job for job in jobs}.values() if job.find(outputs) is None]
    elsewhere = [job for job in missing if isinstance(job, Training) and job.elsewhere]
    here = [job for job in missing if job not in elsewhere]
    if here:
        _do(here, len(jobs), outputs, at_once, then)
    return elsewhere


def _do(missing: Sequence[Job], of: int, outputs: Path, at_once: int, then: Ended | None) -> None:
    outputs.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {of} jobs to do{_plan(missing)}", flush=True)
    began, done = time.perf_counter(), 0

    def ended(job: Job, fault: SpardlError | None) -> None:
        nonlocal done
        done += 1
        job.note(outputs, fault)
        if then:
            then(job, fault)
        left = (time.perf_counter() - began) / done * (len(missing) - done)
        how = "done" if fault is None else f"failed: {fault}"
        print(f"[{done}/{len(missing)}, {left:.0f} s left] {job.command}: {how}", flush=True)

    _load_once()
    _perform([job for job in missing if not job.alone], outputs, at_once, ended)
    _perform([job for job in missing if job.alone], outputs, 1, ended)


def _plan(jobs: Sequence[Job]) -> str:
    """Returns the expected duration, as far as it is known."""
    known = [job.expected for job in jobs if job.expected is not None]
    seconds = sum(known)
    rest = f", and {len(jobs) - len(known)} of unknown length" if len(known) < len(jobs) else ""
    long = f"{seconds / 60:.1f} minutes" if seconds <= HOURS else f"{seconds / 3600:.1f} hours of a core"
    return f": about {long}{rest}" if known else ""


def _perform(jobs: Sequence[Job], outputs: Path, at_once: int, ended: Ended) -> None:
    def work(number: int, heartbeat: Callable[[int], None]) -> None:
        GlobalHydra.instance().clear()  # of the parent; train.py needs its own
        if not jobs[number].alone:
            os.nice(NICENESS)
        jobs[number].perform(outputs)

    if jobs:
        run_each(len(jobs), work, outputs / "logs", at_once, lambda number, fault: ended(jobs[number], fault))


def _load_once() -> None:
    """Imports the common modules once, which saves seconds in every forked process."""
    import sklearn.datasets  # noqa: F401, PLC0415
    import torch._dynamo  # noqa: PLC0415

    precompile(torch.float32)


SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "array.sh"
AT_ONCE = 4


def write_arrays(jobs: Sequence[Training], outputs: Path, folder: Path, name: str) -> list[str]:
    """Writes trainings as files of commands ``name-WORKERS.txt`` into a folder, and returns their sbatch commands.

    All nodes share ``outputs``, the folder of the runs.
    """
    lines: defaultdict[int, list[str]] = defaultdict(list)
    for job in jobs:
        words = ("python", "train.py", *job.batch_words, f"output_dir={outputs.resolve()}", "resume=auto")
        lines[job.workers].append(shlex.join(words))
    folder.mkdir(parents=True, exist_ok=True)
    commands = []
    for workers, found in sorted(lines.items()):
        path = (folder / f"{name}-{workers}.txt").resolve()
        write_atomically(path, "".join(f"{line}\n" for line in found).encode())
        array = f"--array=0-{len(found) - 1}%{AT_ONCE}"
        commands.append(shlex.join(["sbatch", array, f"--ntasks={workers}", str(SCRIPT), str(path)]))
    return commands
