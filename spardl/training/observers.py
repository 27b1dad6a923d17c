"""Those who watch a run on rank 0: the metrics file, and the interface of displays and loggers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from spardl.basics.files import TEXT_BYTES, naming, read_regular, write_atomically
from spardl.basics.messages import first_line, warn
from spardl.training.strict import to_json

__all__ = ["Beside", "Bounded", "Guarded", "MetricsFile", "Observer", "attempt"]


class Observer:
    """Is told what happens. Reacts to nothing unless a method is overridden."""

    def begin(self, step: int, total: int) -> None:
        """Training begins after ``step`` of ``total`` steps."""

    def phase(self, what: str | None) -> None:
        """This is going on from now on; ``None``: training as usual."""

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
            kept = [line for line in read_regular(self._path, TEXT_BYTES).splitlines() if _step_of(line) <= step]
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


class _Passing(Observer):
    """Passes all events on, in a way of its own."""

    def _pass(self, event: str, *arguments: Any) -> None:
        raise NotImplementedError

    def begin(self, step: int, total: int) -> None:
        """Passes on."""
        self._pass("begin", step, total)

    def phase(self, what: str | None) -> None:
        """Passes on."""
        self._pass("phase", what)

    def step(self, step: int) -> None:
        """Passes on."""
        self._pass("step", step)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Passes on."""
        self._pass("metrics", kind, step, values)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Passes on."""
        self._pass("end", summary)

    def close(self) -> None:
        """Passes on."""
        self._pass("close")


class Guarded(_Passing):
    """Lets an observer fail without stopping the run: one warning, and it is not called again.

    Args:
        make: makes the one that may fail, and may fail itself.
        what: how the warning calls it.
    """

    def __init__(self, make: Callable[[], Observer], what: str) -> None:
        self._observer: Observer | None = None
        self._what = what
        self._protect(lambda: setattr(self, "_observer", make()))

    def _pass(self, event: str, *arguments: Any) -> None:
        if self._observer is not None:
            self._protect(partial(getattr(self._observer, event), *arguments))

    def _protect(self, action: Callable[[], Any]) -> None:
        if not attempt(action, self._what):
            self._observer = None


class Bounded(_Passing):
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

    def _pass(self, event: str, *arguments: Any) -> None:
        self._wait_for(partial(getattr(self._observer, event), *arguments), self._seconds)

    def close(self) -> None:
        """Passes on."""
        self._wait_for(self._observer.close, 3 * self._seconds)
        self._tasks.put(None)


class Beside(_Passing):
    """Makes an observer, and tells it everything, in a thread of its own: only closing waits for it.

    What happens before it is made, it is told then. It must neither fail nor take for ever: see :class:`Guarded` and
    :class:`Bounded`.

    Args:
        make: makes the observer, in that thread.
    """

    def __init__(self, make: Callable[[], Observer]) -> None:
        self._events: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._tell, args=(make,), daemon=True)
        self._thread.start()

    def _tell(self, make: Callable[[], Observer]) -> None:
        observer, event = make(), ""
        while event != "close":
            event, arguments = self._events.get()
            getattr(observer, event)(*arguments)

    def _pass(self, event: str, *arguments: Any) -> None:
        self._events.put((event, arguments))

    def close(self) -> None:
        """Passes on, and waits until everything has been told."""
        super().close()
        self._thread.join()


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
        warn(f"{what} failed and is off from here on: {first_line(error)}")
        return False
    return True
