"""Launchers start the workers: simulated, as processes of this machine, or as ranks of torchrun or srun."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from spardl.basics.checks import check_seconds, is_number
from spardl.basics.errors import ConfigError, PeerError, StoppedError, first_line
from spardl.clusters import Cluster, ProcessGroupCluster, SimulatedCluster, parse_network
from spardl.clusters.process_group import check_streams
from spardl.clusters.profile import Profile
from spardl.clusters.workers.membership import Membership, count_gpus, find_membership, find_secret, listen, pick_device
from spardl.clusters.workers.processes import fault_of, handling_signals, interrupt_now, run_processes
from trainer.rendezvous import Rendezvous, Stopping
from trainer.runs import Run

__all__ = [
    "WORKERS",
    "Heartbeat",
    "Hosted",
    "Job",
    "Launcher",
    "ProcessGroup",
    "Simulated",
    "check_count",
    "check_device",
    "check_threads",
    "count_gpus_in_child",
    "with_stopping",
]


WORKERS = 4
"""Number of workers where neither a setting nor torchrun or srun decides it."""

# Upper limit of threads per worker; torch itself accepts any number.
_MOST_THREADS = 1024
# Time limit for CUDA to count the GPUs, in seconds.
_COUNT_SECONDS = 60.0


def check_count(name: str, value: Any) -> None:
    """Checks a count, such as the number of workers.

    Args:
        name: Name of the setting, for the error message.
        value: Value of the setting.

    Raises:
        ConfigError: If the value is not an integer of at least 1.
    """
    if not is_number(int, value) or value < 1:
        raise ConfigError(f"{name} must be an integer, at least 1, got {value!r}")


def check_threads(threads: Any) -> None:
    """Checks the number of threads per worker.

    Raises:
        ConfigError: If the number is not an integer from 1 to 1024.
    """
    if not is_number(int, threads) or not 1 <= threads <= _MOST_THREADS:
        wanted = f"an integer, at least 1 and at most {_MOST_THREADS}"
        raise ConfigError(f"cluster.threads must be {wanted}, got {threads!r}")


def check_device(device: str) -> None:
    """Checks the setting ``cluster.device``.

    Raises:
        ConfigError: If it is not auto, cpu or cuda.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device must be auto, cpu or cuda, got {device!r}")


def count_gpus_in_child(wanted: str, sharing: int) -> int:
    """Counts the GPUs of this machine in a child process.

    Counting initializes CUDA, and this process must not do that: CUDA would not work in workers forked afterwards.

    Args:
        wanted: Value of ``cluster.device``: cpu, cuda or auto.
        sharing: Number of workers on this machine.

    Returns:
        Number of GPUs; 0 if ``wanted`` is cpu.

    Raises:
        ConfigError: If there are too few GPUs, or they cannot be counted.
    """
    if wanted == "cpu":
        return 0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_count, args=(theirs, wanted, sharing), daemon=True)
    process.start()
    # Without this copy of the pipe's end, the death of the child ends `recv`.
    theirs.close()
    try:
        answer: int | str = ours.recv() if ours.poll(_COUNT_SECONDS) else _no_count("no answer")
    except EOFError:
        answer = _no_count("the counting process died")
    # The child may hang in the driver.
    process.kill()
    process.join()
    if isinstance(answer, str):
        raise ConfigError(answer)
    return answer


def _count(answer: Connection, wanted: str, sharing: int) -> None:
    try:
        answer.send(count_gpus(wanted, sharing))
    except ConfigError as error:
        answer.send(str(error))
    except Exception as error:
        answer.send(_no_count(first_line(error)))
    os._exit(0)


def _no_count(reason: str) -> str:
    return f"torch cannot count GPUs ({reason}); use cluster.device=cpu"


# Called with the number of steps done; returns whether all workers stop now.
Heartbeat: TypeAlias = Callable[[int], bool]
Job: TypeAlias = Callable[[Cluster, torch.device, Heartbeat], None]


class Hosted(NamedTuple):
    """Number of worker processes on this machine, and number of workers in each process.

    Attributes:
        processes: Number of processes.
        each: Number of workers in each process.
    """

    processes: int
    each: int


class Launcher(ABC):
    """Base class of launchers, which start the workers; chosen with ``cluster=NAME``.

    Attributes:
        workers: Number of workers.
        leads: Whether this process decides for all workers; false only for ranks above 0 that torchrun or srun started.
    """

    workers: int
    leads = True

    def share(self, decide: Callable[[], Run], given: Mapping[str, str] = MappingProxyType({})) -> Run:
        """Lets the leading process choose the run and its folder, and returns this run in all processes.

        Args:
            decide: Function that chooses the run; called only in the process that leads.
            given: Settings by name that must be equal in all processes.

        Returns:
            The run of all processes.
        """
        return decide()

    @abstractmethod
    def hosted(self) -> Hosted | None:
        """Returns the number of worker processes that share this machine's memory; ``None`` if workers use GPUs."""

    @abstractmethod
    def check(self) -> None:
        """Checks that the devices and ports that workers need are available; called before the run folder is created.

        Raises:
            ConfigError: If a device or port is not available.
        """

    @abstractmethod
    def launch(self, job: Job, folder: Path) -> None:
        """Runs a job on all workers, or on the worker of this process if torchrun or srun started it.

        Args:
            job: Function that is called in every process, with a cluster, a device and a heartbeat: a function that the
                job must call after each step with the number of steps done, and that returns whether to stop now.
            folder: Folder for the stack traces of failures.

        Raises:
            ConfigError: If the cluster cannot be started as configured.
            WorkerError: If a worker process ended early.
        """


def with_stopping(heartbeat: Callable[[int], None], stopping: Stopping) -> Heartbeat:
    """Combines a heartbeat, which a job calls after each step, with the decision to stop all workers.

    Args:
        heartbeat: Function that receives the number of steps done.
        stopping: Object that decides when all workers stop.

    Returns:
        A function that passes the number of steps to ``heartbeat``, and returns whether all workers stop now.
    """

    def beat(step: int) -> bool:
        heartbeat(step)
        return stopping.after(step)

    return beat


@dataclass
class Simulated(Launcher):
    """Runs all workers in one process, on a virtual network.

    Args:
        workers: Number of workers.
        network: Network to simulate: name of a preset, file written by ``spardl doctor``, or ``{alpha: seconds, gbit:
            Gbit/s}``.
        count_local: Whether the measured time of local work advances the virtual clock. With one thread on a CPU, the
            CPU time of that thread is measured, so that other programs on the machine do not count.
        profile: File written by ``spardl profile``; its forward and backward times replace measured times.
        device: Device of the model: cpu, cuda, or auto (cuda if there is a GPU).
        threads: Number of CPU threads of the process. Results are bitwise equal to those of a real cluster only if its
            workers use the same number.
        throttle: Not supported; set ``network`` instead.
        streams: Number of communication streams; must be 1.
        interface: Not supported, since there is no real network.

    Raises:
        ConfigError: If a value is out of range or not supported, or torchrun or srun started several processes.
    """

    workers: int = WORKERS
    network: str | Mapping[str, Any] = "ethernet_1g"
    count_local: bool = True
    profile: str | None = None
    device: str = "auto"
    threads: int = 1
    throttle: Any = None
    streams: int = 1
    interface: str | None = None

    def __post_init__(self) -> None:
        check_count("cluster.workers", self.workers)
        check_threads(self.threads)
        check_device(self.device)
        if self.throttle is not None:
            raise ConfigError(
                "cluster.throttle requires cluster=process_group; with cluster=simulated, use cluster.network"
            )
        if self.streams != 1:
            raise ConfigError(
                "cluster.streams requires cluster=process_group; with cluster=simulated, use cluster.streams=1"
            )
        if self.interface is not None:
            raise ConfigError("cluster.interface requires cluster=process_group; remove cluster.interface")
        self._network = parse_network(self.network)
        self._profile = None if self.profile is None else Profile.read(Path(self.profile))
        if find_membership(os.environ):
            raise ConfigError("cluster=simulated runs in one process; start it without torchrun or srun")

    def hosted(self) -> Hosted | None:
        """Returns a count of one process with all workers in it; ``None`` if the process uses a GPU."""
        return None if count_gpus_in_child(self.device, 1) else Hosted(1, self.workers)

    def check(self) -> None:
        """Raises a ``ConfigError`` if ``device`` is cuda, but there is no GPU."""
        self.hosted()

    def launch(self, job: Job, folder: Path) -> None:
        """Runs the job once, in a child process that simulates all workers."""

        def target(rank: int, heartbeat: Callable[[int], None]) -> None:
            torch.set_num_threads(self.threads)
            # Only here, in the child: CUDA must not be initialized before a fork.
            device = pick_device(self.device, 0, 1)
            cluster = SimulatedCluster(
                self.workers,
                self._network,
                device=device,
                count_local=self.count_local,
                profile=self._profile,
                # Time of the thread excludes other programs, but also further threads and GPUs.
                timer=time.thread_time if device.type == "cpu" and self.threads == 1 else time.perf_counter,
            )
            stopping = Stopping(lambda: None, rank, 1, 0)
            with handling_signals(stopping.ask, lambda: None):
                job(cluster, device, with_stopping(heartbeat, stopping))

        run_processes(1, target, folder, stops=True)


# Seconds that rank 0 waits until the others have read its error, and that the others wait for its decision.
_ERROR_SECONDS, _DECISION_SECONDS = 10.0, 3600.0


class ProcessGroup(Launcher):
    """Runs one process per worker, started here unless torchrun or srun has started them.

    Args:
        workers: Number of workers; ``None`` uses 4, or the number that torchrun or srun started.
        backend: Backend of torch.distributed: gloo, nccl, or auto (nccl with a GPU).
        device: Device of each worker: cpu, cuda, or auto (cuda if there is a GPU for each worker).
        port: Port through which workers started here connect to each other; ``None`` uses any free port.
        timeout: Time after which a worker that does not answer counts as lost, in seconds.
        threads: Number of CPU threads per worker. Results are bitwise equal to those of a simulated cluster only if it
            uses the same number.
        throttle: Slower network to emulate: name of a preset, file written by ``spardl doctor``, or
            ``{alpha: seconds, gbit: Gbit/s}``.
        streams: Maximum number of synchronizations that run at the same time, for schedules with several per step.
            More than 1 is possible on CPUs only.
        interface: Network interface for gloo and NCCL. ``None`` uses ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``
            if they are set. Otherwise, gloo uses the loopback interface for workers started here, and the libraries
            choose an interface in all other cases.

    Raises:
        ConfigError: If a value is out of range, or torchrun or srun started another number of workers.
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
        interface: str | None = None,
    ) -> None:
        self._member = find_membership(os.environ)
        secret = find_secret(os.environ)
        self._rendezvous = Rendezvous(self._member, timeout, None, secret, interface) if self._member else None
        # A later change of the parent shows that torchrun's agent or the Slurm step has died.
        self._parent = os.getppid()
        self.leads = self._member is None or self._member.rank == 0
        started = self._member.size if self._member else None
        if workers is not None and started is not None and workers != started:
            raise ConfigError(
                f"cluster.workers={workers}, but {started} workers were started; use cluster.workers=null"
            )
        self.workers = workers if workers is not None else started or WORKERS
        self._backend, self._device, self._port = backend, device, port
        self._timeout, self._threads, self._streams, self._interface = timeout, threads, streams, interface
        self._throttle = None if throttle is None else parse_network(throttle, "cluster.throttle")
        self._check()

    def _check(self) -> None:
        check_count("cluster.workers", self.workers)
        check_threads(self._threads)
        check_seconds("cluster.timeout", self._timeout)
        if self._port is not None and not (is_number(int, self._port) and 0 < self._port < 2**16):
            raise ConfigError(f"cluster.port must be a port number, or null for any free one, got {self._port!r}")
        if self._backend not in ("auto", "gloo", "nccl"):
            raise ConfigError(f"cluster.backend must be auto, gloo or nccl, got {self._backend!r}")
        check_device(self._device)
        check_streams(self._streams, torch.device("cpu"), self._throttle)
        here = [name for _, name in socket.if_nameindex()]
        if self._interface is not None and self._interface not in here:
            raise ConfigError(
                f"cluster.interface={self._interface} is not on {socket.gethostname()}; it has {', '.join(here)}"
            )

    @property
    def _sharing(self) -> int:
        return self._member.local_size if self._member else self.workers

    @cached_property
    def _kind(self) -> str:
        return "cuda" if count_gpus_in_child(self._device, self._sharing) >= self._sharing else "cpu"

    def hosted(self) -> Hosted | None:
        """Returns the number of worker processes on this machine; ``None`` if each has a GPU."""
        return Hosted(self._sharing, 1) if self._kind == "cpu" else None

    def check(self) -> None:
        """Checks that the port is free and, if ``device`` is cuda, that there are enough GPUs.

        Raises:
            ConfigError: If the port is in use, or there are too few GPUs.
        """
        self._backend_for(self._kind)
        if self._port is not None and not self._member:
            _listen(self._port).close()

    def _backend_for(self, device: str) -> str:
        if self._backend == "nccl" and device != "cuda":
            raise ConfigError("cluster.backend=nccl needs a GPU for each worker; use cluster.backend=gloo")
        return {"cuda": "nccl", "cpu": "gloo"}[device] if self._backend == "auto" else self._backend

    def launch(self, job: Job, folder: Path) -> None:
        """Runs the job in this process if torchrun or srun started it, otherwise in one forked process per worker."""
        if self._member:
            self._join(job, self._member, folder)
            return
        with closing(_listen(self._port)) as listener:
            port, secret = listener.getsockname()[1], secrets.token_hex(16)

            def target(rank: int, heartbeat: Callable[[int], None]) -> None:
                # All workers are on this machine; gloo would otherwise resolve the host name, which may fail.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                member = Membership(rank, self.workers, rank, self.workers, "127.0.0.1", port)
                # Only rank 0 accepts connections; a copy of the socket in other ranks would outlive it.
                if rank:
                    listener.close()
                rendezvous = Rendezvous(member, self._timeout, None if rank else listener, secret)
                # A worker ignores a second signal; to end everything at once, signal the launcher.
                self._work(job, member, rendezvous, heartbeat, lambda: None)

            run_processes(self.workers, target, folder, stops=True)

    def _join(self, job: Job, member: Membership, folder: Path) -> None:
        try:
            assert self._rendezvous
            self._work(job, member, self._rendezvous, lambda step: None, interrupt_now)
        except StoppedError:
            raise
        except Exception as error:
            raise fault_of(error, member.rank, folder) from error

    def share(self, decide: Callable[[], Run], given: Mapping[str, str] = MappingProxyType({})) -> Run:
        """Returns the run that rank 0 chooses for all ranks, so that they agree on one folder.

        Raises:
            ConfigError: On every rank, if rank 0 finds an error, or the settings differ.
        """
        if self._member is None or self._rendezvous is None:
            return decide()
        store = self._rendezvous.store
        if self._member.rank:
            self._rendezvous.tell(given)
            text = _read(store, "run")
            store.set(f"heard/{self._member.rank}", "")
            return _run_from_json(text)
        try:
            self._rendezvous.compare(given)
            run = decide()
        except Exception as error:
            # All ranks must fail with this error, instead of waiting for a run.
            store.set("run", json.dumps({"error": str(error)}))
            self._await_readers(store)
            raise
        store.set("run", _run_to_json(run))
        if run.finished:
            self._await_readers(store)  # nothing else keeps this process until they have read it
        return run

    def _await_readers(self, store: Any) -> None:
        # The store ends with this process; ranks that have not read the decision would see a lost connection.
        with suppress(RuntimeError):
            store.wait([f"heard/{rank}" for rank in range(1, self.workers)], timedelta(seconds=_ERROR_SECONDS))

    def _work(
        self,
        job: Job,
        member: Membership,
        rendezvous: Rendezvous,
        heartbeat: Callable[[int], None],
        on_second_signal: Callable[[], None],
    ) -> None:
        torch.set_num_threads(self._threads)
        device = pick_device(self._device, member.local_rank, member.local_size)
        backend = self._backend_for(device.type)
        if self._interface:
            os.environ.update(GLOO_SOCKET_IFNAME=self._interface, NCCL_SOCKET_IFNAME=self._interface)
        patience, store = timedelta(seconds=self._timeout), rendezvous.store
        try:
            store.set(f"joins/{member.rank}", "")
            dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.size, timeout=patience)
        except RuntimeError as error:
            missing = rendezvous.missing("joins")
            reason = f"rank {missing} did not connect; {first_line(error)}" if missing else first_line(error)
            raise PeerError(f"rank {member.rank} lost contact while connecting: {reason}") from error
        cluster = ProcessGroupCluster(
            device=device, timeout=self._timeout, throttle=self._throttle, streams=self._streams
        )
        stopping = Stopping(rendezvous.connect, member.rank, member.size, self._timeout, self._orphaned)
        with handling_signals(stopping.ask, on_second_signal) as received, stopping.watching():
            try:
                job(cluster, device, with_stopping(heartbeat, stopping))
            except StoppedError as stopped:
                # The exit code differs between Ctrl-C and the signal of a scheduler.
                stopped.interrupted = received[:1] == [signal.SIGINT]
                raise
        cluster.close()

    def _orphaned(self) -> bool:
        """Returns whether the torchrun agent or the Slurm step that started this worker has died."""
        return self._member is not None and os.getppid() != self._parent


def _read(store: Any, key: str) -> bytes:
    try:
        # Rank 0 may need long to verify large checkpoints. If it dies, so does the store, which ends this wait.
        store.wait([key], timedelta(seconds=_DECISION_SECONDS))
        value: bytes = store.get(key)
    except RuntimeError as error:
        raise ConfigError(f"rank 0 exited before it chose the run folder: {first_line(error)}") from error
    return value


def _run_to_json(run: Run) -> str:
    checkpoint = str(run.checkpoint) if run.checkpoint else None
    return json.dumps({"id": run.id, "folder": str(run.folder), "checkpoint": checkpoint, "finished": run.finished})


def _run_from_json(text: bytes) -> Run:
    content = json.loads(text)
    if "error" in content:
        raise ConfigError(content["error"])
    checkpoint = content["checkpoint"]
    return Run(
        content["id"],
        Path(content["folder"]),
        Path(checkpoint) if checkpoint else None,
        finished=content["finished"],
    )


def _listen(port: int | None) -> socket.socket:
    try:
        return listen("127.0.0.1", port or 0)
    except OSError as error:
        raise ConfigError(
            f"cluster.port={port} cannot be used ({error}); omit cluster.port to use a free one"
        ) from error
