"""Run folders: who a run is, where it writes, and whether it is finished, still going or to be continued."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spardl.basics.errors import CheckpointError, ConfigError
from spardl.basics.files import naming, read_json, write_atomically
from trainer.checkpoint import find_checkpoint, saved_workers, verify_checkpoint

__all__ = [
    "FREE",
    "Claimed",
    "Run",
    "UnfinishedError",
    "check_branch",
    "continue_from",
    "final_metric",
    "finished_run",
    "flat",
    "new_run",
    "run_id",
    "runs_of",
    "to_json",
]


# JSON as its standard has it, which every reader takes.


def to_json(content: Any, indent: int | None = None) -> str:
    """A text in strict JSON: ``null`` stands for a NaN and for an infinity, which JSON does not have."""
    return json.dumps(_without_gaps(content), indent=indent, allow_nan=False)


def _without_gaps(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _without_gaps(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_gaps(value) for value in content]
    return content


# Bytes; a summary has some thousand, and disks have blocks.
_RESERVE = 1 << 14


class UnfinishedError(Exception):
    """A run without a result, and all is said: Hydra's launchers carry it on, and its sweepers count a failure.

    Args:
        code: the exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"it ended with exit code {self.code}"


def final_metric(summary: Mapping[str, Any]) -> float | None:
    """The value in a summary that a finished run is judged by, or ``None`` if there is no such number."""
    name, final = summary.get("metric"), summary.get("final")
    value = final.get(name) if isinstance(final, dict) and isinstance(name, str) else None
    return float(value) if isinstance(value, (int, float)) else None


def run_id(config: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that follow from a resolved configuration alone."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def flat(node: Mapping[str, Any], without: Collection[str] = (), path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a configuration.

    Args:
        node: plain data.
        without: dotted names of nodes and settings that are left out.
        path: of the node itself, with a dot behind.

    Yields:
        Dotted names and values.
    """
    for key, value in node.items():
        name = f"{path}{key}"
        if name in without:
            continue
        if isinstance(value, Mapping):
            yield from flat(value, without, f"{name}.")
        else:
            yield name, value


@dataclass(frozen=True)
class Run:
    """One run and its folder.

    Attributes:
        id: the hash of its configuration.
        folder: everything it writes goes there.
        checkpoint: where it continues, if it does.
        notices: what the user should know of how the folder was chosen.
    """

    id: str
    folder: Path
    checkpoint: Path | None = None
    notices: tuple[str, ...] = ()

    @property
    def metrics_file(self) -> Path:
        """One JSON object per line: the truth about the run."""
        return self.folder / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        """Status and final figures."""
        return self.folder / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    @property
    def _lock_file(self) -> Path:
        return self.folder / ".lock"

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Writes status and figures; one that is not finite is ``null``."""
        write_atomically(self.summary_file, (to_json(content, indent=2) + "\n").encode())

    def read_summary(self) -> dict[str, Any]:
        """What was written last, or an empty mapping."""
        try:
            content: Any = read_json(self.summary_file)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def metric(self) -> float:
        """What a finished run is judged by; NaN if it was not finite."""
        value = final_metric(self.read_summary())
        return math.nan if value is None else value

    def claim(self) -> int | None:
        """Marks the folder as in use.

        Returns:
            A file descriptor, which ends the claim when it is closed in this process and in all that were
            forked from it; or ``None`` if another process uses the folder.
        """
        descriptor = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def reserve(self) -> None:
        """Keeps room for a last word on a disk that may become full: in the file that shows that it is in use."""
        with naming(self._lock_file), self._lock_file.open("r+b") as file:
            file.write(os.urandom(_RESERVE))  # what some disks cannot compress
            file.flush()
            os.fsync(file.fileno())

    def release(self) -> None:
        """Gives that room back."""
        os.truncate(self._lock_file, 0)


class Claimed(NamedTuple):
    """A run that belongs to this process until it closes ``lock``."""

    run: Run
    lock: int


def runs_of(root: Path, identity: str) -> list[Run]:
    """The runs of one configuration, newest first."""
    folders = [path for path in root.glob(f"*-{identity}*") if path.is_dir()]
    return [Run(identity, path) for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def finished_run(root: Path, identity: str) -> Run | None:
    """A run of this configuration that came to its end, if there is one."""
    return next((run for run in runs_of(root, identity) if run.read_summary().get("status") == "finished"), None)


def new_run(root: Path, label: str, identity: str) -> Claimed:
    """Makes a folder that no other run has, even one that starts at the same instant.

    Args:
        root: folder of all runs.
        label: readable beginning of the folder's name.
        identity: the run's id.

    Raises:
        ConfigError: if the folder cannot be made or written to.
    """
    number = 1
    while True:
        folder = root / (f"{label}-{identity}" + (f"-{number}" if number > 1 else ""))
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            run = Run(identity, folder)
            lock = _claim_new(run)
        except FileExistsError:
            if not root.is_dir():
                raise ConfigError(f"output_dir={root} is not a folder; name another with output_dir=FOLDER") from None
        except OSError as error:
            raise ConfigError(
                f"cannot write to output_dir={root} ({error.strerror}); name another with output_dir=FOLDER"
            ) from error
        else:
            if lock is not None:  # else a process with resume=auto was faster, and continues this empty run
                return Claimed(run, lock)
        number += 1


def _claim_new(run: Run) -> int | None:
    try:
        return run.claim()
    except OSError:
        with suppress(OSError):
            run.folder.rmdir()
        raise


def continue_from(
    root: Path, identity: str, where: str, workers: int | None, busy: list[Path] | None = None
) -> Claimed | None:
    """Finds the run that ``resume=WHERE`` means.

    Args:
        root: folder of all runs.
        identity: id of the configuration at hand; a run of another one is refused.
        where: ``auto`` for the newest run of this configuration that is neither finished nor going on, or the
            folder of a run.
        workers: how many must have saved the checkpoint; ``None`` for any number.
        busy: gets the folders that ``auto`` passes over, for other processes are using them.

    Returns:
        The run with its newest whole checkpoint, or ``None`` if ``auto`` finds nothing to continue.

    Raises:
        CheckpointError: if there are checkpoints, but none can be used.
        ConfigError: if another process uses the folder.
    """
    if where != "auto":
        run = _named_run(Path(where), identity)
        lock = run.claim()
        if lock is None:
            raise ConfigError(f"{run.folder} is in use by another process; wait for it, or start without resume")
        return _at_checkpoint(Claimed(run, lock), workers, demanded=True)
    for run in runs_of(root, identity):
        lock = run.claim()
        if lock is None:
            if busy is not None:
                busy.append(run.folder)
            continue
        if run.read_summary().get("status") != "finished":
            return _at_checkpoint(Claimed(run, lock), workers, demanded=False)
        os.close(lock)
    return None


def _named_run(folder: Path, identity: str) -> Run:
    run = Run(identity, folder)
    found = run.read_summary().get("id")
    if found is None:
        raise CheckpointError(f"resume={folder} is not the folder of a run; name one, or use resume=auto")
    if found != identity:
        raise CheckpointError(
            f"resume={folder} is a run of another configuration ({found}, this one is {identity}); "
            f"repeat the original command, or start a new run with start_from={folder}/checkpoints/step-NUMBER"
        )
    return run


def _at_checkpoint(claimed: Claimed, workers: int | None, demanded: bool) -> Claimed:
    run, lock = claimed
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        checkpoint, faults = find_checkpoint(run.checkpoints, workers, run.id)
        if demanded and checkpoint is None:
            raise CheckpointError(f"resume={run.folder} has no checkpoint yet; start it again without resume")
        stack.pop_all()
    notices = tuple(f"{fault}; continuing from {checkpoint}" for fault in faults)
    return Claimed(Run(run.id, run.folder, checkpoint, notices), lock)


# A new run that goes on from a checkpoint of another one, with another learning rate.


# What may differ from the run that saved the checkpoint, nodes or single settings. Of all else, what was saved would
# not fit, or would win in silence over what is typed.
FREE = ("optimizer.lr", "lr_schedule", "training.clip_norm", "training.max_steps", "start_from")


def check_branch(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any], workers: int | None) -> None:
    """Accepts a checkpoint of another run to begin with.

    Args:
        checkpoint: its folder.
        before: what decided the result of the run that saved it.
        now: likewise of the new run.
        workers: how many there are; ``None`` for any number.

    Raises:
        CheckpointError: if the checkpoint is not whole, or the runs differ in more than ``FREE``.
    """
    verify_checkpoint(checkpoint, workers)
    if workers is not None and saved_workers(checkpoint) != workers:
        raise CheckpointError(
            f"start_from={checkpoint} was saved by {saved_workers(checkpoint)} workers, and this run has {workers}; "
            f"use cluster.workers={saved_workers(checkpoint)}"
        )
    step, last = checkpoint.name.removeprefix("step-"), now.get("training", {}).get("max_steps")
    if last is not None and step.isdecimal() and last <= int(step):
        raise CheckpointError(
            f"start_from={checkpoint} is at or after the last step, training.max_steps={last}; increase it"
        )
    old, new = dict(flat(before, FREE)), dict(flat(now, FREE))
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            raise CheckpointError(
                f"start_from={checkpoint}: its run had {key}={old.get(key)}, and this one has {new.get(key)}; only "
                f"{', '.join(FREE[:-1])} may differ"
            )
