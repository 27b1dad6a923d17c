"""Brings the workers up: processes of this machine, ranks of torchrun or srun, or a simulation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from spardl.checks import is_a
from spardl.clusters import Cluster, ProcessGroupCluster, SimulatedCluster, parse_network
from spardl.clusters.process_group import check_streams
from spardl.errors import ConfigError, PeerError
from spardl.timeline.profile import Profile
from spardl.training.messages import first_line
from spardl.training.processes import fault_of, run_processes
from spardl.training.runs import Run

__all__ = ["Heartbeat", "Job", "Launcher", "Membership", "ProcessGroup", "Simulated", "find_membership"]

# Seconds that rank 0 waits for the others to hear of its error.
_HEARING = 10.0

Heartbeat: TypeAlias = Callable[[int], None]
Job: TypeAlias = Callable[[Cluster, torch.device, Heartbeat], None]


class Membership(NamedTuple):
    """This process as one of several that torchrun or srun started.

    Attributes:
        rank: which one.
        size: of how many.
        local_rank: which one on this machine.
        local_size: of how many that share its GPUs.
        host: where rank 0 is.
        port: on which it listens.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


def find_membership(environment: Mapping[str, str]) -> Membership | None:
    """Reads what torchrun or srun left in the environment; ``None`` if neither started this process."""
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environment):
        return Membership(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", "0")),
            int(environment.get("LOCAL_WORLD_SIZE", "1")),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
        )
    # A batch script also has SLURM_PROCID, but only srun starts all the tasks, each in a step.
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Membership(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            1,  # srun hands out the GPUs as it was asked to
            environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
            int(environment.get("MASTER_PORT") or 15000 + int(environment["SLURM_JOB_ID"]) % 20000),
        )
    return None


def _first_host(nodes: str) -> str:
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=False
    )
    if answer.returncode or not answer.stdout.split():
        raise ConfigError("scontrol cannot name this job's hosts; set MASTER_ADDR to the host of rank 0")
    return answer.stdout.split()[0]


class Launcher(ABC):
    """Chosen by ``cluster=NAME``; knows how many workers there are and how to start them.

    Attributes:
        workers: how many.
        leads: whether this process decides for all: always, unless torchrun or srun started several.
    """

    workers: int
    leads = True

    def share(self, decide: Callable[[], Run]) -> Run:
        """The run that all processes work on: decided by this one, which starts all the others."""
        return decide()

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


class ProcessGroup(Launcher):
    """One process per worker, started here unless torchrun or srun has done so.

    Args:
        workers: how many; ``None`` for 4, or for as many as torchrun or srun started.
        backend: gloo, nccl, or auto (nccl with a GPU).
        device: cpu, cuda, or auto (cuda where there is a GPU for each worker).
        port: where workers started here meet; ``None`` for any free one.
        timeout: seconds after which a silent peer counts as lost.
        threads: of each worker on its CPU. The simulated cluster must have as many to get the same bits.
        throttle: a network that the real one is slowed down to: a preset's name, or ``{alpha: seconds, gbit: Gbit/s}``.
        streams: synchronizations that are under way at once, where a schedule has several; on CPUs only.

    Raises:
        ConfigError: if a value is out of range, or torchrun or srun started another number of workers.
    """

    def __init__(
        self,
        workers: int | None = None,
        backend: str = "auto",
        device: str = "auto",
        port: int | None = None,
        timeout: float = 60.0,
        threads: int = 1,
        throttle: str | Mapping[str, Any] | None = None,
        streams: int = 1,
    ) -> None:
        self._member = find_membership(os.environ)
        self._meeting: Any = None
        self.leads = self._member is None or self._member.rank == 0
        started = self._member.size if self._member else None
        if workers is not None and started is not None and workers != started:
            raise ConfigError(
                f"cluster.workers={workers}, but {started} workers were started; use cluster.workers=null"
            )
        self.workers = workers if workers is not None else started or 4
        self._backend, self._device, self._port = backend, device, port
        self._timeout, self._threads, self._streams = timeout, threads, streams
        self._throttle = None if throttle is None else parse_network(throttle, "cluster.throttle")
        self._check()

    def _check(self) -> None:
        _at_least_one("cluster.workers", self.workers)
        _at_least_one("cluster.threads", self._threads)
        if not is_a(float, self._timeout) or self._timeout <= 0:
            raise ConfigError(f"cluster.timeout must be above 0 seconds, got {self._timeout!r}")
        if self._port is not None and not (is_a(int, self._port) and 0 < self._port < 2**16):
            raise ConfigError(f"cluster.port must be a port number, or null for any free one, got {self._port!r}")
        if self._backend not in ("auto", "gloo", "nccl"):
            raise ConfigError(f"cluster.backend must be auto, gloo or nccl, got {self._backend!r}")
        _check_device(self._device)
        check_streams(self._streams, torch.device("cpu"), self._throttle)

    def launch(self, job: Job, folder: Path) -> None:
        """Joins the workers that were started, or starts them by forking this process."""
        if self._member:
            self._join(job, self._member, folder)
            return
        with closing(_listen(self._port)) as listener:
            port = listener.getsockname()[1]

            def target(rank: int, heartbeat: Heartbeat) -> None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                member = Membership(rank, self.workers, rank, self.workers, "127.0.0.1", port)
                if rank:
                    listener.close()
                store = self._store(member.host, member.port, rank, None if rank else listener.detach())
                self._work(job, member, store, heartbeat)

            run_processes(self.workers, target, folder)

    def _join(self, job: Job, member: Membership, folder: Path) -> None:
        try:
            self._work(job, member, self._meet(member), lambda step: None)
        except Exception as error:
            raise fault_of(error, member.rank, folder) from error

    def share(self, decide: Callable[[], Run]) -> Run:
        """Lets rank 0 decide for all, so that they agree on one folder.

        Raises:
            ConfigError: on every rank, if rank 0 finds something wrong.
        """
        if self._member is None:
            return decide()
        store = self._meet(self._member)
        if self._member.rank:
            text = _read(store, "run")
            store.set(f"heard/{self._member.rank}", "")
            return _run_from_json(text)
        try:
            run = decide()
        except Exception as error:
            store.set("run", json.dumps({"error": str(error)}))
            self._await_hearers(store)
            raise
        store.set("run", _run_to_json(run))
        return run

    def _await_hearers(self, store: Any) -> None:
        # The store ends with this process, and who has not read by then sees a lost connection.
        with suppress(RuntimeError):
            store.wait([f"heard/{rank}" for rank in range(1, self.workers)], timedelta(seconds=_HEARING))

    def _meet(self, member: Membership) -> Any:
        self._meeting = self._meeting or self._store(member.host, member.port, member.rank, None)
        return self._meeting

    def _store(self, host: str, port: int, rank: int, listener: int | None) -> Any:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                self.workers,
                rank == 0,
                timeout=timedelta(seconds=self._timeout),
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            raise ConfigError(f"rank {rank} cannot meet the others at {host}:{port}: {first_line(error)}") from error

    def _work(self, job: Job, member: Membership, store: Any, heartbeat: Heartbeat) -> None:
        torch.set_num_threads(self._threads)
        device = _pick_device(self._device, member.local_rank, member.local_size)
        backend = {"cuda": "nccl", "cpu": "gloo"}[device.type] if self._backend == "auto" else self._backend
        if backend == "nccl" and device.type != "cuda":
            raise ConfigError("cluster.backend=nccl needs a GPU for each worker; use cluster.backend=gloo")
        patience = timedelta(seconds=self._timeout)
        try:
            dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.size, timeout=patience)
        except RuntimeError as error:
            raise PeerError(f"rank {member.rank} lost contact while the workers met: {first_line(error)}") from error
        cluster = ProcessGroupCluster(
            device=device, timeout=self._timeout, throttle=self._throttle, streams=self._streams
        )
        job(cluster, device, heartbeat)
        cluster.close()


@dataclass
class Simulated(Launcher):
    """All workers in one process, on a virtual network.

    Args:
        workers: how many.
        network: a preset's name, or ``{alpha: seconds, gbit: Gbit/s}``.
        count_local: whether measured seconds of local work pass on the virtual clock. With one thread on a CPU
            they are that thread's, so other programs on the machine do not lengthen them.
        profile: file by ``scripts/profile_model.py`` whose seconds of forward and backward pass are used instead of
            measured ones.
        device: cpu, cuda, or auto (cuda where there is a GPU).
        threads: of the process on its CPU. A real cluster must have as many to get the same bits.
        throttle: refused: real networks are slowed down, this one is as slow as ``network`` says.
        streams: refused if not 1: simulated workers have one.

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

    def __post_init__(self) -> None:
        _at_least_one("cluster.workers", self.workers)
        _at_least_one("cluster.threads", self.threads)
        _check_device(self.device)
        if self.throttle is not None:
            raise ConfigError(
                "cluster.throttle is for cluster=process_group; with cluster=simulated use cluster.network"
            )
        if self.streams != 1:
            raise ConfigError("cluster.streams is for cluster=process_group; simulated workers have one: use 1")
        self._network = parse_network(self.network)
        self._profile = None if self.profile is None else Profile.read(Path(self.profile))
        if find_membership(os.environ):
            raise ConfigError("cluster=simulated is one process; start it without torchrun or srun")

    def launch(self, job: Job, folder: Path) -> None:
        """Runs the simulation in a process of its own, as real workers are."""

        def target(rank: int, heartbeat: Heartbeat) -> None:
            torch.set_num_threads(self.threads)
            device = _pick_device(self.device, 0, 1)
            cluster = SimulatedCluster(
                self.workers,
                self._network,
                device=device,
                count_local=self.count_local,
                profile=self._profile,
                timer=time.thread_time if device.type == "cpu" and self.threads == 1 else time.perf_counter,
            )
            job(cluster, device, heartbeat)

        run_processes(1, target, folder)


def _read(store: Any, key: str) -> bytes:
    try:
        value: bytes = store.get(key)
    except RuntimeError as error:
        raise ConfigError(f"rank 0 ended before it named the run's folder: {first_line(error)}") from error
    return value


def _run_to_json(run: Run) -> str:
    checkpoint = str(run.checkpoint) if run.checkpoint else None
    return json.dumps({"id": run.id, "folder": str(run.folder), "checkpoint": checkpoint})


def _run_from_json(text: bytes) -> Run:
    content = json.loads(text)
    if "error" in content:
        raise ConfigError(content["error"])
    checkpoint = content["checkpoint"]
    return Run(content["id"], Path(content["folder"]), Path(checkpoint) if checkpoint else None)


def _at_least_one(name: str, value: Any) -> None:
    if not is_a(int, value) or value < 1:
        raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}")


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device must be auto, cpu or cuda, got {device!r}")


def _pick_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    # Asked only in the worker: CUDA does not survive a fork.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = count >= local_size
    if wanted == "cuda" and not enough:
        raise ConfigError(
            f"cluster.device=cuda needs {local_size} GPU(s) on this machine, one for each process, and torch finds "
            f"{count}; use fewer workers, or cluster.device=cpu"
        )
    if wanted == "cpu" or not enough:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def _listen(port: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port or 0))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cluster.port={port} cannot be used ({error}); leave cluster.port away for a free one"
        ) from error
    listener.listen(4096)
    return listener
