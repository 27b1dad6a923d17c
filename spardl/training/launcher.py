"""What starts workers: what all ways of it have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from spardl.clusters import Cluster
from spardl.training.runs import Run
from spardl.training.stopping import Stopping

__all__ = ["Heartbeat", "Hosted", "Job", "Launcher", "beating"]

# Told the steps that are done; answers whether all workers leave now.
Heartbeat: TypeAlias = Callable[[int], bool]
Job: TypeAlias = Callable[[Cluster, torch.device, Heartbeat], None]


class Hosted(NamedTuple):
    """Processes of this machine.

    Attributes:
        processes: how many.
        each: workers that take turns in one of them.
    """

    processes: int
    each: int


class Launcher(ABC):
    """Chosen by ``cluster=NAME``; knows how many workers there are and how to start them.

    Attributes:
        workers: how many.
        leads: whether this process decides for all: always, unless torchrun or srun started several.
    """

    workers: int
    leads = True

    def share(self, decide: Callable[[], Run], given: Mapping[str, str] = MappingProxyType({})) -> Run:
        """The run that all processes work on: decided by this one, which starts all the others.

        Args:
            decide: finds the run, where this process leads.
            given: what all processes must have been given the same, by name.

        Returns:
            The run.
        """
        return decide()

    @abstractmethod
    def hosted(self) -> Hosted | None:
        """Who will share the memory of this machine; ``None`` if GPUs have memory of their own."""

    @abstractmethod
    def check(self) -> None:
        """Looks on this machine for what the workers will need, before there is a folder.

        Raises:
            ConfigError: if it is not there.
        """

    @abstractmethod
    def launch(self, job: Job, folder: Path) -> None:
        """Runs a job on all workers (those of this process, if others were started elsewhere).

        Args:
            job: called in every process with its cluster, its device and where to report steps.
            folder: for the traces of failures.

        Raises:
            ConfigError: if the cluster cannot be started as configured.
            WorkerError: if a worker process ended early.
        """


def beating(heartbeat: Callable[[int], None], stopping: Stopping) -> Heartbeat:
    """A heartbeat that also answers whether all workers leave.

    Args:
        heartbeat: told the steps that are done.
        stopping: knows when they leave.

    Returns:
        It.
    """

    def beat(step: int) -> bool:
        heartbeat(step)
        return stopping.after(step)

    return beat
