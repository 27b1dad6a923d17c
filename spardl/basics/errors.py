"""Exceptions that users can act on; each message names the fault, its place and the remedy."""

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


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warn(line: str) -> None:
    """Prints ``line`` as a warning to standard error."""
    # Standard error may be closed, for example after the terminal is gone.
    with suppress(OSError):
        print(f"warning: {line}", file=sys.stderr, flush=True)


class SpardlError(Exception):
    """Base class of all errors raised by this library.

    Example:
        >>> try:
        ...     spardl.make_method("spardl", density=2)
        ... except spardl.SpardlError as error:
        ...     print(f"error: {error}")
        error: compressor.density must be above 0 and at most 1, got 2; 0.01 keeps 1% of the entries
    """


class ConfigError(SpardlError, ValueError):
    """An invalid setting, found before any work starts."""


class DataError(ConfigError):
    """A data set that is missing or malformed."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read or belongs to another run."""


class PeerError(SpardlError):
    """Raised when the connection to another worker is lost, or when it does not respond before the timeout."""


class ProgramError(SpardlError):
    """Mismatched programs of two workers: a bug in a communicator, not in the user's code."""


class TrainingError(SpardlError):
    """A failure that further training would hide: replicas differ, or the loss is not finite."""


class StoppedError(SpardlError):
    """Training stopped on request, after saving a checkpoint.

    Attributes:
        interrupted: Whether Ctrl-C (SIGINT) requested the stop, rather than a scheduler.
    """

    interrupted = False


class StorageError(SpardlError):
    """No space left for a file of a run."""


class WorkerError(SpardlError):
    """A worker process that ended before its work was complete."""
