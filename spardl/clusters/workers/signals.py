"""The signals with which a scheduler, or a person, asks a process to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["ASKING", "AskedToStopError", "deferred", "end_at_once", "listening"]

# What asks a process to stop.
ASKING = frozenset({signal.SIGTERM, signal.SIGUSR1})

# Seconds in which further signals are echoes of the first, since those who stop all processes of a job often tell some
# of them twice.
_ECHO = 1.0


class AskedToStopError(KeyboardInterrupt):
    """A signal asked to stop before there were workers."""


def end_at_once() -> NoReturn:
    """Does what Ctrl-C does: for those who were asked twice."""
    raise KeyboardInterrupt


@contextmanager
def listening(ask: Callable[[], bool], again: Callable[[], None]) -> Iterator[None]:
    """Lets the signals that ask to stop ask; for the main thread.

    Args:
        ask: asks, and answers whether that had been done before.
        again: called if it had, unless that was a moment ago.
    """
    times: list[float] = []

    def heard(signum: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        if ask() and (len(times) == 1 or times[-1] - times[0] > _ECHO):
            again()

    before = {signum: signal.signal(signum, heard) for signum in ASKING}
    unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Lets these signals wait, in this process and in those that it forks, until they are listened to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
