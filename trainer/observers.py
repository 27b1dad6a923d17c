"""Those who watch a run on rank 0: the metrics file, and the interface of displays and loggers."""

from __future__ import annotations

import json
import netrc
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from spardl.basics.checks import check_seconds
from spardl.basics.errors import ConfigError, first_line, warn
from spardl.basics.files import TEXT_BYTES, naming, read_regular, write_atomically
from trainer.runs import Run, to_json

__all__ = [
    "Beside",
    "Bounded",
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
        warn(f"{what} failed and is now disabled: {first_line(error)}")
        return False
    return True


# Where figures go besides the run folder.


class Logger(ABC):
    """Chosen before the workers start; opened on rank 0 only."""

    @abstractmethod
    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Starts logging a run with the given resolved configuration."""

    def place(self) -> str | None:
        """Where figures will go, for the first line of a run; ``None`` if that is the run folder alone."""
        return None


@dataclass(frozen=True)
class NoLogger(Logger):
    """Logs nowhere: the run folder is all there is.

    Settings of :class:`Wandb` have no effect; an experiment may set them, and ``logger=none`` turns its logging off.

    Args:
        project: see :class:`Wandb`.
        mode: see :class:`Wandb`.
        group: see :class:`Wandb`.
        job_type: see :class:`Wandb`.
        tags: see :class:`Wandb`.
        timeout: see :class:`Wandb`.
    """

    project: str | None = None
    mode: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    timeout: float | None = None

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """An observer that does nothing."""
        return Observer()


@dataclass(frozen=True)
class Wandb(Logger):
    """Weights & Biases, through its own SDK.

    Args:
        project: where runs are collected.
        mode: ``online``, ``offline``, ``disabled``, or ``auto``: online if this machine is logged in.
        group: the runs that it stands with; ``None``: of the run's id, its beginning before it was resumed.
        job_type: what the run is within its group.
        tags: labels of the run.
        timeout: seconds that a connection may take, and a call; three times as many for the first and the last.

    Raises:
        ConfigError: if the mode is none of these, or the timeout out of range.
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
        """Whether anything leaves this machine, and to which address; asks nobody and connects nowhere."""
        if self._chosen == "disabled":
            return "W&B: disabled"
        if self._chosen in ("offline", "dryrun"):
            return "W&B: offline, nothing is uploaded"
        server = urlsplit(_server())
        # No more of it: there may be a password before the host.
        host = server.netloc.rpartition("@")[2].replace("api.wandb.ai", "wandb.ai")
        address = f"{server.scheme}://{host}"
        # Who is logged in has an entity of their own, which only the server knows.
        entity = os.environ.get("WANDB_ENTITY")
        at = f"{address}/{entity}/{self.project}" if entity else f"project {self.project} at {address}"
        return f"W&B: uploaded to {at}"

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Starts a W&B run."""
        # Only rank 0 of a run that logs to W&B pays for this import: seconds on a busy machine, for which no server is
        # to blame.
        import wandb  # noqa: PLC0415

        # With its service stopped, W&B waits for ever.
        return Bounded(lambda: _WandbObserver(partial(_init, wandb, self, run, config), self._chosen), self.timeout)


class _WandbObserver(Observer):
    def __init__(self, start: Callable[[str], Any], mode: str) -> None:
        try:
            self._run = start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            print(f"warning: W&B cannot be reached, logging offline: {first_line(error)}", file=sys.stderr, flush=True)
            self._run = start("offline")

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Logs under ``train/`` or ``eval/``."""
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Puts the figures of the summary where W&B's tables look for them."""
        self._run.summary.update(dict(summary))

    def close(self) -> None:
        """Flushes."""
        self._run.finish()


def without_run_id(environment: Mapping[str, str], *, tells: bool = True) -> dict[str, str]:
    """The environment of one run among several: without an id that would make all of them one W&B run.

    ``wandb agent`` gives each process an id that belongs to its sweep, which is kept.

    Args:
        environment: of this process.
        tells: whether this process prints what is ignored.
    """
    given = environment.get("WANDB_RUN_ID")
    if not given or environment.get("WANDB_SWEEP_ID"):
        return dict(environment)
    if tells:
        print(
            f"warning: WANDB_RUN_ID={given} is ignored, as it would make all runs of this sweep one W&B run; unset it",
            file=sys.stderr,
            flush=True,
        )
    return {name: value for name, value in environment.items() if name != "WANDB_RUN_ID"}


def _init(wandb: Any, logger: Wandb, run: Run, config: Mapping[str, Any], mode: str) -> Any:
    return wandb.init(
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
            console="off",  # wrapped output would go through W&B's service, and hang with it
            disable_git=True,  # the remote's address may hold a token; the commit is in the summary
            init_timeout=logger.timeout,
            login_timeout=logger.timeout,
        ),
    )


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def logged_in() -> bool:
    """Whether this machine has a key for W&B; asks nobody and connects nowhere."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(_server()).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
