"""Those who watch a run on rank 0: the metrics file, and the interface of displays and loggers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from spardl.files import naming, write_atomically
from spardl.training.messages import first_line
from spardl.training.strict import to_json

__all__ = ["Bounded", "Guarded", "MetricsFile", "Observer", "attempt"]


class Observer:
    """Is told what happens. Reacts to nothing unless a method is overridden."""

    def begin(self, step: int, total: int) -> None:
        """Training begins after ``step`` of ``total`` steps."""

    def step(self, step: int) -> None:
        """So many steps are done."""

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """New figures; ``kind`` is ``train`` or ``eval``."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Training is over."""

    def close(self) -> None:
        """The run leaves, finished or not. Called once, last."""


class MetricsFile(Observer):
    """Appends one JSON object per event to ``metrics.jsonl``; a figure that is not finite is ``null``.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int, total: int) -> None:
        """Forgets what an interrupted run did after the checkpoint that is continued from."""
        if self._path.exists():
            kept = [line for line in self._path.read_bytes().splitlines() if _step_of(line) <= step]
            write_atomically(self._path, b"".join(line + b"\n" for line in kept))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Adds a line, in one write."""
        with naming(self._path), self._path.open("a") as file:
            file.write(to_json({"kind": kind, "step": step, **values}) + "\n")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off by a crash


class Guarded(Observer):
    """Lets an observer fail without stopping the run: one warning, and it is not called again.

    Args:
        make: makes the one that may fail, and may fail itself.
        what: how the warning calls it.
    """

    def __init__(self, make: Callable[[], Observer], what: str) -> None:
        self._observer: Observer | None = None
        self._what = what
        self._protect(lambda: setattr(self, "_observer", make()))

    def begin(self, step: int, total: int) -> None:
        """Passes on."""
        self._try("begin", step, total)

    def step(self, step: int) -> None:
        """Passes on."""
        self._try("step", step)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Passes on."""
        self._try("metrics", kind, step, values)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Passes on."""
        self._try("end", summary)

    def close(self) -> None:
        """Passes on."""
        self._try("close")

    def _try(self, event: str, *arguments: Any) -> None:
        if self._observer is not None:
            self._protect(partial(getattr(self._observer, event), *arguments))

    def _protect(self, action: Callable[[], Any]) -> None:
        if not attempt(action, self._what):
            self._observer = None


class Bounded(Observer):
    """Lets an observer work in a thread of its own and waits for it only so long. Of no use after an error.

    Args:
        make: makes the observer, in that thread.
        seconds: what a reaction may take; making and closing may take three times as long.

    Raises:
        TimeoutError: if making takes too long; so does each method.
    """

    def __init__(self, make: Callable[[], Observer], seconds: float) -> None:
        self._seconds = seconds
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()
        self._observer: Observer = self._wait_for(make, 3 * seconds)

    def _serve(self) -> None:
        while task := self._tasks.get():
            answer, action = task
            try:
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)

    def _wait_for(self, action: Callable[[], Any], seconds: float) -> Any:
        answer: Future[Any] = Future()
        self._tasks.put((answer, action))
        try:
            return answer.result(seconds)
        except Exception as error:
            self._tasks.put(None)
            if answer.done():
                raise
            raise TimeoutError(f"no answer within {seconds:g} seconds") from error

    def begin(self, step: int, total: int) -> None:
        """Passes on."""
        self._wait_for(partial(self._observer.begin, step, total), self._seconds)

    def step(self, step: int) -> None:
        """Passes on."""
        self._wait_for(partial(self._observer.step, step), self._seconds)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Passes on."""
        self._wait_for(partial(self._observer.metrics, kind, step, values), self._seconds)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Passes on."""
        self._wait_for(partial(self._observer.end, summary), self._seconds)

    def close(self) -> None:
        """Passes on."""
        self._wait_for(self._observer.close, 3 * self._seconds)
        self._tasks.put(None)


def attempt(action: Callable[[], Any], what: str) -> bool:
    """Does what a run does not depend on.

    Args:
        action: what to do.
        what: how a warning calls it.

    Returns:
        Whether it succeeded; if not, a warning was printed.
    """
    try:
        action()
    except (Exception, SystemExit) as error:  # rich exits when nobody reads its output any more
        with suppress(OSError):
            print(f"warning: {what} failed and is off from here on: {first_line(error)}", file=sys.stderr, flush=True)
        return False
    return True
