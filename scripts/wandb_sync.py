"""Uploads runs that were logged offline to W&B, and rebuilds lost W&B runs from run folders.

python scripts/wandb_sync.py outputs
python scripts/wandb_sync.py outputs --dry-run
python scripts/wandb_sync.py outputs/RUN --rebuild

--rebuild writes a new offline W&B run into each run folder, from its metrics.jsonl, config.yaml and summary.json, for
runs whose W&B data were deleted or never written; a second call without it sends them. W&B marks runs that were sent,
and they are not sent again. Needs a login: wandb login, or WANDB_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spardl.basics.errors import ConfigError, first_line
from spardl.basics.files import TEXT_BYTES, read_text, read_yaml
from trainer.observers import Wandb, logged_in
from trainer.runs import Run

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
MARK = ".synced"


def offline_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of offline W&B runs, in run folders or folders of these, that are not uploaded yet.

    Raises:
        ConfigError: If one of the folders does not exist.
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


def rebuild(folders: Sequence[Path]) -> int:
    """Writes an offline W&B run for every run folder; a resumed run continues it.

    Args:
        folders: Run folders, or folders of them.

    Returns:
        How many could not be rebuilt.

    Raises:
        ConfigError: If there is no folder with metrics.
    """
    found = sorted({path.parent for folder in folders for path in folder.rglob("metrics.jsonl")})
    if not found:
        raise ConfigError(f"no metrics.jsonl in {', '.join(map(str, folders))}; give run folders or folders of them")
    failures = 0
    for folder in found:
        try:
            made = _rebuilt(folder)
        except (OSError, ValueError, LookupError, YAMLError, OmegaConfBaseException) as error:
            failures += 1
            print(f"{folder}: failed: {first_line(error)}", flush=True)
        else:
            print(f"{folder}: rebuilt in {made}", flush=True)
    return failures


def _rebuilt(folder: Path) -> Path:
    run = Run("", folder)
    summary = run.read_summary()
    run = Run(str(summary["id"]), folder)
    config: Any = OmegaConf.to_container(OmegaConf.load(StringIO(read_yaml(folder / "config.yaml"))))
    events = [json.loads(line) for line in read_text(run.metrics_file, TEXT_BYTES).splitlines()]
    given = {
        name: value for name, value in config["logger"].items() if name in ("project", "group", "job_type", "tags")
    }
    before = set(folder.glob("wandb/offline-run-*"))
    # W&B refuses the id of a deleted run.
    (folder / "wandb-id.txt").unlink(missing_ok=True)
    observer = Wandb(**given, mode="offline").open(run, config)
    observer.begin(0, int(summary.get("steps", events[-1]["step"])))
    for event in events:
        figures = {name: value for name, value in event.items() if name not in ("kind", "step") and value is not None}
        observer.metrics(event["kind"], event["step"], figures)
    if summary.get("status") == "finished":
        observer.end(summary)
    observer.close()
    (made,) = set(folder.glob("wandb/offline-run-*")) - before
    return made


def sync(folders: Sequence[Path], timeout: float, dry_run: bool) -> int:
    """Uploads all runs, one after the other, and prints the outcome.

    Returns:
        How many could not be sent.

    Raises:
        ConfigError: If a folder does not exist, or this machine is not logged in.
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
    parser.add_argument(
        "--rebuild", action="store_true", help="write new offline runs from metrics.jsonl, send nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs without sending them")
    arguments = parser.parse_args()
    try:
        failures = (
            rebuild(arguments.folders)
            if arguments.rebuild
            else sync(arguments.folders, arguments.timeout, arguments.dry_run)
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return FAILED if failures else FINISHED


if __name__ == "__main__":
    sys.exit(main())
