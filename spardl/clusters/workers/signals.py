"""The signals with which a scheduler, or a person, asks a process to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["ANY", "ASKING", "AskedToStopError", "deferred", "end_at_once", "listening", "reaping"]

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
