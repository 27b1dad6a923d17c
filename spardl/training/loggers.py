"""Where figures go besides the run folder."""

from __future__ import annotations

import netrc
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from spardl.basics.checks import check_seconds
from spardl.basics.errors import ConfigError
from spardl.basics.messages import first_line
from spardl.training.observers import Bounded, Observer
from spardl.training.runs import Run

__all__ = ["Logger", "NoLogger", "Wandb", "logged_in", "without_run_id"]


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
