"""Does the work that exhibits need, as far as it was not done before."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hydra.core.global_hydra import GlobalHydra

from scripts.complaints import REFUSALS, complain
from scripts.exhibits.jobs import Job, Training
from spardl.basics.errors import SpardlError
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.processes import run_each

__all__ = ["FAILED", "FINISHED", "Ended", "answer", "complete", "nothing"]

FINISHED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
# Seconds from which on a plan is told in hours.
HOURS = 7200.0
# Of what takes hours beside other work; what is timed gives way to nothing.
NICENESS = 10
# Told how each job ended.
Ended: TypeAlias = Callable[[Job, SpardlError | None], None]


def answer(act: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Does what a command line asks for; what is wrong with it, and Ctrl-C, become one line.

    Args:
        act: gives the exit code.
        arguments: for it.

    Returns:
        The exit code.
    """
    try:
        return act(arguments)
    except REFUSALS as error:
        complain(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def nothing(job: Job, fault: SpardlError | None) -> None:
    """Takes note of how a job ended, and does nothing about it."""


def complete(jobs: Sequence[Job], outputs: Path, at_once: int, then: Ended = nothing) -> list[Training]:
    """Does the work of which there is no result yet, and says how it goes; what must run alone comes last.

    Args:
        jobs: what is needed. Different words may mean the same work, which is done once.
        outputs: the folder of all runs.
        at_once: how many jobs run at a time.
        then: is told how each ended, as soon as it has.

    Returns:
        The trainings that were not done, because they take a cluster.
    """
    missing = [job for job in {job.id: job for job in jobs}.values() if job.find(outputs) is None]
    elsewhere = [job for job in missing if isinstance(job, Training) and job.elsewhere]
    here = [job for job in missing if job not in elsewhere]
    if here:
        _do(here, len(jobs), outputs, at_once, then)
    return elsewhere


def _do(missing: Sequence[Job], of: int, outputs: Path, at_once: int, then: Ended) -> None:
    outputs.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {of} jobs to do{_plan(missing)}", flush=True)
    began, done = time.perf_counter(), 0

    def ended(job: Job, fault: SpardlError | None) -> None:
        nonlocal done
        done += 1
        job.note(outputs, fault)
        then(job, fault)
        left = (time.perf_counter() - began) / done * (len(missing) - done)
        how = "done" if fault is None else f"failed: {fault}"
        print(f"[{done}/{len(missing)}, {left:.0f} s left] {job.command}: {how}", flush=True)

    _load_once()
    _perform([job for job in missing if not job.alone], outputs, at_once, ended)
    _perform([job for job in missing if job.alone], outputs, 1, ended)


def _plan(jobs: Sequence[Job]) -> str:
    """How long it will take, as far as that is known before."""
    known = [job.expected for job in jobs if job.expected is not None]
    rest = f", and {len(jobs) - len(known)} of unknown length" if len(known) < len(jobs) else ""
    return f": about {_long(sum(known))}{rest}" if known else ""


def _long(seconds: float) -> str:
    """Minutes, or what are more than two hours."""
    return f"{seconds / 60:.1f} minutes" if seconds <= HOURS else f"{seconds / 3600:.1f} hours of a core"


def _perform(jobs: Sequence[Job], outputs: Path, at_once: int, ended: Ended) -> None:
    def work(number: int, heartbeat: Callable[[int], None]) -> None:
        GlobalHydra.instance().clear()  # this process composes configurations; train.py wants to do so itself
        if not jobs[number].alone:
            os.nice(NICENESS)
        jobs[number].perform(outputs)

    if jobs:
        run_each(len(jobs), work, outputs / "logs", at_once, lambda number, fault: ended(jobs[number], fault))


def _load_once() -> None:
    """Loads what every training would load: seconds in each of the processes that are forked from this one."""
    import sklearn.datasets  # noqa: F401, PLC0415
    import torch._dynamo  # noqa: PLC0415

    precompile(torch.float32)
