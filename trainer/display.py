"""What a person sees of a run: a live bar on a terminal, one line per event elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from trainer.observers import Observer

__all__ = ["Announcement", "LineDisplay", "TerminalDisplay", "announced", "clock", "make_display"]


# Says what is going on while it takes long.


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


class Eta:
    """Time left, from the steps of this process so far; its first step, which warms up, is left out."""

    def __init__(self) -> None:
        self._first = 0
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Starts after ``step`` steps."""
        self._first = step + 1

    def left(self, step: int, total: int) -> str:
        """Time left after ``step`` of ``total`` steps, evaluations and checkpoints included."""
        if step <= self._first:
            self._since = time.perf_counter()
            return "-:--"
        per_step = (time.perf_counter() - self._since) / (step - self._first)
        return clock((total - step) * per_step)


def _figures(kind: str, values: Mapping[str, float]) -> str:
    shown = {name: value for name, value in values.items() if name not in ("time", "seconds/total")}
    parts = [f"{name} {value:.4g}" for name, value in shown.items() if not name.startswith(("seconds/", "bytes/"))]
    if sent := shown.get("bytes/total"):
        parts.append(f"sent {sent / 1e6:.4g} MB")
    split = {name.removeprefix("seconds/"): v for name, v in shown.items() if name.startswith("seconds/")}
    whole = sum(split.values())
    if whole:
        shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in split.items() if value / whole >= 0.01)
        parts.append(f"{1e3 * whole:.0f} ms/step ({shares})")
    return (f"{kind}: " if kind != "train" else "") + "  ".join(parts)


class LineDisplay(Observer):
    """One line per event, at most one of training every few seconds.

    Args:
        interval: least seconds between two lines of training.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._eta = Eta()
        self._left = "-:--"
        self._total = 0
        self._last = 0.0
        self._announcement: Announcement | None = None

    def phase(self, what: str | None) -> None:
        """Prints it, if it takes long."""
        if self._announcement:
            self._announcement.close()
        self._announcement = Announcement(what) if what else None

    def close(self) -> None:
        """Nothing goes on any more."""
        self.phase(None)

    def begin(self, step: int, total: int) -> None:
        """Says where it starts."""
        self._eta.begin(step)
        self._total = total
        print(f"training: step {step} of {total}", flush=True)

    def step(self, step: int) -> None:
        """Keeps the time."""
        self._left = self._eta.left(step, self._total)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Prints a line, unless it comes too soon after the last one."""
        now = time.perf_counter()
        if kind == "train" and now - self._last < self._interval:
            return
        self._last = now
        print(f"step {step}/{self._total}  {_figures(kind, values)}  left {self._left}", flush=True)


class _State(ProgressColumn):
    """What is going on, and for how long; in training as usual, the time left."""

    def render(self, task: Task) -> Text:
        """Writes it anew, whenever the bar is drawn."""
        what, since = task.fields["phase"]
        return Text(f"{what} {clock(time.perf_counter() - since)}" if what else f"left {task.fields['left']}")


class TerminalDisplay(Observer):
    """A bar that moves at every step, and a line per evaluation above it.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20, table_column=Column(no_wrap=True)),
            _State(table_column=Column(no_wrap=True)),
            # On a narrow terminal, this is what gives way.
            TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        )
        self._progress = Progress(*columns, console=console, expand=True)
        self._eta = Eta()
        self._task: TaskID | None = None
        self._total = 0

    def begin(self, step: int, total: int) -> None:
        """Draws the bar."""
        self._eta.begin(step)
        self._total = total
        self._progress.update(self._draw(), total=total, completed=step)

    def phase(self, what: str | None) -> None:
        """Names it beside the bar, with the time since then."""
        self._progress.update(self._draw(), phase=(what, time.perf_counter()))

    def _draw(self) -> TaskID:
        if self._task is None:
            self._task = self._progress.add_task("", total=None, left="-:--", phase=(None, 0.0), figures="")
            self._progress.start()
        return self._task

    def step(self, step: int) -> None:
        """Moves the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=step, left=self._eta.left(step, self._total))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Shows training figures beside the bar and evaluations above it."""
        if kind == "train" and self._task is not None:
            self._progress.update(self._task, figures=_figures(kind, values))
        else:
            self._progress.console.print(f"step {step}  {_figures(kind, values)}", highlight=False)

    def close(self) -> None:
        """Takes the bar down."""
        self._progress.stop()


def make_display() -> Observer:
    """The display that suits where the output goes."""
    console = Console()
    return TerminalDisplay(console) if console.is_terminal else LineDisplay()
