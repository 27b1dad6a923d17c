"""Brings up workers who take turns in one process, on a virtual network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spardl.basics.errors import ConfigError
from spardl.clusters import SimulatedCluster, parse_network
from spardl.clusters.profile import Profile
from spardl.clusters.workers.devices import pick_device
from spardl.clusters.workers.membership import find_membership
from spardl.clusters.workers.processes import run_processes
from spardl.clusters.workers.signals import listening
from spardl.training.devices import at_least_one, check_device, check_threads, count_gpus_aside
from spardl.training.launcher import Hosted, Job, Launcher, beating
from spardl.training.stopping import Stopping

__all__ = ["Simulated"]


@dataclass
class Simulated(Launcher):
    """All workers in one process, on a virtual network.

    Args:
        workers: how many.
        network: a preset's name, a file by ``spardl doctor``, or ``{alpha: seconds, gbit: Gbit/s}``.
        count_local: whether measured seconds of local work pass on the virtual clock. With one thread on a CPU
            they are that thread's, so other programs on the machine do not lengthen them.
        profile: file by ``spardl profile`` whose seconds of forward and backward pass are used instead of
            measured ones.
        device: cpu, cuda, or auto (cuda where there is a GPU).
        threads: of the process on its CPU. A real cluster must have as many to get the same bits.
        throttle: refused: real networks are slowed down, this one is as slow as ``network`` says.
        streams: refused if not 1: simulated workers have one.
        interface: refused: there is no network.

    Raises:
        ConfigError: if a value is out of range or refused, or torchrun or srun started several processes.
    """

    workers: int = 4
    network: str | Mapping[str, Any] = "ethernet_1g"
    count_local: bool = True
    profile: str | None = None
    device: str = "auto"
    threads: int = 1
    throttle: Any = None
    streams: int = 1
    interface: str | None = None

    def __post_init__(self) -> None:
        at_least_one("cluster.workers", self.workers)
        check_threads(self.threads)
        check_device(self.device)
        if self.throttle is not None:
            raise ConfigError(
                "cluster.throttle is for cluster=process_group; with cluster=simulated use cluster.network"
            )
        if self.streams != 1:
            raise ConfigError("cluster.streams is for cluster=process_group; simulated workers have one: use 1")
        if self.interface is not None:
            raise ConfigError("cluster.interface is for cluster=process_group; simulated workers have no network")
        self._network = parse_network(self.network)
        self._profile = None if self.profile is None else Profile.read(Path(self.profile))
        if find_membership(os.environ):
            raise ConfigError("cluster=simulated is one process; start it without torchrun or srun")

    def hosted(self) -> Hosted | None:
        """One process, unless it has a GPU."""
        return None if count_gpus_aside(self.device, 1) else Hosted(1, self.workers)

    def check(self) -> None:
        """Looks for a GPU, where one is asked for."""
        self.hosted()

    def launch(self, job: Job, folder: Path) -> None:
        """Runs the simulation in a process of its own, as real workers are."""

        def target(rank: int, heartbeat: Callable[[int], None]) -> None:
            torch.set_num_threads(self.threads)
            device = pick_device(self.device, 0, 1)
            cluster = SimulatedCluster(
                self.workers,
                self._network,
                device=device,
                count_local=self.count_local,
                profile=self._profile,
                timer=time.thread_time if device.type == "cpu" and self.threads == 1 else time.perf_counter,
            )
            stopping = Stopping(lambda: None, rank, 1, 0)
            with listening(stopping.ask, lambda: None):
                job(cluster, device, beating(heartbeat, stopping))

        run_processes(1, target, folder, stops=True)
