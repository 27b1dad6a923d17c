"""A real Slurm for tests, and what they ask it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = [sys.executable, str(ROOT / "scripts" / "slurm_lab.py")]
# The smallest trainings: one step takes some 20 ms, a job some 5 s, most of which are imports.
SMALL = (
    "logger=none",
    "training.log_every=1",
    "training.eval_examples=8",
    "training.eval_every=1000",
    "model=resnet20",
)
LONG = ("training.max_steps=100000", "training.epochs=100000", "training.checkpoint_every=100000")


def missing() -> str | None:
    """Why there can be no Slurm here, found without the lab: its own faults must not skip its tests."""
    if os.geteuid():
        return "needs root"
    return None if all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))) else "needs Slurm and MUNGE"


def lab(*words: str, timeout: float = 700) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@contextmanager
def running(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A Slurm in a folder, while the block runs."""
    done = lab("up", "--nodes", str(nodes), "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    try:
        exported = lab("env", "--folder", str(folder)).stdout
        yield Slurm(dict(re.findall(r"^export (\w+)=(.*)$", exported, flags=re.MULTILINE)))
    finally:
        lab("down", "--folder", str(folder))


class Slurm:
    """Slurm's commands, and scripts/submit.py, as a user of this Slurm would type them.

    Args:
        variables: what finds it.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, **variables, "PATH": path, "WANDB_MODE": "offline"}

    def ask(self, *command: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *words: str) -> str:
        return self.ask(sys.executable, "scripts/submit.py", *words)

    def sweep(self, outputs: Path, *words: str) -> str:
        """Submits; returns the number of the job or array."""
        more = ("cluster=slurm", f"output_dir={outputs}", "site.time=5", "site.signal_seconds=30")
        reported = self.submit(*more, *SMALL, *words)
        (job,) = re.findall(r"^submitted (?:job|array) (\d+): ", reported, flags=re.MULTILINE)
        return str(job)

    def queue(self, *states: str) -> list[str]:
        """The jobs that are in the queue, each task of an array for itself; of some states only."""
        chosen = [f"--states={','.join(states)}"] if states else []
        return self.ask("squeue", "--noheader", "--array", "--format=%i", *chosen).split()

    def job(self, job: str) -> dict[str, str]:
        reported = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in reported.split() if "=" in word)

    def until(self, holds: Callable[[], Any], seconds: float = 200) -> None:
        limit = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < limit, self.ask("squeue", "--long")
            time.sleep(0.2)

    def empty(self, seconds: float = 200) -> None:
        """Waits for the end of all jobs."""
        self.until(lambda: not self.queue(), seconds)


def table(reported: str) -> dict[int, tuple[str, str, str]]:
    """State, note and words of every run that ``submit.py status`` shows."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in reported.splitlines()[1:] if re.match(r"\d+  ", line)]
    return {int(row[0]): (row[2], row[3] if len(row) > 5 else "", row[-1]) for row in rows}
