"""Executes runs on this machine, a few at a time, supervised by the foreground process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TextIO

from scripts.labs.first_process import status
from scripts.submission.site import Job, Place, Queued, Site
from scripts.submission.standing import FINISHED, GOOD, standing
from scripts.submission.submissions import HERE, Submission, lock_free
from spardl.basics.errors import ConfigError
from trainer.observers import without_run_id

__all__ = ["Here"]

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
FAILED, INTERRUPTED = 1, 130
# Seconds between polls, for a run to save a checkpoint after SIGTERM, and for a run to end after SIGINT.
_EVERY, _LEAVE, _END = 0.1, 120.0, 10.0
# Seconds for a new run to write its process id.
_WRITTEN = 10.0


class _Going(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]


class Here(Place):
    """Executes runs as child processes, each with its own log.

    All processes of a run hold a lock on the file of its id. Other submissions to the same folder therefore do not
    start it again, and ``cancel`` finds it even if the process that started it was killed.
    """

    name: ClassVar[str] = HERE
    attached: ClassVar[bool] = True

    def check(self) -> None:
        """Does nothing: this machine is always available."""

    def submit(self, submission: Submission) -> int:
        """Executes all runs, waits for them, and returns the exit code; a failed run does not stop the others."""
        entries = [replace(entry, job=str(n), log=f"{n}.txt") for n, entry in enumerate(submission.entries, 1)]
        submission = submission.with_entries(entries)
        with ExitStack() as stack:
            lock = _hold(_lock_file(submission))
            assert lock is not None, "a new submission is not locked by another process"
            stack.callback(os.close, lock)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            stack.enter_context(_terminable())
            _tell(submission.headline, sys.stdout)
            return _run_all(submission, Site(**submission.site).at_once)

    def queue(self, submission: Submission) -> Mapping[str, Job]:
        """Returns the state of each job in the queue."""
        entries = {entry.job: entry for entry in submission.entries if entry.job}
        found = {job: Job(Queued.RUNNING) for job, entry in entries.items() if _is_held(submission.run_lock(entry))}
        if _is_held(_lock_file(submission)):
            begun = {job for job in entries if (submission.folder / f"{job}.txt").exists()} | set(found)
            found |= {job: Job(Queued.WAITING) for job in entries if job not in begun}
        return found

    def cancel(self, submission: Submission, jobs: Sequence[str]) -> None:
        """Terminates the foreground process, or its children if it is gone."""
        first = _holder(_lock_file(submission))
        wanted = [submission.run_lock(entry) for entry in submission.entries if entry.job in jobs]
        for pid in filter(None, [first] if first else map(_holder, wanted)):
            _terminate(pid)


def _lock_file(submission: Submission) -> Path:
    return submission.folder / ".lock"


def _hold(path: Path) -> int | None:
    """Locks a file; returns the descriptor that holds the lock, or ``None`` if another process holds it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    if not lock_free(descriptor):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)  # remove the process id of an earlier holder
    return descriptor


def _is_held(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _holder(path: Path) -> int | None:
    """Process id in a lock file, or ``None`` if it is not locked."""
    until = time.monotonic() + _WRITTEN
    while _is_held(path):
        if text := path.read_text():
            return int(text)
        if time.monotonic() > until:
            raise ConfigError(f"{path} is locked by an unknown process; find it with: fuser {path}, and stop it")
        time.sleep(_EVERY)
    return None


def _terminate(pid: int) -> None:
    """Sends SIGTERM to a process, or to the rest of its process group if it has died."""
    with suppress(ProcessLookupError):
        if status(pid)[:1] in ([], ["Z"]):
            os.killpg(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGTERM)


@contextmanager
def _terminable() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_all(submission: Submission, at_once: int) -> int:
    waiting, going, bad = list(range(len(submission.entries))), list[_Going](), 0
    environment = without_run_id(os.environ) if len(waiting) > 1 else dict(os.environ)
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                _start(submission, waiting.pop(0), going, environment)
            time.sleep(_EVERY)
            for one in [one for one in going if one.process.poll() is not None]:
                going.remove(one)
                bad += not _ended(submission, one)
    except KeyboardInterrupt:
        _stop(submission, going)
        return INTERRUPTED
    finally:
        _kill(going)
    return FAILED if bad else 0


def _start(submission: Submission, number: int, going: list[_Going], environment: Mapping[str, str]) -> None:
    entry = submission.entries[number]
    lock = _hold(submission.run_lock(entry))
    if lock is None:
        _skip(submission, number, "another submission is running it")
        return
    try:
        if standing(submission, entry, {}).state == FINISHED:  # another submission may have finished it meanwhile
            _skip(submission, number, "another submission has finished it")
            return
        with (submission.folder / str(entry.log)).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", str(TRAIN), *entry.words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                # The run writes its process id itself: cancel needs it even if this process is killed right now.
                preexec_fn=partial(_write_own_id, lock),  # noqa: PLW1509 - one system call, in a process without threads
                start_new_session=True,  # only this process receives Ctrl-C; it signals the runs itself
            )
        going.append(_Going(number, process))
    except OSError as error:
        raise ConfigError(f"cannot start a run: {error}") from error
    finally:
        os.close(lock)
    _say(submission, number, "started")


def _write_own_id(lock: int) -> None:
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _skip(submission: Submission, number: int, why: str) -> None:
    with (submission.folder / str(submission.entries[number].log)).open("ab") as log:
        log.write(f"skipped: {why}\n".encode())
    _say(submission, number, f"skipped: {why}")


def _ended(submission: Submission, one: _Going) -> bool:
    found = standing(submission, submission.entries[one.number], {})
    _say(submission, one.number, f"{found.state}: {found.note}")
    return found.state in GOOD and one.process.returncode == 0


def _stop(submission: Submission, going: Sequence[_Going]) -> None:
    _tell("stopping: runs save a checkpoint and exit; press Ctrl-C again to end them immediately", sys.stderr)
    try:
        _await_end(going, signal.SIGTERM, _LEAVE)
    except KeyboardInterrupt:
        _await_end(going, signal.SIGINT, _END)
    for one in going:
        if one.process.poll() is not None:
            _ended(submission, one)


def _await_end(going: Sequence[_Going], sent: signal.Signals, seconds: float) -> None:
    for one in going:
        one.process.send_signal(sent)
    until = time.monotonic() + seconds
    while any(one.process.poll() is None for one in going) and time.monotonic() < until:
        time.sleep(_EVERY)


def _kill(going: Sequence[_Going]) -> None:
    """Terminates the remaining runs and their children."""
    for one in going:
        if one.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait(_END)


def _say(submission: Submission, number: int, what: str) -> None:
    entry = submission.entries[number]
    _tell(f"[{entry.job}/{len(submission.entries)}] {entry.id}  {submission.label(entry)}: {what}", sys.stdout)


def _tell(text: str, stream: TextIO) -> None:
    with suppress(OSError):  # a closed pipe must not end the runs
        print(text, file=stream, flush=True)
