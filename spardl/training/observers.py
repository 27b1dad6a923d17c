"""Those who watch a run on rank 0: the metrics file, and the interface of displays and loggers."""

from __future__ import annotations

import json
import sys
from abc import ABC
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["Guarded", "MetricsFile", "Observer"]


class Observer(ABC):  # noqa: B024 - every reaction is optional
    """Is told what happens. Reacts to nothing unless a method is overridden."""

    def begin(self, step: int, total: int) -> None:  # noqa: B027
        """Training begins after ``step`` of ``total`` steps."""

    def step(self, step: int) -> None:  # noqa: B027
        """So many steps are done."""

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:  # noqa: B027
        """New figures; ``kind`` is ``train`` or ``eval``."""

    def end(self, summary: Mapping[str, Any]) -> None:  # noqa: B027
        """Training is over."""

    def close(self) -> None:  # noqa: B027
        """The run leaves, finished or not. Called once, last."""


class MetricsFile(Observer):
    """Appends one JSON object per event to ``metrics.jsonl``.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int, total: int) -> None:
        """Forgets what an interrupted run did after the checkpoint that is continued from."""
        if self._path.exists():
            lines = self._path.read_text().splitlines()
            self._path.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Adds a line, in one write."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
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
        try:
            action()
        except Exception as error:
            self._observer = None
            reason = str(error).splitlines()[:1] or [type(error).__name__]
            print(f"warning: {self._what} failed and is off from here on: {reason[0]}", file=sys.stderr, flush=True)
