"""Progress display of a run: a live bar on a terminal, otherwise one line per event; and the console log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from trainer.observers import Observer
from trainer.report import rows
from trainer.runs import Run

__all__ = [
    "Announcement",
    "LineDisplay",
    "LogFile",
    "TerminalDisplay",
    "clock",
    "make_display",
    "show_activity",
    "table_console",
]


# Delay before an activity is printed when stdout is not a terminal, in seconds.
_LONG = 10.0
_CLEAR = "\r\x1b[K"


def clock(seconds: float) -> str:
    """Formats seconds as M:SS, or H:MM:SS from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table_console(width: int) -> Console:
    """Returns a console that prints tables; in files and pipes, lines have at most ``width`` characters."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


class Announcement:
    """A thread that shows the current activity: on a terminal in a transient line, elsewhere only if it takes long.

    Args:
        what: Name of the activity, such as "preparing the data".
    """

    def __init__(self, what: str) -> None:
        self._what, self._over = what, threading.Event()
        tell = self._tick if sys.stdout.isatty() else self._print
        self._thread = threading.Thread(target=tell, name="spardl-announcing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, so that this process can be forked."""
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
            # Nothing was printed if the activity ended within the first wait.
            if wait == 1.0:
                print(_CLEAR, end="", flush=True)


@contextmanager
def show_activity(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows an activity while the body of the ``with`` statement runs.

    Args:
        what: Name of the activity, such as "preparing the data".
        quiet: Whether to show nothing, because another process shows the activity.
    """
    announcement = None if quiet else Announcement(what)
    try:
        yield
    finally:
        if announcement:
            announcement.close()


class Eta:
    """Estimates the remaining time from the steps of this process, except its first one, which is slower."""

    def __init__(self) -> None:
        self._first = 0
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Sets the number of steps that are done when training starts or resumes."""
        self._first = step + 1

    def left(self, step: int, total: int) -> str:
        """Returns the time that the steps from ``step`` to ``total`` will take, as text; ``-:--`` if not known yet.

        It includes the time for evaluations and checkpoints.
        """
        # The first step compiles kernels and warms up caches.
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
    # Seconds per phase become one total with shares, which fits on a line.
    split = {name.removeprefix("seconds/"): v for name, v in shown.items() if name.startswith("seconds/")}
    whole = sum(split.values())
    if whole:
        shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in split.items() if value / whole >= 0.01)
        parts.append(f"{1e3 * whole:.0f} ms/step ({shares})")
    return (f"{kind}: " if kind != "train" else "") + "  ".join(parts)


class LineDisplay(Observer):
    """Prints one line per event, but training metrics not more often than every ``interval`` seconds.

    Args:
        interval: Minimum time between a line with training metrics and the line with metrics before it, in seconds.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._eta = Eta()
        self._left = "-:--"
        self._total = 0
        self._last = 0.0
        self._announcement: Announcement | None = None
        self._what, self._since, self._shown = "", 0.0, 0.0

    def phase(self, what: str | None) -> None:
        """Prints the activity ``what`` if it takes longer than ten seconds; ``None`` ends the activity."""
        if self._announcement:
            self._announcement.close()
        self._announcement = Announcement(what) if what else None
        self._what, self._since = what or "", time.perf_counter()
        self._shown = self._since

    def progress(self, fraction: float) -> None:
        """Prints the completed fraction of a long activity, at most once every ten seconds."""
        now = time.perf_counter()
        if now - self._shown >= _LONG:
            self._shown = now
            self._print(f"{self._what}: {fraction:.0%} after {clock(now - self._since)}")

    def close(self) -> None:
        """Ends the current activity."""
        self.phase(None)

    def _print(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        """Prints a line for the user."""
        self.phase(None)
        self._print(text)

    def begin(self, step: int, total: int) -> None:
        """Prints the step that training starts or resumes at."""
        self._eta.begin(step)
        self._total = total
        self._print(f"training: step {step} of {total}")

    def step(self, step: int) -> None:
        """Updates the remaining time, which the next line with metrics shows."""
        self._left = self._eta.left(step, self._total)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Prints a line with metrics; skips training metrics if the last line is too recent."""
        now = time.perf_counter()
        # Evaluations are always printed.
        if kind == "train" and now - self._last < self._interval:
            return
        self._last = now
        self._print(f"step {step}/{self._total}  {_figures(kind, values)}  left {self._left}")


class LogFile(LineDisplay):
    """Writes the lines of a run to its console log, whether or not stdout is a terminal.

    Args:
        run: Run whose console log is written.
        simulated: Whether the cluster is simulated, so that its times are virtual.
        caveats: Warnings for readers of the results.
    """

    def __init__(self, run: Run, simulated: bool, caveats: Sequence[str] = ()) -> None:
        super().__init__()
        self._run, self._simulated, self._caveats = run, simulated, caveats

    def _print(self, text: str) -> None:
        self._run.log(text)

    def phase(self, what: str | None) -> None:
        """Writes nothing, because activities are only announced on the console."""

    def progress(self, fraction: float) -> None:
        """Writes nothing, because progress is only shown on the console."""

    def warning(self, text: str) -> None:
        """Writes a warning to the log."""
        self._print(f"warning: {text}")

    def end(self, summary: Mapping[str, Any]) -> None:
        """Writes the report of the finished run to the log."""
        for name, text in rows(summary, self._simulated):
            self._print(f"{name}: {text}")
        for caveat in self._caveats:
            self._print(f"beware: {caveat}")


class _State(ProgressColumn):
    """Column with the current activity and its duration, or the remaining time during training."""

    def render(self, task: Task) -> Text:
        """Renders the column; called whenever the bar is redrawn."""
        what, since = task.fields["phase"]
        part = task.fields["part"]
        return Text(f"{what} {part}{clock(time.perf_counter() - since)}" if what else f"left {task.fields['left']}")


class TerminalDisplay(Observer):
    """A progress bar, with a line per evaluation above it.

    Args:
        console: Terminal to draw on.
    """

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20, table_column=Column(no_wrap=True)),
            _State(table_column=Column(no_wrap=True)),
            # This column shrinks first on a narrow terminal.
            TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        )
        self._progress = Progress(*columns, console=console, expand=True)
        self._eta = Eta()
        self._task: TaskID | None = None
        self._total = 0

    def note(self, text: str) -> None:
        """Prints a line for the user above the bar."""
        self._progress.console.print(text, highlight=False)

    def begin(self, step: int, total: int) -> None:
        """Draws the bar, with ``step`` of ``total`` steps done."""
        self._eta.begin(step)
        self._total = total
        self._progress.update(self._draw(), total=total, completed=step)

    def phase(self, what: str | None) -> None:
        """Shows the activity ``what`` and its duration next to the bar; ``None`` shows the remaining time instead."""
        self._progress.update(self._draw(), phase=(what, time.perf_counter()), part="")

    def progress(self, fraction: float) -> None:
        """Shows the completed fraction of the current activity next to the bar."""
        self._progress.update(self._draw(), part=f"{fraction:.0%} ")

    def _draw(self) -> TaskID:
        # Drawn lazily: a phase may be announced before the first step is known.
        if self._task is None:
            self._task = self._progress.add_task("", total=None, left="-:--", phase=(None, 0.0), part="", figures="")
            self._progress.start()
        return self._task

    def step(self, step: int) -> None:
        """Advances the bar to ``step`` steps, and updates the remaining time."""
        if self._task is not None:
            self._progress.update(self._task, completed=step, left=self._eta.left(step, self._total))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Shows training metrics next to the bar and evaluations above it."""
        if kind == "train" and self._task is not None:
            self._progress.update(self._task, figures=_figures(kind, values))
        else:
            self._progress.console.print(f"step {step}  {_figures(kind, values)}", highlight=False)

    def close(self) -> None:
        """Removes the bar."""
        self._progress.stop()


def make_display() -> Observer:
    """Builds the display that suits stdout: a bar on a terminal, otherwise lines."""
    console = Console()
    return TerminalDisplay(console) if console.is_terminal else LineDisplay()
