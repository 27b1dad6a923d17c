"""Settings of a cluster for its jobs (one file, overridden on the command line), and the places that run them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scripts.submission.submissions import Submission
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_yaml

__all__ = ["DEFAULT", "SITE", "Job", "Place", "Queued", "Site", "changed", "read_site"]


class Queued(Enum):
    """State of a job: waiting, running, or unknown if the place does not answer."""

    WAITING = "waiting"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Job(NamedTuple):
    """A job in a queue, and why it waits, if known; that may include the expected start."""

    state: Queued
    reason: str = ""


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
        """Raises a ``ConfigError`` if the place is not available."""

    @abstractmethod
    def submit(self, submission: Submission) -> int:
        """Starts the runs, records their job ids, and returns the exit code.

        Raises:
            ConfigError: If the place refuses the runs.
        """

    def recover(self, submission: Submission) -> Submission:
        """Records jobs that were accepted just before the submitting process was killed."""
        return submission

    @abstractmethod
    def queue(self, submission: Submission) -> Mapping[str, Job]:
        """Jobs of a submission that wait or run; those that ended are missing."""

    @abstractmethod
    def cancel(self, submission: Submission, jobs: Sequence[str]) -> None:
        """Cancels waiting and running jobs.

        Raises:
            ConfigError: If the jobs cannot be cancelled.
        """


DEFAULT = Path(__file__).resolve().parents[2] / "slurm" / "site.yaml"
SITE = "site."  # prefix of settings on the command line


@dataclass
class Site:
    """Settings of ``slurm/site.yaml``, which do not affect the results of runs.

    ``None`` selects the default of the cluster.

    Attributes:
        partition: Queue of the jobs.
        account: Account that is charged.
        qos: Quality of service.
        time: Time limit of a job in minutes; an unfinished run that can resume is requeued.
        at_once: Maximum number of concurrent runs of a sweep.
        workers_per_node: Maximum number of workers on one node.
        cpus_per_worker: Number of processors per worker.
        gpus_per_worker: Number of GPUs per worker.
        memory: Memory per node, for example ``16G``.
        signal_seconds: Seconds before the time limit, reserved for the last step and the checkpoint.
        requeues: How many times a job may requeue itself.
        setup: Shell commands to run before the workers start, for example ``module load cuda``.
        stage_from: Folder of data that each node copies to its local disk first.
        stage_to: Folder of the copy and value of SPARDL_DATA; the shell expands variables such as $TMPDIR. An existing
            copy is reused.
        options: Further long options of sbatch, without leading dashes.

    Raises:
        ConfigError: If a value is out of range, or only one of stage_from and stage_to is set.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int = 60
    at_once: int = 4
    workers_per_node: int = 4
    cpus_per_worker: int = 1
    gpus_per_worker: int = 0
    memory: str | None = None
    signal_seconds: int = 120
    requeues: int = 10
    setup: list[str] = field(default_factory=list)
    stage_from: str | None = None
    stage_to: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("time", "at_once", "workers_per_node", "cpus_per_worker"):
            self._at_least(name, 1)
        for name in ("gpus_per_worker", "requeues", "signal_seconds"):
            self._at_least(name, 0)
        if self.signal_seconds >= 60 * self.time:
            raise ConfigError(
                f"site.signal_seconds={self.signal_seconds} must be less than the time limit, site.time={self.time} "
                "minutes"
            )
        if (self.stage_from is None) != (self.stage_to is None):
            raise ConfigError("site.stage_from and site.stage_to belong together; set both or none")
        for name in ("stage_from", "stage_to"):
            if set('"`\n') & set(getattr(self, name) or ""):
                raise ConfigError(f"site.{name} must not contain quotation marks, backquotes or line ends")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise ConfigError(f"site.{name} must be an integer, at least {least}, got {value}")

    def nodes(self, tasks: int) -> int:
        """Returns the number of nodes for a number of workers."""
        return -(-tasks // self.workers_per_node)


def read_site(file: Path, words: Sequence[str]) -> Site:
    """Reads the settings in a YAML file, and applies overrides ``site.KEY=VALUE`` of the command line.

    Raises:
        ConfigError: If the file cannot be read, or a setting is unknown or wrong.
    """
    try:
        content = OmegaConf.load(StringIO(read_yaml(file)))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"cannot read --site {file}: {error}") from error
    return changed(content, words)


def changed(settings: Any, words: Sequence[str]) -> Site:
    """Applies overrides ``site.KEY=VALUE`` to settings by name.

    Raises:
        ConfigError: If a setting is unknown or wrong.
    """
    try:
        override = OmegaConf.from_dotlist([word.removeprefix(SITE) for word in words])
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Site), settings, override))
    except (OmegaConfBaseException, YAMLError) as error:
        key = getattr(error, "full_key", None)
        where = f"site.{key}: " if key else "site: "
        raise ConfigError(f"{where}{str(error).splitlines()[0]}; see the settings in {DEFAULT.name}") from error
    assert isinstance(site, Site)
    return site
