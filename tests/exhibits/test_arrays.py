"""Trainings for a cluster: what is written, and what Slurm's batch script makes of it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import jobs

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("composing")


def training(workers: int, seed: int, cluster: str = "process_group") -> Any:
    labels = jobs.Labels("spardl.teams", "B-SAG, d = 2", ("it's", "a, b"))
    return jobs.Training((f"cluster.workers={workers}", f"seed={seed}"), labels, cluster)


def test_labels_reach_the_logger_as_they_are() -> None:
    config = choices.composed(*training(2, 1).batch_words)
    assert config["logger"]["group"] == "spardl.teams"
    assert config["logger"]["job_type"] == "B-SAG, d = 2"
    assert config["logger"]["tags"] == ["it's", "a, b"]


def test_labels_do_not_make_another_run() -> None:
    one = training(2, 1)
    other = jobs.Training(one.words, None, one.cluster)
    assert one == other
    assert one.id == other.id
    assert "logger" not in one.command
    assert training(2, 1, "simulated").id != one.id


def start(folder: Path, file: str, number: int) -> subprocess.CompletedProcess[str]:
    """Runs the batch script as Slurm would, with an srun that shows its words."""
    srun = folder / "srun"
    srun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(number)}
    command = ["bash", str(ROOT / "slurm" / "array.sh"), file]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_an_array_for_every_number_of_workers(tmp_path: Path) -> None:
    work = [training(14, 1), training(4, 1), training(14, 2)]
    lines = jobs.write_arrays(work, tmp_path / "out puts", tmp_path / "report", "paper")
    four, fourteen = (shlex.split(line) for line in lines)
    assert four[:3] == ["sbatch", "--array=0-0%4", "--ntasks=4"]
    assert fourteen[:3] == ["sbatch", "--array=0-1%4", "--ntasks=14"]
    assert Path(fourteen[3]) == ROOT / "slurm" / "array.sh"
    done = start(tmp_path, fourteen[4], 1)
    wanted = ["python", "train.py", *work[2].batch_words, f"output_dir={tmp_path / 'out puts'}", "resume=auto"]
    assert done.stdout.splitlines() == wanted
    done = start(tmp_path, fourteen[4], 2)
    assert done.returncode == 2
    assert done.stderr == f"error: {fourteen[4]} has no line 3; submit with --array=0-1\n"
