"""Observers, which receive the events of a run on rank 0: metrics file, loggers, and wrappers that isolate failures."""

from __future__ import annotations

import glob
import json
import netrc
import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from spardl.basics.checks import check_seconds
from spardl.basics.errors import ConfigError, first_line, warn
from spardl.basics.files import TEXT_BYTES, naming_errors, read_regular, write_atomically
from trainer.report import environment
from trainer.runs import Run, to_json

__all__ = [
    "BackgroundObserver",
    "Bounded",
    "Forwarder",
    "Guarded",
    "Logger",
    "MetricsFile",
    "NoLogger",
    "Observer",
    "Wandb",
    "attempt",
    "logged_in",
    "without_run_id",
]


class Observer:
    """Receives the events of a run; the methods do nothing unless overridden."""

    def begin(self, step: int, total: int) -> None:
        """Called when training starts or continues after ``step`` of ``total`` steps."""

    def note(self, text: str) -> None:
        """Called before training starts, with a line of ``text`` for the user."""

    def warning(self, text: str) -> None:
        """Called when the warning ``text`` was printed during training."""

    def phase(self, what: str | None) -> None:
        """Called when an activity, such as an evaluation, begins: ``what`` is its name, or ``None`` for training."""

    def progress(self, fraction: float) -> None:
        """Called when ``fraction`` of the current activity is done."""

    def step(self, step: int) -> None:
        """Called when ``step`` steps are done."""

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Called with new metrics after ``step`` steps.

        Args:
            kind: ``train``, ``eval``, or ``restart`` for a run that resumes at another world size.
            step: Number of steps done.
            values: Metrics by name.
        """

    def end(self, summary: Mapping[str, Any]) -> None:
        """Called when training has finished, with its ``summary``."""

    def close(self) -> None:
        """Called once, as the last event, when the run ends, whether finished or not."""


class MetricsFile(Observer):
    """Appends new metrics as lines of JSON to ``metrics.jsonl``; non-finite values become ``null``.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int, total: int) -> None:
        """Removes the lines that an interrupted run wrote after the checkpoint from which it resumes."""
        if self._path.exists():
            # The resumed steps are logged again.
            kept = [line for line in read_regular(self._path, TEXT_BYTES).splitlines() if _step_of(line) <= step]
            write_atomically(self._path, b"".join(line + b"\n" for line in kept))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Appends the metrics as one line, in a single write."""
        with naming_errors(self._path), self._path.open("a") as file:
            file.write(to_json({"kind": kind, "step": step, **values}) + "\n")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a crash truncated the line


class Forwarder(Observer):
    """Base class of wrappers of observers: every event is passed, with its arguments, to the method ``_forward``."""

    def _forward(self, event: str, *arguments: Any) -> None:
        raise NotImplementedError

    def begin(self, step: int, total: int) -> None:
        """Passes the event ``begin`` to ``_forward``."""
        self._forward("begin", step, total)

    def note(self, text: str) -> None:
        """Passes the event ``note`` to ``_forward``."""
        self._forward("note", text)

    def warning(self, text: str) -> None:
        """Passes the event ``warning`` to ``_forward``."""
        self._forward("warning", text)

    def phase(self, what: str | None) -> None:
        """Passes the event ``phase`` to ``_forward``."""
        self._forward("phase", what)

    def progress(self, fraction: float) -> None:
        """Passes the event ``progress`` to ``_forward``."""
        self._forward("progress", fraction)

    def step(self, step: int) -> None:
        """Passes the event ``step`` to ``_forward``."""
        self._forward("step", step)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Passes the event ``metrics`` to ``_forward``."""
        self._forward("metrics", kind, step, values)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Passes the event ``end`` to ``_forward``."""
        self._forward("end", summary)

    def close(self) -> None:
        """Passes the event ``close`` to ``_forward``."""
        self._forward("close")


class Guarded(Forwarder):
    """Disables an observer after its first failure, with a warning, instead of stopping the run.

    Args:
        make: Function that builds the observer; a failure also disables it.
        what: Name of the observer, for the warning.
    """

    def __init__(self, make: Callable[[], Observer], what: str) -> None:
        self._observer: Observer | None = None
        self._what = what
        self._protect(lambda: setattr(self, "_observer", make()))

    def _forward(self, event: str, *arguments: Any) -> None:
        if self._observer is not None:
            self._protect(partial(getattr(self._observer, event), *arguments))

    def _protect(self, action: Callable[[], Any]) -> None:
        if not attempt(action, self._what):
            self._observer = None


class Bounded(Forwarder):
    """Runs an observer in a separate thread, and limits the time of each event.

    After an error, the object cannot be used any more.

    Args:
        make: Function that builds the observer, called in the separate thread.
        seconds: Time limit of an event, in seconds; building and closing the observer may take three times as long.

    Raises:
        TimeoutError: If building the observer takes too long. Every method may also raise it.
    """

    def __init__(self, make: Callable[[], Observer], seconds: float) -> None:
        self._seconds = seconds
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()
        self._observer: Observer = self._wait_for(make, 3 * seconds)

    def _serve(self) -> None:
        # None ends the thread.
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
            if answer.done():  # the observer itself raised
                raise
            raise TimeoutError(f"no answer within {seconds:g} seconds") from error

    def _forward(self, event: str, *arguments: Any) -> None:
        self._wait_for(partial(getattr(self._observer, event), *arguments), self._seconds)

    def close(self) -> None:
        """Closes the observer, and ends the thread."""
        self._wait_for(self._observer.close, 3 * self._seconds)
        self._tasks.put(None)


class BackgroundObserver(Forwarder):
    """Runs an observer in a separate thread without waiting for it, except in ``close``.

    Events that arrive before the observer is built are delivered to it afterwards. The observer must neither raise nor
    block forever: wrap it in :class:`Guarded` and :class:`Bounded`.

    Args:
        make: Function that builds the observer, called in the separate thread.
    """

    def __init__(self, make: Callable[[], Observer]) -> None:
        self._events: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, args=(make,), daemon=True)
        self._thread.start()

    def _deliver(self, make: Callable[[], Observer]) -> None:
        observer, event = make(), ""
        while event != "close":
            event, arguments = self._events.get()
            getattr(observer, event)(*arguments)

    def _forward(self, event: str, *arguments: Any) -> None:
        self._events.put((event, arguments))

    def close(self) -> None:
        """Closes the observer, after all earlier events have been delivered to it."""
        super().close()
        self._thread.join()


def attempt(action: Callable[[], Any], what: str) -> bool:
    """Performs an optional action; a failure becomes a warning.

    Args:
        action: Action to perform.
        what: Name of the action, for the warning.

    Returns:
        Whether the action succeeded.
    """
    try:
        action()
    except (Exception, SystemExit) as error:  # rich exits when the reader of its output has closed the pipe
        warn(f"{what} failed and is now disabled: {first_line(error)}")
        return False
    return True


# What every event has besides its figures, and the names under which W&B's charts offer it as an axis. W&B takes
# ``_timestamp`` for the time of an event that it gets later.
_TOTALS: Mapping[str, str] = MappingProxyType(
    {"time": "_timestamp", "seconds/total": "seconds", "bytes/total": "bytes"}
)
_AXES = ("step", "seconds", "bytes")
# Attempts to start W&B, each of which may take three times its timeout, and seconds between two of them.
_STARTS, _PAUSE = 3, 30.0


class Logger(ABC):
    """A destination of metrics in addition to the run folder, chosen with ``logger=NAME``; opened on rank 0 only."""

    def parts(self) -> list[Logger]:
        """Returns the loggers that this logger combines; for a single logger, a list that contains only itself."""
        return [self]

    def check(self) -> None:
        """Raises a ``ConfigError`` if a package that the logger needs is missing."""

    @abstractmethod
    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Starts to log a run, and returns the observer that receives its events.

        Args:
            run: Run to log, with its folder.
            config: Resolved configuration of the run.
        """

    def place(self) -> str | None:
        """Returns the destination as text, printed when a run starts; ``None`` if it is the run folder."""
        return None


@dataclass(frozen=True)
class NoLogger(Logger):
    """Logs to the run folder only.

    It accepts the settings of :class:`Wandb` and ignores them, so that ``logger=none`` works for experiments that set
    them.

    Args:
        project: No effect; setting of :class:`Wandb`.
        mode: No effect; setting of :class:`Wandb`.
        group: No effect; setting of :class:`Wandb`.
        job_type: No effect; setting of :class:`Wandb`.
        tags: No effect; setting of :class:`Wandb`.
        timeout: No effect; setting of :class:`Wandb`.
    """

    project: str | None = None
    mode: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    timeout: float | None = None

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Returns an observer that does nothing."""
        return Observer()


@dataclass(frozen=True)
class Wandb(Logger):
    """Logs to Weights & Biases (W&B), through its own SDK.

    Args:
        project: Project that collects the runs.
        mode: Mode of W&B: ``online``, ``offline``, ``disabled``, or ``auto`` (online if this machine is logged in).
        group: Name of the group of runs; ``None`` uses the run's id, which joins a resumed run with its earlier parts.
        job_type: Role of the run within its group.
        tags: Labels of the run.
        timeout: Time limit for connecting and for each call, in seconds; three times as long for the first and the last
            call.

    Raises:
        ConfigError: If the mode is unknown or the timeout is out of range.
    """

    project: str = "spardl"
    mode: str = "auto"
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "online", "offline", "disabled"):
            raise ConfigError(f"logger.mode must be auto, online, offline or disabled, got {self.mode!r}")
        check_seconds("logger.timeout", self.timeout)

    @property
    def _chosen(self) -> str:
        if self.mode != "auto":
            return self.mode
        return os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")

    def place(self) -> str:
        """Returns a text that states whether data leaves this machine, and to which address; opens no connection."""
        if self._chosen == "disabled":
            return "W&B: disabled"
        if self._chosen in ("offline", "dryrun"):
            return "W&B: offline, nothing is uploaded"
        server = urlsplit(_server())
        # Only the host: a password may precede it.
        host = server.netloc.rpartition("@")[2].replace("api.wandb.ai", "wandb.ai")
        address = f"{server.scheme}://{host}"
        # Without WANDB_ENTITY, only the server knows the default entity of the user.
        entity = os.environ.get("WANDB_ENTITY")
        at = f"{address}/{entity}/{self.project}" if entity else f"project {self.project} at {address}"
        return f"W&B: uploaded to {at}"

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Starts a W&B run, and returns the observer that sends events to it.

        If W&B cannot be reached, the run is logged offline.
        """
        # Only rank 0 of a run that logs to W&B needs this import, which takes seconds on a busy machine; outside of
        # Bounded, it does not count against the timeout.
        import wandb  # noqa: PLC0415

        # W&B keeps the id of a failed start, so each start has another one.
        numbers = count()

        def start(mode: str) -> Any:
            return _init(wandb, self, run, config, mode, next(numbers))

        # With its service stopped, W&B waits forever.
        return _Retried(lambda: Bounded(lambda: _WandbObserver(start, self._chosen, run), self.timeout), _PAUSE)


class _Retried(Forwarder):
    """Builds an observer again after a timeout, while the run continues, then forwards all events since the start."""

    def __init__(self, make: Callable[[], Observer], pause: float) -> None:
        self._make, self._pause = make, pause
        self._observer: Observer | None = None
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._starts, self._next = _STARTS, 0.0
        self._timeout: TimeoutError | None = None
        self._start()

    def _start(self) -> None:
        self._starts -= 1
        try:
            self._observer, self._timeout = self._make(), None
        except TimeoutError as error:
            self._next, self._timeout = time.monotonic() + self._pause, error

    def _forward(self, event: str, *arguments: Any) -> None:
        self._events.append((event, arguments))
        if self._timeout:
            # The end of a run does not wait for another start.
            if event == "close" or not self._starts:
                raise self._timeout
            if time.monotonic() >= self._next:
                self._start()
        if self._observer is not None:
            events, self._events = self._events, []
            for each, given in events:
                getattr(self._observer, each)(*given)


class _WandbObserver(Observer):
    def __init__(self, start: Callable[[str], Any], mode: str, run: Run) -> None:
        try:
            self._run = start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            print(f"warning: W&B cannot be reached, logging offline: {first_line(error)}", file=sys.stderr, flush=True)
            self._run = start("offline")
        for axis in _AXES:
            self._run.define_metric(axis)
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric="step")
        self._save_log(run.log_file)

    def _save_log(self, log: Path) -> None:
        folder = Path(self._run.dir)
        if not folder.is_dir():  # mode=disabled
            return
        # Under the name that W&B gives to captured output. W&B itself would link a file of another folder, with a
        # warning on the terminal; a relative link survives a move of the run folder.
        link = folder / "output.log"
        # W&B uses a folder again within the same second, and some file systems have no links.
        with suppress(OSError):
            link.symlink_to(os.path.relpath(log, folder))
        self._run.save(glob.escape(str(link)), base_path=str(folder), policy="live")

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Logs metrics as ``train/NAME`` or ``eval/NAME``, with steps, seconds and bytes as axes for W&B's charts."""
        figures = {f"{kind}/{name}": value for name, value in values.items() if name not in _TOTALS}
        figures |= {axis: values[name] for name, axis in _TOTALS.items() if name in values}
        self._run.log({**figures, "step": step}, step=step)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Copies the summary to W&B, whose tables of runs show it."""
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        """Uploads the remaining data and closes the W&B run."""
        self._run.finish()


def without_run_id(environment: Mapping[str, str], *, warns: bool = True) -> dict[str, str]:
    """Removes ``WANDB_RUN_ID`` from environment variables, because it would make all runs of a sweep one W&B run.

    In a process that ``wandb agent`` started for a sweep of W&B, the variable is kept.

    Args:
        environment: Environment variables of this process.
        warns: Whether to print a warning if the id is removed.

    Returns:
        A copy of ``environment``, normally without the id.
    """
    given = environment.get("WANDB_RUN_ID")
    # An agent of a W&B sweep sets one id per process.
    if not given or environment.get("WANDB_SWEEP_ID"):
        return dict(environment)
    if warns:
        print(
            f"warning: WANDB_RUN_ID={given} is ignored, as it would make all runs of this sweep one W&B run; unset it",
            file=sys.stderr,
            flush=True,
        )
    return {name: value for name, value in environment.items() if name != "WANDB_RUN_ID"}


def _wandb_id(run: Run, start: int) -> str:
    """Returns the id of the W&B run, which is the same after each resume."""
    file = run.folder / "wandb-id.txt"
    if not file.exists():
        write_atomically(file, f"{run.id}-{secrets.token_hex(4)}".encode())
    return read_regular(file, TEXT_BYTES).decode().strip() + (f"-{start}" if start else "")


def _init(wandb: Any, logger: Wandb, run: Run, config: Mapping[str, Any], mode: str, start: int) -> Any:
    # A sweep's agent, or a user, may have chosen the id.
    named = {} if os.environ.get("WANDB_RUN_ID") else {"id": _wandb_id(run, start), "resume": "allow"}
    return wandb.init(
        **named,
        project=logger.project,
        group=logger.group or run.id,
        job_type=logger.job_type,
        name=run.folder.name,
        tags=list(logger.tags),
        config=dict(config),
        dir=str(run.folder),
        mode=cast("Literal['online', 'offline', 'disabled', 'shared']", mode),
        settings=wandb.Settings(
            silent=True,
            console="off",  # captured output would pass through W&B's service, and block when it hangs
            disable_git=True,  # the remote's URL may contain a token
            git_commit=_commit(run),
            init_timeout=logger.timeout,
            login_timeout=logger.timeout,
        ),
    )


def _commit(run: Run) -> str | None:
    """Returns the commit that trained the run, also if a later one rebuilds its W&B run."""
    recorded = run.read_summary().get("environment")
    commit: str | None = (recorded if isinstance(recorded, dict) else environment()).get("commit")
    return commit


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def logged_in() -> bool:
    """Returns whether this machine has an API key for W&B; opens no connection."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(_server()).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
