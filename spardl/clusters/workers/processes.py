"""Starts worker processes on this machine, watches them, and stops them together.

Processes are forked after all imports, which takes milliseconds; a new interpreter would need a second to import torch.
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
    "ALL_STOP_SIGNALS",
    "STOP_SIGNALS",
    "StopRequestedError",
    "exit_now",
    "fault_of",
    "handling_signals",
    "interrupt_now",
    "restore_sigchld",
    "run_each",
    "run_processes",
    "signals_blocked",
]


# Signals by which a scheduler or a user requests a stop.


# Stop requests of a scheduler or a closed terminal.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
# All stop requests, including Ctrl-C.
ALL_STOP_SIGNALS = STOP_SIGNALS | {signal.SIGINT}
# Signals that stay ignored if the parent ignores them, as nohup and shells with background jobs do.
_INHERITED = frozenset({signal.SIGHUP, signal.SIGINT})

# Further signals within these seconds count as repetitions of the first one, because schedulers often signal some
# processes of a job twice.
_ECHO = 1.0


class StopRequestedError(KeyboardInterrupt):
    """A stop request arrived before the workers were started."""


def interrupt_now() -> NoReturn:
    """Raises ``KeyboardInterrupt``, as a second stop request does."""
    raise KeyboardInterrupt


@contextmanager
def handling_signals(
    ask: Callable[[], bool], again: Callable[[], None], signals: Collection[signal.Signals] = ALL_STOP_SIGNALS
) -> Iterator[list[int]]:
    """Context manager that handles stop signals inside the ``with`` block; enter it in the main thread.

    Args:
        ask: Function that requests the stop; it returns whether the stop had already been requested.
        again: Function that is called on a further signal after that, unless it arrives within a second of the end of
            the first request.
        signals: Signals to handle. SIGHUP and SIGINT stay ignored if the process ignores them.

    Yields:
        A list of the numbers of the signals received so far, in order; it grows with each signal.
    """
    received: list[int] = []
    handled: list[float] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        arrived, first = time.monotonic(), not received
        received.append(signum)
        requested = ask()
        # On a busy machine, the first call may take longer than the repetitions that wait for its end, or interrupt it.
        handled.append(time.monotonic())
        if requested and (first or arrived - handled[0] > _ECHO):
            again()

    ignored = {signum for signum in _INHERITED if signal.getsignal(signum) == signal.SIG_IGN}
    before = {signum: signal.signal(signum, handle) for signum in {*signals} - ignored}
    unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL_STOP_SIGNALS)
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Context manager that delays stop signals to its end; forks delay them until they enter ``handling_signals``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_sigchld() -> None:
    """Restores the default action of SIGCHLD if the parent process ignored it; call it in the main thread.

    While SIGCHLD is ignored, the kernel discards the exit codes of child processes. ``multiprocessing`` then treats a
    child that has ended as running, and ``subprocess`` reports exit code 0 for a child that failed.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


# Called with a rank and a function that reports completed steps.
Target: TypeAlias = Callable[[int, Callable[[int], None]], None]

# Seconds for the workers to notice that a peer is lost, and then to follow a request to end.
_NOTICE, _OBEY = 5.0, 2.0
# Seconds for the workers to finish their step and save a checkpoint after their parent died.
_ORPHANED = 60.0
# The parent's request to end at once. It differs from the scheduler's signals, which also reach the workers.
_END = signal.SIGUSR2
# Longest message of a worker: it must fit into a pipe that is read only after the worker has ended.
_LONGEST = 4000


class _Stopped(BaseException):
    """The parent requested this worker to end."""


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
        """Reads the error that the worker has reported, if any; call this once."""
        if self.fault is None and self.report.poll():
            try:
                kind, message = self.report.recv()
            except EOFError:
                return
            self.fault = kind(message)


def run_processes(count: int, target: Target, folder: Path, *, stops: bool = False) -> None:
    """Runs ``target(rank, heartbeat)`` in ``count`` processes until all have returned.

    If one process fails, the others have a few seconds to notice this and to end, and are then killed.

    Args:
        count: Number of processes.
        target: Function to run; it passes the number of completed steps to its argument ``heartbeat``.
        folder: Folder for the tracebacks of failed workers.
        stops: Whether the target handles stop signals. If so, this process forwards them, and a second signal ends the
            workers at once. If this process dies, the workers receive a stop request.

    Raises:
        ConfigError: If a worker rejects the configuration, or this machine cannot run that many processes.
        StoppedError: If the workers stopped on request.
        WorkerError: If a worker ended early; names its rank, its step and the reason.
    """
    steps = RawArray("q", count)
    lifeline, held = os.pipe()
    children: list[_Child] = []
    restore_sigchld()
    sys.stdout.flush()
    sys.stderr.flush()
    patience = _ORPHANED if stops else 0.0
    passing: AbstractContextManager[list[int]] = _forwarding_signals(children) if stops else nullcontext([])
    try:
        with passing as received:
            waiting: AbstractContextManager[None] = signals_blocked() if stops else nullcontext()
            with waiting, _explaining_limits(children, count):
                # Extended one by one, so that an interruption finds every started process.
                children.extend(_start(rank, target, folder, steps, lifeline, held, patience) for rank in range(count))
            _watch(children, steps)
        _check_stopped(children, interrupted=received[:1] == [signal.SIGINT])
    finally:
        _end(children)
        os.close(lifeline)
        os.close(held)


@contextmanager
def _explaining_limits(children: Sequence[_Child], count: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"worker {len(children)} of {count} cannot be started: {error}; use fewer workers, or raise the limits of "
            "open files and processes (ulimit -n, ulimit -u)"
        ) from error


@contextmanager
def _forwarding_signals(children: Sequence[_Child]) -> Iterator[list[int]]:
    asked: list[bool] = []

    def ask() -> bool:
        for child in children:
            if not child.ended and child.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGUSR1)
        asked.append(True)
        if len(asked) == 1 and os.isatty(2):  # os.write, because the signal may have interrupted a print()
            os.write(2, b"\nstopping: workers finish the step and save; press Ctrl-C again to end them at once\n")
        return len(asked) > 1

    with handling_signals(ask, interrupt_now) as received:
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
    """Runs ``target(number, heartbeat)`` for the numbers 0 to ``count`` - 1, each in a separate process.

    The processes are independent: if one fails, the others continue. All of them end if this process ends.

    Args:
        count: Number of processes.
        target: Function to run; it passes the number of completed steps to its argument ``heartbeat``.
        folder: Folder for the tracebacks of failed processes.
        at_once: Largest number of processes that run at the same time.
        ended: Callback that receives the number of a process that has ended, and its error or ``None``.
    """
    steps = RawArray("q", count)
    lifeline, held = os.pipe()
    waiting, running = deque(range(count)), list[_Child]()
    restore_sigchld()
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
    """Returns the error of an ended worker, if it failed, and releases its resources."""
    child.read_fault()
    fault = child.fault or (WorkerError(f"the process {_exit_reason(child)}") if child.process.exitcode else None)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the parent as well, which ends its workers
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(_END, _stop)
    os.close(held)
    # After a fork, torch recreates its thread pool on first use, without a lock. If two threads do so at the same time,
    # as those of two process groups may, one aborts ("Invalid thread pool"). So it is created here.
    torch.set_num_threads(torch.get_num_threads())
    threading.Thread(target=_end_with_parent, args=(lifeline, patience), daemon=True).start()

    def heartbeat(step: int) -> None:
        steps[rank] = step  # type: ignore[index]

    try:
        target(rank, heartbeat)
    except _Stopped:
        exit_now(1)
    except StoppedError as stopped:
        _send(report, stopped)
        exit_now(0)
    except Exception as error:
        _send(report, fault_of(error, rank, folder))
        exit_now(1)
    exit_now(0)


def _send(report: Connection, fault: SpardlError) -> None:
    with contextlib.suppress(OSError):  # the parent may have died
        report.send((type(fault), str(fault)[:_LONGEST]))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


def exit_now(code: int) -> NoReturn:
    """Ends this process without interpreter shutdown, in which some libraries hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may have ended
            stream.flush()
    os._exit(code)


def fault_of(error: Exception, rank: int, folder: Path) -> SpardlError:
    """Returns the error that a worker reports: ``error`` itself if it is a ``SpardlError``, else a ``WorkerError``.

    Args:
        error: Error that the worker raised; its traceback is written to the file ``errors/rank-N.txt`` in ``folder``.
        rank: Rank of the worker.
        folder: Folder of the run.
    """
    path = folder / "errors" / f"rank-{rank}.txt"
    see = f" (see {path})"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{first_line(error)}\n\n{traceback.format_exc()}".encode())
    except OSError:
        see = ""  # the disk may be full
    if isinstance(error, SpardlError):
        return error
    return WorkerError(f"{type(error).__name__}: {first_line(error)}{see}")


def _end_with_parent(lifeline: int, patience: float) -> None:
    os.read(lifeline, 1)  # returns when the parent ends, because only it holds the other end
    if patience:
        os.kill(os.getpid(), signal.SIGUSR1)  # a stop request, which stays pending until the target handles it
        time.sleep(patience)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(children: Sequence[_Child], steps: Sequence[int]) -> None:
    while True:
        # Listed first: a child that ends later wakes the wait, and one that ended earlier is found by the check.
        alive = _alive(children)
        if any(child.ended and child.process.exitcode for child in children):
            _await_end(children, _NOTICE)
            raise _first_failure(children, steps)
        if not alive:
            return
        wait(alive)


def _alive(children: Sequence[_Child]) -> list[int]:
    return [child.process.sentinel for child in children if not child.ended]


def _await_end(children: Sequence[_Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    while (alive := _alive(children)) and time.monotonic() < until:
        wait(alive, timeout=until - time.monotonic())


def _first_failure(children: Sequence[_Child], steps: Sequence[int]) -> SpardlError:
    """Finds the worker that failed first; the others failed because of it."""
    for child in children:
        child.read_fault()
    silent = [child for child in children if child.ended and child.process.exitcode and child.fault is None]
    if silent:
        # NCCL aborts a process that has lost a peer, so SIGABRT is the least likely cause.
        return _silent_exit(min(silent, key=lambda child: child.process.exitcode == -signal.SIGABRT), steps)
    own = [child for child in children if child.fault and not isinstance(child.fault, PeerError)]
    if own:
        return _failure_of(own[0], steps)
    stuck = [child for child in children if not child.ended]
    if stuck:
        return WorkerError(f"worker {stuck[0].rank} stopped answering at step {steps[stuck[0].rank]}")
    lost = next(child for child in children if child.fault)
    return _failure_of(lost, steps)


def _silent_exit(child: _Child, steps: Sequence[int]) -> WorkerError:
    return WorkerError(
        f"worker {child.rank} {_exit_reason(child)} at step {steps[child.rank]}; the other workers were stopped"
    )


def _exit_reason(child: _Child) -> str:
    code = child.process.exitcode or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _failure_of(child: _Child, steps: Sequence[int]) -> SpardlError:
    assert child.fault
    if isinstance(child.fault, (ConfigError, TrainingError)):
        return child.fault  # all workers raise the same error
    return WorkerError(f"worker {child.rank} failed at step {steps[child.rank]}: {child.fault}")


def _end(children: Sequence[_Child]) -> None:
    """Ends the remaining workers: first by a request, so that progress displays and loggers close, then by force."""
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
