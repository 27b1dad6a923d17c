"""Worker processes of this machine: forked from one that has everything imported, watched, and ended together.

A fork after the imports costs milliseconds where a fresh interpreter with torch costs a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from spardl.errors import ConfigError, PeerError, SpardlError, WorkerError
from spardl.files import write_atomically

__all__ = ["run_processes"]

_GRACE = 5.0


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


def run_processes(count: int, target: Callable[[int, Callable[[int], None]], None], folder: Path) -> None:
    """Runs ``target(rank, heartbeat)`` in ``count`` processes until all have returned.

    If one fails, the others are ended: they get a few seconds to notice by themselves, then they are killed.

    Args:
        count: how many.
        target: the work; it reports the steps it has done to ``heartbeat``.
        folder: where tracebacks of failed workers are written.

    Raises:
        ConfigError: what a worker found wrong with the configuration.
        WorkerError: if a worker ended early; names its rank, its step and the reason.
    """
    context = multiprocessing.get_context("fork")
    steps = RawArray("q", count)
    lifeline, held = os.pipe()
    children = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(rank, target, folder, steps, theirs, lifeline, held), name=f"worker {rank}"
        )
        process.start()
        theirs.close()
        children.append(_Child(rank, process, ours))
    try:
        _watch(children, steps)
    finally:
        _kill(children)
        os.close(lifeline)
        os.close(held)


def _work(
    rank: int,
    target: Callable[[int, Callable[[int], None]], None],
    folder: Path,
    steps: Sequence[int],
    report: Connection,
    lifeline: int,
    held: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    os.close(held)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()

    def heartbeat(step: int) -> None:
        steps[rank] = step  # type: ignore[index]

    try:
        target(rank, heartbeat)
    except SpardlError as error:
        _leave_trace(folder, rank)
        report.send((type(error), str(error)))
        _exit(1)
    except Exception as error:
        trace = _leave_trace(folder, rank)
        report.send((WorkerError, f"{type(error).__name__}: {str(error).splitlines()[0]} (see {trace})"))
        _exit(1)
    _exit(0)


def _exit(code: int) -> None:
    # Without the interpreter's own shutdown: a broken process group may wait in it for its peers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_trace(folder: Path, rank: int) -> Path:
    path = folder / "errors" / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, traceback.format_exc().encode())
    return path


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the parent, which alone holds the other end, is gone
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(children: Sequence[_Child], steps: Sequence[int]) -> None:
    while alive := _alive(children):
        wait(alive)
        if any(child.ended and child.process.exitcode for child in children):
            _let_others_end(children)
            raise _blame(children, steps)
    if any(child.process.exitcode for child in children):
        raise _blame(children, steps)


def _alive(children: Sequence[_Child]) -> list[int]:
    return [child.process.sentinel for child in children if not child.ended]


def _let_others_end(children: Sequence[_Child]) -> None:
    until = time.monotonic() + _GRACE
    while time.monotonic() < until:
        if not (alive := _alive(children)):
            return
        wait(alive, timeout=until - time.monotonic())


def _blame(children: Sequence[_Child], steps: Sequence[int]) -> SpardlError:
    """Finds the worker that failed by itself; the others failed because of it."""
    for child in children:
        child.read_fault()
    silent = [child for child in children if child.ended and child.process.exitcode and child.fault is None]
    if silent:
        return _died(silent[0], steps)
    own = [child for child in children if child.fault and not isinstance(child.fault, PeerError)]
    if own:
        return _failed(own[0], steps)
    stuck = [child for child in children if not child.ended]
    if stuck:
        return WorkerError(f"worker {stuck[0].rank} did not answer any more at step {steps[stuck[0].rank]}")
    lost = next(child for child in children if child.fault)
    return _failed(lost, steps)


def _died(child: _Child, steps: Sequence[int]) -> WorkerError:
    code = child.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return WorkerError(f"worker {child.rank} {how} at step {steps[child.rank]}; the other workers were stopped")


def _failed(child: _Child, steps: Sequence[int]) -> SpardlError:
    assert child.fault
    if isinstance(child.fault, ConfigError):
        return child.fault
    return WorkerError(f"worker {child.rank} failed at step {steps[child.rank]}: {child.fault}")


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        if not child.ended:
            child.process.kill()
        child.process.join()
        child.report.close()
