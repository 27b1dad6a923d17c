"""Settings of a cluster for its jobs: one file, overridden on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spardl.basics.errors import ConfigError
from spardl.basics.files import read_yaml

__all__ = ["DEFAULT", "SITE", "Site", "changed", "read_site"]

DEFAULT = Path(__file__).resolve().parents[2] / "slurm" / "site.yaml"
SITE = "site."  # what words of the command line that are settings begin with


@dataclass
class Site:
    """Settings of ``slurm/site.yaml``; none of them can change a run's result.

    Attributes:
        partition: queue; ``None`` for the cluster's default. So for account, qos and memory.
        account: who pays.
        qos: quality of service.
        time: minutes that a job may take before it is stopped and, if it can go on, put into the queue again.
        at_once: runs of a sweep at the same time.
        workers_per_node: most workers on one node.
        cpus_per_worker: processors for each.
        gpus_per_worker: GPUs for each.
        memory: of each node, as ``16G``.
        signal_seconds: before the time limit, for the last step and the checkpoint.
        requeues: how often a job may put itself into the queue again.
        setup: lines of shell before the workers start, as ``module load cuda``.
        stage_from: folder of data that every node copies to its own disk first.
        stage_to: where the copy is, and SPARDL_DATA leads; the shell expands variables such as $TMPDIR. A copy that
            is there already is used.
        options: more long options of sbatch, without their dashes.

    Raises:
        ConfigError: if a value is out of range, or only one half of a pair is there.
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
            raise ConfigError(f"site.{name} must be a whole number, at least {least}, got {value}")

    def nodes(self, tasks: int) -> int:
        """Number of nodes for a number of workers."""
        return -(-tasks // self.workers_per_node)


def read_site(file: Path, words: Sequence[str]) -> Site:
    """Reads the settings of the site.

    Args:
        file: YAML.
        words: ``site.KEY=VALUE`` of the command line, which win.

    Raises:
        ConfigError: if the file cannot be read, or a setting is unknown or wrong.
    """
    try:
        content = OmegaConf.load(StringIO(read_yaml(file)))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"cannot read --site {file}: {error}") from error
    return changed(content, words)


def changed(settings: Any, words: Sequence[str]) -> Site:
    """Settings with those of the command line.

    Args:
        settings: names and values.
        words: ``site.KEY=VALUE``, which win.

    Raises:
        ConfigError: if a setting is unknown or wrong.
    """
    try:
        override = OmegaConf.from_dotlist([word.removeprefix(SITE) for word in words])
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Site), settings, override))
    except (OmegaConfBaseException, YAMLError) as error:
        key = getattr(error, "full_key", None)
        where = f"site.{key}: " if key else "site: "
        raise ConfigError(f"{where}{str(error).splitlines()[0]}; the settings are in {DEFAULT.name}") from error
    assert isinstance(site, Site)
    return site
