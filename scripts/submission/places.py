"""Interface of the places (Slurm, this machine) where runs can be executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from scripts.submission.submissions import Submission

__all__ = ["Place", "Queued"]


class Queued(Enum):
    """State of a job: waiting, running, or unknown if the place does not answer."""

    WAITING = "waiting"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Place(ABC):
    """A place that executes jobs.

    Attributes:
        name: Name in records.
        attached: Whether :meth:`submit` waits until all runs have ended.
    """

    name: ClassVar[str]
    attached: ClassVar[bool]

    @abstractmethod
    def check(self) -> None:
        """Checks that the place is available.

        Raises:
            ConfigError: If it is not available.
        """

    @abstractmethod
    def submit(self, submission: Submission) -> int:
        """Starts the runs, and records their job ids.

        Returns:
            The exit code.

        Raises:
            ConfigError: If the place refuses the runs.
        """

    def recover(self, submission: Submission) -> Submission:
        """Records jobs that were accepted just before the submitting process was killed.

        Returns:
            The submission with these jobs.
        """
        return submission

    @abstractmethod
    def queue(self, submission: Submission) -> Mapping[str, Queued]:
        """States of the jobs of a submission; jobs that ended are missing."""

    def reasons(self, submission: Submission) -> Mapping[str, str]:
        """Returns why jobs of a submission wait, by job, if known; may include the expected start."""
        return {}

    @abstractmethod
    def cancel(self, submission: Submission, jobs: Sequence[str]) -> None:
        """Cancels waiting and running jobs.

        Raises:
            ConfigError: If the jobs cannot be cancelled.
        """
