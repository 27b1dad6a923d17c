"""Worker processes of this machine: forked from one that has everything imported, watched, and ended together.

A fork after the imports costs milliseconds where a fresh interpreter with torch costs a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import torch

from spardl.basics.errors import (
    ConfigError,
    PeerError,
    SpardlError,
    StoppedError,
    TrainingError,
    WorkerError,
    first_line,
)
from spardl.basics.files import write_atomically

__all__ = [
    "ANY",
    "ASKING",
    "AskedToStopError",
    "deferred",
    "end_at_once",
    "fault_of",
    "leave",
    "listening",
    "reaping",
    "run_each",
    "run_processes",
]


# The signals with which a scheduler, or a person, asks a process to stop.


# Signals with which a scheduler, or a closed terminal, asks a process to stop.
ASKING = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
# The same and Ctrl-C.
ANY = ASKING | {signal.SIGINT}
# Signals that stay ignored if the parent ignored them, as nohup and shells with background jobs do.
_INHERITED = frozenset({signal.SIGHUP, signal.SIGINT})

# Seconds in which further signals are echoes of the first, since those who stop all processes of a job often tell some
# of them twice.
_ECHO = 1.0


class AskedToStopError(KeyboardInterrupt):
    """A signal asked to stop before there were workers."""


def end_at_once() -> NoReturn:
    """Does what Ctrl-C does: for those who were asked twice."""
    raise KeyboardInterrupt


@contextmanager
def listening(
    ask: Callable[[], bool], again: Callable[[], None], signals: Collection[signal.Signals] = ANY
) -> Iterator[list[int]]:
    """Lets the signals that ask to stop ask; for the main thread.

    Args:
        ask: asks, and answers whether that had been done before.
        again: called if it had, unless that was a moment ago.
        signals: the signals to handle. SIGHUP and SIGINT stay ignored if they are.

    Yields:
        The signals received so far, in order.
    """
    times: list[float] = []
    received: list[int] = []

    def heard(signum: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        received.append(signum)
        if ask() and (len(times) == 1 or times[-1] - times[0] > _ECHO):
            again()

    ignored = {signum for signum in _INHERITED if signal.getsignal(signum) == signal.SIG_IGN}
    before = {signum: signal.signal(signum, heard) for signum in {*signals} - ignored}
    unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, ANY)
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Lets these signals wait, in this process and in those that it forks, until they are listened to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ANY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reaping() -> None:
    """Restores the default action of SIGCHLD if the parent of this process ignored it; for the main thread.

    While SIGCHLD is ignored, the kernel discards the exit codes of child processes. ``multiprocessing`` then takes a
    child that has ended for a running one, and ``subprocess`` reports 0 for a failed one.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


# Called with a rank and with where to report steps.
Target: TypeAlias = Callable[[int, Callable[[int], None]], None]

# Seconds that workers get to notice that one is lost, and then to obey a request to end.
_NOTICE, _OBEY = 5.0, 2.0
# Seconds that workers get to finish their step and save a checkpoint when their parent has died.
_ORPHANED = 60.0
# The parent's request to end at once; the scheduler's may reach workers, too, and mean something else.
_END = signal.SIGUSR2
# A report must fit into a pipe that is read only when its writer has ended.
_LONGEST = 4000


class _Stopped(BaseException):
    """The parent asked this worker to end."""


@dataclass
class _Child:
    rank: int
    process: BaseProcess
    report: Connection
    fault: SpardlError | None = None

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    def read_fault(self) -> None:
        """Fetches what the worker said of its end, once."""
        if self.fault is None and self.report.poll():
            try:
                kind, message = self.report.recv()
            except EOFError:
                return
            self.fault = kind(message)


def run_processes(count: int, target: Target, folder: Path, *, stops: bool = False) -> None:
    """Runs ``target(rank, heartbeat)`` in ``count`` processes until all have returned.

    If one fails, the others are ended: they get a few seconds to notice by themselves, then they are killed.

    Args:
        count: how many.
        target: the work; it reports the steps it has done to ``heartbeat``.
        folder: where tracebacks of failed workers are written.
        stops: whether the target listens to the signals that ask to stop; those that this process gets are passed on.
            From the second one on they end it at once. If this process dies, the workers are asked to stop.

    Raises:
        ConfigError: what a worker found wrong with the configuration, or if there are more than this machine allows.
        StoppedError: if the workers stopped as they were asked to.
        WorkerError: if a worker ended early; names its rank, its step and the reason.
    """
    steps = RawArray("q", count)
    lifeline, held = os.pipe()
    children: list[_Child] = []
    reaping()
    sys.stdout.flush()
    sys.stderr.flush()
    patience = _ORPHANED if stops else 0.0
    passing: AbstractContextManager[list[int]] = _passing_on(children) if stops else nullcontext([])
    try:
        with passing as received:
            waiting: AbstractContextManager[None] = deferred() if stops else nullcontext()
            with waiting, _within_limits(children, count):
                # One by one, so that an interruption finds all that were started.
                children.extend(_start(rank, target, folder, steps, lifeline, held, patience) for rank in range(count))
            _watch(children, steps)
        _check_stopped(children, interrupted=received[:1] == [signal.SIGINT])
    finally:
        _end(children)
        os.close(lifeline)
        os.close(held)


@contextmanager
def _within_limits(children: Sequence[_Child], count: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"worker {len(children)} of {count} cannot be started: {error}; use fewer workers, or allow this user more "
            "open files and processes (ulimit -n, ulimit -u)"
        ) from error


@contextmanager
def _passing_on(children: Sequence[_Child]) -> Iterator[list[int]]:
    asked: list[bool] = []

    def ask() -> bool:
        for child in children:
            if not child.ended and child.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGUSR1)
        asked.append(True)
        if len(asked) == 1 and os.isatty(2):  # not by print(), which this signal may have interrupted
            os.write(2, b"\nstopping: workers finish the step and save; Ctrl-C again ends them at once\n")
        return len(asked) > 1

    with listening(ask, end_at_once) as received:
        yield received


def _check_stopped(children: Sequence[_Child], *, interrupted: bool) -> None:
    for child in children:
        child.read_fault()
        if isinstance(child.fault, StoppedError):
            child.fault.interrupted = interrupted
            raise child.fault


def run_each(
    count: int, target: Target, folder: Path, at_once: int, ended: Callable[[int, SpardlError | None], None]
) -> None:
    """Runs ``target(number, heartbeat)`` for numbers 0 to ``count`` - 1, each in a process of its own.

    What becomes of one is nothing to the others. All end with this process, however it ends.

    Args:
        count: how many.
        target: the work.
        folder: where tracebacks of failed ones are written.
        at_once: how many run at the same time.
        ended: told each number that has ended, and why it failed.
    """
    steps = RawArray("q", count)
    lifeline, held = os.pipe()
    waiting, running = deque(range(count)), list[_Child]()
    reaping()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.popleft(), target, folder, steps, lifeline, held))
            wait([child.process.sentinel for child in running])
            for child in [child for child in running if child.ended]:
                running.remove(child)
                ended(child.rank, _close(child))
    finally:
        _end(running)
        os.close(lifeline)
        os.close(held)


def _close(child: _Child) -> SpardlError | None:
    """Why a worker that has ended did so, unless its work was done."""
    child.read_fault()
    fault = child.fault or (WorkerError(f"the process {_how(child)}") if child.process.exitcode else None)
    _end([child])
    return fault


def _start(
    rank: int,
    target: Target,
    folder: Path,
    steps: Sequence[int],
    lifeline: int,
    held: int,
    patience: float = 0.0,
) -> _Child:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (rank, target, folder, steps, theirs, lifeline, held, patience)
    process = context.Process(target=_work, args=arguments, name=f"worker {rank}")
    process.start()
    theirs.close()
    return _Child(rank, process, ours)


def _work(
    rank: int,
    target: Target,
    folder: Path,
    steps: Sequence[int],
    report: Connection,
    lifeline: int,
    held: int,
    patience: float,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(_END, _stop)
    os.close(held)
    # After a fork torch makes its pool of threads anew where it is first asked for, without a lock: of two threads that
    # ask at once, as those of two process groups do, one finds none and aborts ("Invalid thread pool").
    torch.set_num_threads(torch.get_num_threads())
    threading.Thread(target=_end_with_parent, args=(lifeline, patience), daemon=True).start()

    def heartbeat(step: int) -> None:
        steps[rank] = step  # type: ignore[index]

    try:
        target(rank, heartbeat)
    except _Stopped:
        leave(1)
    except StoppedError as stopped:
        _send(report, stopped)
        leave(0)
    except Exception as error:
        _send(report, fault_of(error, rank, folder))
        leave(1)
    leave(0)


def _send(report: Connection, fault: SpardlError) -> None:
    with contextlib.suppress(OSError):  # the parent may have died
        report.send((type(fault), str(fault)[:_LONGEST]))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


def leave(code: int) -> NoReturn:
    """Ends this process without the interpreter's own shutdown, in which broken libraries wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
            stream.flush()
    os._exit(code)


def fault_of(error: Exception, rank: int, folder: Path) -> SpardlError:
    """What a worker says of its end: the error, or if nobody raised it on purpose, one that names it.

    Args:
        error: the one being handled; its trace is written to a file.
        rank: of the worker.
        folder: of the run.
    """
    path = folder / "errors" / f"rank-{rank}.txt"
    see = f" (see {path})"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{first_line(error)}\n\n{traceback.format_exc()}".encode())
    except OSError:
        see = ""  # a full disk may be what went wrong
    if isinstance(error, SpardlError):
        return error
    return WorkerError(f"{type(error).__name__}: {first_line(error)}{see}")


def _end_with_parent(lifeline: int, patience: float) -> None:
    os.read(lifeline, 1)  # returns when the parent, which alone holds the other end, is gone
    if patience:
        os.kill(os.getpid(), signal.SIGUSR1)  # asks to stop, once the target listens
        time.sleep(patience)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(children: Sequence[_Child], steps: Sequence[int]) -> None:
    while True:
        # Taken first: who ends after this wakes the wait, who ended before is seen by the check.
        alive = _alive(children)
        if any(child.ended and child.process.exitcode for child in children):
            _await_end(children, _NOTICE)
            raise _blame(children, steps)
        if not alive:
            return
        wait(alive)


def _alive(children: Sequence[_Child]) -> list[int]:
    return [child.process.sentinel for child in children if not child.ended]


def _await_end(children: Sequence[_Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    while (alive := _alive(children)) and time.monotonic() < until:
        wait(alive, timeout=until - time.monotonic())


def _blame(children: Sequence[_Child], steps: Sequence[int]) -> SpardlError:
    """Finds the worker that failed by itself; the others failed because of it."""
    for child in children:
        child.read_fault()
    silent = [child for child in children if child.ended and child.process.exitcode and child.fault is None]
    if silent:
        # NCCL aborts processes that have lost a peer.
        return _died(min(silent, key=lambda child: child.process.exitcode == -signal.SIGABRT), steps)
    own = [child for child in children if child.fault and not isinstance(child.fault, PeerError)]
    if own:
        return _failed(own[0], steps)
    stuck = [child for child in children if not child.ended]
    if stuck:
        return WorkerError(f"worker {stuck[0].rank} did not answer any more at step {steps[stuck[0].rank]}")
    lost = next(child for child in children if child.fault)
    return _failed(lost, steps)


def _died(child: _Child, steps: Sequence[int]) -> WorkerError:
    return WorkerError(f"worker {child.rank} {_how(child)} at step {steps[child.rank]}; the other workers were stopped")


def _how(child: _Child) -> str:
    code = child.process.exitcode or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _failed(child: _Child, steps: Sequence[int]) -> SpardlError:
    assert child.fault
    if isinstance(child.fault, (ConfigError, TrainingError)):
        return child.fault  # found by all workers alike
    return WorkerError(f"worker {child.rank} failed at step {steps[child.rank]}: {child.fault}")


def _end(children: Sequence[_Child]) -> None:
    """Ends those that are left: by a request, so that displays and loggers are closed, then by force."""
    for child in children:
        if not child.ended and child.process.pid:
            os.kill(child.process.pid, _END)
    _await_end(children, _OBEY)
    for child in children:
        if not child.ended:
            child.process.kill()
        child.process.join()
        child.process.close()
        child.report.close()
