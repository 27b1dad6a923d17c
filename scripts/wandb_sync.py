"""Sends runs to W&B that were logged offline.

python scripts/wandb_sync.py outputs
python scripts/wandb_sync.py outputs --dry-run

W&B marks runs that were sent, and they are not sent again. Needs a login: wandb login, or WANDB_API_KEY.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spardl.basics.errors import ConfigError
from trainer.observers import logged_in

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
MARK = ".synced"


def offline_runs(folders: Sequence[Path]) -> list[Path]:
    """What W&B wrote in run folders, or folders of run folders, and has not sent yet.

    Raises:
        ConfigError: one of the folders is not there.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"folder {folder} does not exist; give the output_dir of your runs")
    found = {run for folder in folders for run in folder.rglob("wandb/offline-run-*") if run.is_dir()}
    return sorted(run for run in found if not any(run.glob(f"*.wandb{MARK}")))


def send(run: Path, timeout: float) -> str | None:
    """Sends one run with W&B's own program.

    Returns:
        Why it was not sent, if it was not.
    """
    command = [sys.executable, "-m", "wandb", "sync", str(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s (--timeout)"
    told = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    # A run that could not be sent may still end with 0.
    if done.returncode or not any(run.glob(f"*.wandb{MARK}")):
        return told[-1] if told else f"wandb ended with {done.returncode}"
    return None


def sync(folders: Sequence[Path], timeout: float, dry_run: bool) -> int:
    """Sends all runs, one after the other, and says how it goes.

    Returns:
        How many could not be sent.

    Raises:
        ConfigError: a folder is not there, or this machine is not logged in.
    """
    runs = offline_runs(folders)
    if dry_run or not runs:
        print("\n".join([*map(str, runs), f"{len(runs)} runs to send"]))
        return 0
    if not logged_in():
        raise ConfigError("not logged in to W&B; run wandb login, or set WANDB_API_KEY")
    failures = 0
    for number, run in enumerate(runs, 1):
        fault = send(run, timeout)
        failures += fault is not None
        print(f"[{number}/{len(runs)}] {run}: {'sent' if fault is None else f'failed: {fault}'}", flush=True)
    return failures


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if a run could not be sent.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit per run in seconds (default: 300)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs without sending them")
    arguments = parser.parse_args()
    try:
        failures = sync(arguments.folders, arguments.timeout, arguments.dry_run)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return FAILED if failures else FINISHED


if __name__ == "__main__":
    sys.exit(main())
