"""Where runs can be: what every such place can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from scripts.submission.submissions import Submission

__all__ = ["Place", "Queued"]


class Queued(Enum):
    """What a place knows of a job: it waits, it runs, or (if it cannot be asked) perhaps one of these."""

    WAITING = "waiting"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Place(ABC):
    """Somebody who runs jobs.

    Attributes:
        name: as records have it.
        attached: whether :meth:`submit` stays until all runs have ended.
    """

    name: ClassVar[str]
    attached: ClassVar[bool]

    @abstractmethod
    def check(self) -> None:
        """Finds out whether it can be used at all.

        Raises:
            ConfigError: if not.
        """

    @abstractmethod
    def submit(self, submission: Submission) -> int:
        """Takes the runs over, and writes down who has which.

        Returns:
            The exit code.

        Raises:
            ConfigError: if it refuses them.
        """

    def recover(self, submission: Submission) -> Submission:
        """Records jobs that were accepted just before the submitting process was killed.

        Returns:
            The submission with these jobs.
        """
        return submission

    @abstractmethod
    def queue(self, submission: Submission) -> Mapping[str, Queued]:
        """What is known of the submission's jobs; those that have left are missing."""

    @abstractmethod
    def cancel(self, submission: Submission, jobs: Sequence[str]) -> None:
        """Ends jobs that wait or run.

        Raises:
            ConfigError: if it cannot.
        """
