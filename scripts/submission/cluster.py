"""Executes runs on Slurm: job arrays through submitit, and their states from squeue."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from scripts.submission import task
from scripts.submission.site import Job, Place, Queued, Site
from scripts.submission.submissions import SLURM, Entry, Submission
from spardl.basics.errors import ConfigError

__all__ = ["Slurm", "sbatch_parameters"]

ROOT = Path(__file__).resolve().parents[2]
# Timeouts in seconds: commands of Slurm, and remaining ranks after the first one ended.
_ANSWER, _LEAVE = 60, 60
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED"})


class Slurm(Place):
    """A cluster that accepts jobs through sbatch."""

    name: ClassVar[str] = SLURM
    attached: ClassVar[bool] = False

    def check(self) -> None:
        """Checks that jobs can be submitted."""
        missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if not shutil.which(name)]
        if missing:
            raise ConfigError(
                f"Slurm is not available (missing {', '.join(missing)}); use cluster=local or a login node"
            )

    def submit(self, submission: Submission) -> int:
        """Submits one array per number of tasks."""
        site = Site(**submission.site)
        entries = list(submission.entries)
        for tasks, numbers in _arrays(submission):
            jobs = _array(submission.folder, site, tasks, [entries[number] for number in numbers])
            for number, job in zip(numbers, jobs, strict=True):
                log = os.path.relpath(job.paths.stdout, submission.folder)
                entries[number] = Entry(entries[number].words, entries[number].id, tasks, job.job_id, log)
            # Record each array before the next one is submitted, so that an interruption loses at most one.
            submission = submission.with_entries(entries)
            print(_submitted(site, tasks, jobs[0].job_id, len(jobs)), flush=True)
        for entry in submission.entries:
            print(f"  {entry.job}  {entry.id}  {submission.label(entry)}")
        print(submission.headline, flush=True)
        return 0

    def recover(self, submission: Submission) -> Submission:
        """Records an array in the queue that is not in the record of the submission."""
        numbers = next((each for _, each in _arrays(submission) if not submission.entries[each[0]].job), None)
        done = _ask("squeue", "--noheader", "--me", "--format=%F|%o") if numbers else None
        if done is None or numbers is None or done.returncode:
            return submission
        recorded = {(entry.job or "").partition("_")[0] for entry in submission.entries}
        lines = (line.strip().partition("|") for line in done.stdout.splitlines())
        found = {job for job, _, file in lines if Path(file).parent == submission.folder} - recorded
        if len(found) != 1:  # arrays are submitted one by one, so at most one lacks its record
            return submission
        (whole,) = found
        entries = list(submission.entries)
        for place, number in enumerate(numbers):
            # submitit submits a single run as a job without an array.
            job = whole if len(numbers) == 1 else f"{whole}_{place}"
            entries[number] = replace(entries[number], job=job, log=f"{job}_0_log.out")
        return submission.with_entries(entries)

    def queue(self, submission: Submission) -> Mapping[str, Job]:
        """Returns the state of each job in the queue, and the reason and expected start of pending ones."""
        found: dict[str, Job] = {}
        jobs = [entry.job for entry in submission.entries if entry.job]
        for whole in dict.fromkeys(job.partition("_")[0] for job in jobs):
            states = _states(whole)
            if states is None:
                states = {job: Job(Queued.UNKNOWN) for job in jobs if job.partition("_")[0] == whole}
            found |= states
        return found

    def cancel(self, submission: Submission, jobs: Sequence[str]) -> None:
        """Cancels jobs."""
        done = _ask("scancel", *jobs)
        if done is None or done.returncode:
            raise ConfigError(f"scancel failed: {_reason(done)}")


def _arrays(submission: Submission) -> list[tuple[int, list[int]]]:
    """Returns the number of tasks and indices of the entries of each array, in the order of submission."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for number, entry in enumerate(submission.entries):
        sizes[entry.tasks].append(number)
    return sorted(sizes.items())


def _array(folder: Path, site: Site, tasks: int, entries: Sequence[Entry]) -> list[submitit.Job[None]]:
    try:
        executor = submitit.SlurmExecutor(folder)
        executor.update_parameters(**sbatch_parameters(site, tasks))
        with redirect_stderr(io.StringIO()):  # submitit also prints its error to stderr
            jobs: list[submitit.Job[None]] = executor.map_array(task.run, [entry.words for entry in entries])
    except (FailedJobError, FailedSubmissionError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"sbatch refused the jobs: {_sbatch_said(error)}; see slurm/site.yaml") from error
    return jobs


def _sbatch_said(error: Exception) -> str:
    lines = [line.partition("sbatch: error: ")[2] for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)) or str(error)


def sbatch_parameters(site: Site, tasks: int) -> dict[str, Any]:
    """Parameters of submitit for the batch file of jobs with a number of processes."""
    nodes = site.nodes(tasks)
    optional = {"partition": site.partition, "account": site.account, "qos": site.qos, "mem": site.memory}
    gpus = {"gpus_per_task": site.gpus_per_worker} if site.gpus_per_worker else {}
    return {
        "job_name": "spardl",
        "time": site.time,
        "nodes": nodes,
        "ntasks_per_node": min(tasks, site.workers_per_node),
        "cpus_per_task": site.cpus_per_worker,
        "array_parallelism": site.at_once,
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": _setup(site),
        "teardown": [shlex.join(["exec", "bash", str(ROOT / "slurm" / "after.sh")]) + f' "$?" {site.requeues}'],
        # Remaining ranks end on their own and report a reason, so srun must not kill them when one rank fails.
        "srun_args": ["--kill-on-bad-exit=0", f"--wait={_LEAVE}", "--open-mode=append"],
        "additional_parameters": {
            "ntasks": tasks,
            "signal": f"USR1@{site.signal_seconds}",
            "requeue": True,
            **site.options,
        },
        **{name: value for name, value in optional.items() if value is not None},
        **gpus,
    }


def _setup(site: Site) -> list[str]:
    # The job must run this checkout even if another version is installed.
    found = [*site.setup, f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"]
    if site.stage_from is not None:
        stage = shlex.quote(str(ROOT / "slurm" / "stage.sh"))
        found.append(f'. {stage} "{site.stage_from}" "{site.stage_to}"')
    return found


def _submitted(site: Site, tasks: int, job: str, runs: int) -> str:
    whole, nodes = job.partition("_")[0], site.nodes(tasks)
    shape = f"{tasks} task{'s' * (tasks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if runs == 1:
        return f"submitted job {whole}: one run, {shape}"
    return f"submitted array {whole}: {runs} runs, {min(runs, site.at_once)} at once, {shape} each"


def _states(whole: str) -> dict[str, Job] | None:
    """States of a job or of all jobs in an array; ``None`` if the queue does not answer."""
    done = _ask("squeue", "--noheader", "--array", "--format=%i|%T|%r|%S", f"--jobs={whole}")
    if done is None:
        return None
    if done.returncode:
        return {} if "Invalid job id" in done.stderr else None
    found = {}
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        name, _, rest = line.partition("|")
        state, _, rest = rest.partition("|")
        if not state:  # not the line of a job
            continue
        if state not in _WAITING:
            found[name] = Job(Queued.RUNNING)
            continue
        reason, separator, start = rest.rpartition("|")  # a reason may contain the separator
        expected = "" if not separator or start in ("", "N/A") else f"expected start {start.replace('T', ' ')}"
        known = ("" if reason == "None" else reason, expected)
        found[name] = Job(Queued.WAITING, "; ".join(filter(None, known)))
    return found


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _reason(done: subprocess.CompletedProcess[str] | None) -> str:
    return "it does not answer" if done is None else " ".join(done.stderr.split())
