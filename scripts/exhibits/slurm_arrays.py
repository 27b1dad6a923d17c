"""Slurm job arrays for trainings that need a cluster."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.exhibits.jobs import Training
from spardl.basics.files import write_atomically

__all__ = ["write_arrays"]

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "array.sh"
AT_ONCE = 4


def write_arrays(jobs: Sequence[Training], outputs: Path, folder: Path, name: str) -> list[str]:
    """Writes one file of commands per number of workers, with one line per training.

    Args:
        jobs: Trainings to run.
        outputs: Folder of the runs, shared by all nodes.
        folder: Folder of the command files.
        name: Prefix of the file names.

    Returns:
        The sbatch command of each file.
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
