"""Says what is going on while it takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Announcement", "announced", "clock"]

# Seconds after which something takes long, for who reads a file and not a terminal.
_LONG = 10.0
_CLEAR = "\r\x1b[K"


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Announcement:
    """A thread that names what is going on: on a terminal at once, in a line that goes away; else if it takes long.

    Args:
        what: is going on.
    """

    def __init__(self, what: str) -> None:
        self._what, self._over = what, threading.Event()
        tell = self._tick if sys.stdout.isatty() else self._print
        self._thread = threading.Thread(target=tell, name="spardl-announcing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """It is over. The thread has ended afterwards: this process may be forked."""
        self._over.set()
        self._thread.join()

    def _print(self) -> None:
        if not self._over.wait(_LONG):
            with suppress(OSError):
                print(f"{self._what} ...", flush=True)

    def _tick(self) -> None:
        began, wait = time.perf_counter(), 0.3
        with suppress(OSError):
            while not self._over.wait(wait):
                print(f"{_CLEAR}{self._what} {clock(time.perf_counter() - began)}", end="", flush=True)
                wait = 1.0
            if wait == 1.0:
                print(_CLEAR, end="", flush=True)


@contextmanager
def announced(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Names what goes on inside.

    Args:
        what: goes on.
        quiet: whether another process says it.
    """
    announcement = None if quiet else Announcement(what)
    try:
        yield
    finally:
        if announcement:
            announcement.close()
