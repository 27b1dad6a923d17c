"""Runs and their folders: ids, files, locks, and the choice of the run to resume or to start from."""

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
from spardl.basics.files import naming_errors, read_json, write_atomically
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


def to_json(content: Any, indent: int | None = None) -> str:
    """Returns ``content`` as strict JSON, in which NaN and infinities become ``null``."""
    return json.dumps(_without_gaps(content), indent=indent, allow_nan=False)


def _without_gaps(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _without_gaps(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_gaps(value) for value in content]
    return content


# Bytes kept free for the last summary, which takes a few thousand.
_RESERVE = 1 << 14


class UnfinishedError(Exception):
    """Raised after a run failed or was stopped, and its error was printed; Hydra's sweepers then count a failure.

    Args:
        code: Exit code of the process.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"the run ended with exit code {self.code}"


def final_metric(summary: Mapping[str, Any]) -> float | None:
    """Returns the final value of the main metric in a summary; ``None`` if it is missing or was not finite."""
    name, final = summary.get("metric"), summary.get("final")
    value = final.get(name) if isinstance(final, dict) and isinstance(name, str) else None
    return float(value) if isinstance(value, (int, float)) else None


def run_id(config: Mapping[str, Any]) -> str:
    """Hashes a resolved configuration to ten hexadecimal digits."""
    # Sorted keys make the hash independent of the order in the files.
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def flat(node: Mapping[str, Any], without: Collection[str] = (), path: str = "") -> Iterator[tuple[str, Any]]:
    """Lists all settings of a configuration, including nested ones.

    Args:
        node: Configuration as plain data.
        without: Dotted names of nodes and settings to skip.
        path: Dotted name of the node, followed by a dot; empty for the root.

    Yields:
        Dotted name, such as ``training.epochs``, and value of each setting.
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
        id: Hash of the run's configuration.
        folder: Folder of all files of the run.
        checkpoint: Folder of the checkpoint to start or resume from; ``None`` to start from new weights.
        notices: Warnings about the choice of the folder.
        finished: Whether an earlier command has finished the run, so that there is nothing to train.
    """

    id: str
    folder: Path
    checkpoint: Path | None = None
    notices: tuple[str, ...] = ()
    finished: bool = False

    @property
    def metrics_file(self) -> Path:
        """Path of the metrics, one JSON object per line."""
        return self.folder / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        """Path of the summary: status and final metrics."""
        return self.folder / "summary.json"

    @property
    def log_file(self) -> Path:
        """Path of the console log: what the run printed, without the live bar of a terminal."""
        return self.folder / "output.log"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def _lock_file(self) -> Path:
        return self.folder / ".lock"

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Writes status and metrics to the summary file; non-finite values become ``null``."""
        write_atomically(self.summary_file, (to_json(content, indent=2) + "\n").encode())

    def log(self, text: str) -> None:
        """Appends a line to the console log."""
        # A full disk is reported by the files that hold results. The log is UTF-8 whatever the terminal uses.
        with suppress(OSError), self.log_file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")

    def log_end(self, text: str) -> None:
        """Appends the reason for an early end to the console log, unless it is already the last line there."""
        try:
            logged = self.log_file.read_bytes().endswith(f"{text}\n".encode(errors="backslashreplace"))
        except OSError:
            logged = False
        if not logged:
            self.log(text)

    def read_summary(self) -> dict[str, Any]:
        """Returns the content of the summary; an empty mapping if there is none."""
        try:
            content: Any = read_json(self.summary_file)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def metric(self) -> float:
        """Returns the final value of the main metric; NaN if it is missing or was not finite."""
        value = final_metric(self.read_summary())
        return math.nan if value is None else value

    def claim(self) -> int | None:
        """Locks the folder for this process.

        Returns:
            File descriptor of the lock; ``None`` if another process holds the lock. The lock ends when this process and
            all processes forked from it have closed the descriptor.
        """
        # The kernel releases the lock when its processes die, so no stale lock can remain.
        descriptor = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def reserve(self) -> None:
        """Reserves space on the disk, so that the final summary can be written even if the disk gets full."""
        with naming_errors(self._lock_file), self._lock_file.open("r+b") as file:
            file.write(os.urandom(_RESERVE))  # random, since some file systems compress zeros
            file.flush()
            os.fsync(file.fileno())  # some file systems allocate only then

    def release(self) -> None:
        """Frees the space that :meth:`reserve` has reserved."""
        os.truncate(self._lock_file, 0)


class Claimed(NamedTuple):
    """A run whose folder this process has locked; closing the file descriptor ``lock`` unlocks it."""

    run: Run
    lock: int


def runs_of(root: Path, identity: str) -> list[Run]:
    """Returns the runs with id ``identity`` in the folder ``root``, newest first."""
    folders = [path for path in root.glob(f"*-{identity}*") if path.is_dir()]
    return [Run(identity, path) for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def finished_run(root: Path, identity: str) -> Run | None:
    """Returns the newest finished run with id ``identity`` in the folder ``root``; ``None`` if there is none."""
    return next((run for run in runs_of(root, identity) if run.read_summary().get("status") == "finished"), None)


def new_run(root: Path, label: str, identity: str) -> Claimed:
    """Creates and locks a new run folder; safe against runs that start at the same time.

    Args:
        root: Folder of all runs.
        label: Beginning of the folder's name; the id follows.
        identity: Id of the run.

    Returns:
        The new run and its lock.

    Raises:
        ConfigError: If the folder cannot be created or written.
    """
    number = 1
    while True:
        folder = root / (f"{label}-{identity}" + (f"-{number}" if number > 1 else ""))
        try:
            root.mkdir(parents=True, exist_ok=True)
            # Fails if the folder exists, so at most one process creates it.
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
            if lock is not None:  # None: a process with resume=auto has already taken this empty run
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
    """Finds and locks the run that ``resume=WHERE`` names.

    Args:
        root: Folder of all runs.
        identity: Id of the current configuration; the run must have the same id.
        where: Folder of a run, or ``auto`` for the newest run that is neither finished nor in progress.
        workers: Required world size of the checkpoint; ``None`` for any.
        busy: List that receives the folders that ``auto`` skips because other processes use them.

    Returns:
        The run with its newest valid checkpoint, and its lock; ``None`` if ``auto`` finds no run to resume. A run that
        ``auto`` finds may have no checkpoint yet.

    Raises:
        CheckpointError: If the folder does not belong to a run of this configuration, or no checkpoint can be used.
        ConfigError: If another process uses the folder.
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
    # The summary decides: the name of the folder may have been changed.
    found = run.read_summary().get("id")
    if found is None:
        raise CheckpointError(f"resume={folder} is not the folder of a run; name a run folder, or use resume=auto")
    if found != identity:
        raise CheckpointError(
            f"resume={folder} is run {found}, but this configuration is that of run {identity}; "
            f"repeat the original command, or start a new run with start_from={folder}/checkpoints/step-NUMBER"
        )
    return run


def _at_checkpoint(claimed: Claimed, workers: int | None, demanded: bool) -> Claimed:
    run, lock = claimed
    with ExitStack() as stack:
        # An error releases the lock; pop_all below keeps it.
        stack.callback(os.close, lock)
        checkpoint, faults = find_checkpoint(run.checkpoints, workers, run.id)
        if demanded and checkpoint is None:
            raise CheckpointError(f"resume={run.folder} has no checkpoint yet; start it again without resume")
        stack.pop_all()
    notices = tuple(f"{fault}; continuing from {checkpoint}" for fault in faults)
    return Claimed(Run(run.id, run.folder, checkpoint, notices), lock)


# Nodes and settings in which a run may differ from the run whose checkpoint it starts from. Saved state would not fit
# other changes, or would silently override them.
FREE = ("optimizer.lr", "lr_schedule", "training.clip_norm", "training.max_steps", "start_from")


def check_branch(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any], workers: int | None) -> None:
    """Checks that a new run can start from a checkpoint of another run.

    Args:
        checkpoint: Folder of the checkpoint.
        before: Settings of the run that saved the checkpoint; only those that can change the result.
        now: The same settings of the new run.
        workers: Number of workers of the new run; ``None`` accepts any.

    Raises:
        CheckpointError: If the checkpoint is damaged, or the runs differ in settings that ``FREE`` does not list.
    """
    verify_checkpoint(checkpoint, workers)
    if workers is not None and saved_workers(checkpoint) != workers:
        raise CheckpointError(
            f"start_from={checkpoint} was saved by {saved_workers(checkpoint)} workers, but this run has {workers}; "
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
                f"start_from={checkpoint} was saved with {key}={old.get(key)}, but this run has {new.get(key)}; change "
                f"only {', '.join(FREE[:-1])}"
            )
