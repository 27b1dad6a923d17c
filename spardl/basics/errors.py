"""Errors that a user can act on: each message says what is wrong, where, and the way out."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "PeerError",
    "ProgramError",
    "SpardlError",
    "StoppedError",
    "StorageError",
    "TrainingError",
    "WorkerError",
    "first_line",
    "warn",
]


# Errors and warnings in one line, as they are shown to people.


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that some libraries append; its type if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warn(line: str) -> None:
    """Prints a ``line`` that a run goes on after, also where nobody reads standard error any more."""
    with suppress(OSError):
        print(f"warning: {line}", file=sys.stderr, flush=True)


class SpardlError(Exception):
    """Base of every error that this library raises on purpose.

    Example:
        >>> try:
        ...     spardl.make_method("spardl", density=2)
        ... except spardl.SpardlError as error:
        ...     print(f"error: {error}")
        error: compressor.density must be above 0 and at most 1, got 2; 0.01 keeps 1% of the entries
    """


class ConfigError(SpardlError, ValueError):
    """A setting that cannot work, found before anything was started."""


class DataError(ConfigError):
    """A data set that is missing or not what it should be."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class PeerError(SpardlError):
    """Contact with another worker was lost, or it did not answer in time."""


class ProgramError(SpardlError):
    """Two workers' programs do not fit together: a defect of a communicator, never of a user."""


class TrainingError(SpardlError):
    """Training went wrong in a way that going on would hide: replicas differ, or the loss is not finite."""


class StoppedError(SpardlError):
    """Training was asked to stop, and did, with everything saved.

    Attributes:
        interrupted: whether Ctrl-C (SIGINT) asked, and not a scheduler.
    """

    interrupted = False


class StorageError(SpardlError):
    """There is no room for a file of a run."""


class WorkerError(SpardlError):
    """A worker process ended before its work was done."""
