"""Brings the workers up: processes of this machine, or ranks of torchrun or srun."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from spardl.basics.checks import check_seconds, is_a
from spardl.basics.errors import ConfigError, PeerError, StoppedError
from spardl.basics.messages import first_line
from spardl.clusters import ProcessGroupCluster, parse_network
from spardl.clusters.process_group import check_streams
from spardl.clusters.workers.addresses import listen
from spardl.clusters.workers.devices import pick_device
from spardl.clusters.workers.membership import Membership, find_membership, find_secret
from spardl.clusters.workers.processes import fault_of, run_processes
from spardl.clusters.workers.signals import end_at_once, listening
from spardl.training.devices import at_least_one, check_device, check_threads, count_gpus_aside
from spardl.training.launcher import Hosted, Job, Launcher, beating
from spardl.training.rendezvous import Rendezvous
from spardl.training.runs import Run
from spardl.training.stopping import Stopping

__all__ = ["ProcessGroup"]

# Seconds that rank 0 waits for the others to hear of its error, and that the others wait for its decision.
_HEARING, _DECIDING = 10.0, 3600.0


class ProcessGroup(Launcher):
    """One process per worker, started here unless torchrun or srun has done so.

    Args:
        workers: how many; ``None`` for 4, or for as many as torchrun or srun started.
        backend: gloo, nccl, or auto (nccl with a GPU).
        device: cpu, cuda, or auto (cuda where there is a GPU for each worker).
        port: where workers started here meet; ``None`` for any free one.
        timeout: seconds after which a silent peer counts as lost.
        threads: of each worker on its CPU. The simulated cluster must have as many to get the same bits.
        throttle: a network that the real one is slowed down to: a preset's name, a file by ``spardl doctor``, or
            ``{alpha: seconds, gbit: Gbit/s}``.
        streams: synchronizations that are under way at once, where a schedule has several; on CPUs only.
        interface: network interface for gloo and NCCL; ``None``: the loopback for workers started here, else what
            ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` say, else the libraries' choice.

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
        interface: str | None = None,
    ) -> None:
        self._member = find_membership(os.environ)
        secret = find_secret(os.environ)
        self._rendezvous = Rendezvous(self._member, timeout, None, secret, interface) if self._member else None
        self._parent = os.getppid()
        self.leads = self._member is None or self._member.rank == 0
        started = self._member.size if self._member else None
        if workers is not None and started is not None and workers != started:
            raise ConfigError(
                f"cluster.workers={workers}, but {started} workers were started; use cluster.workers=null"
            )
        self.workers = workers if workers is not None else started or 4
        self._backend, self._device, self._port = backend, device, port
        self._timeout, self._threads, self._streams, self._interface = timeout, threads, streams, interface
        self._throttle = None if throttle is None else parse_network(throttle, "cluster.throttle")
        self._check()

    def _check(self) -> None:
        at_least_one("cluster.workers", self.workers)
        check_threads(self._threads)
        check_seconds("cluster.timeout", self._timeout)
        if self._port is not None and not (is_a(int, self._port) and 0 < self._port < 2**16):
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
        return "cuda" if count_gpus_aside(self._device, self._sharing) >= self._sharing else "cpu"

    def hosted(self) -> Hosted | None:
        """The workers of this machine, unless each has a GPU."""
        return Hosted(self._sharing, 1) if self._kind == "cpu" else None

    def check(self) -> None:
        """Looks for GPUs, where they are asked for, and tries the port."""
        self._backend_for(self._kind)
        if self._port is not None and not self._member:
            _listen(self._port).close()

    def _backend_for(self, device: str) -> str:
        if self._backend == "nccl" and device != "cuda":
            raise ConfigError("cluster.backend=nccl needs a GPU for each worker; use cluster.backend=gloo")
        return {"cuda": "nccl", "cpu": "gloo"}[device] if self._backend == "auto" else self._backend

    def launch(self, job: Job, folder: Path) -> None:
        """Joins the workers that were started, or starts them by forking this process."""
        if self._member:
            self._join(job, self._member, folder)
            return
        with closing(_listen(self._port)) as listener:
            port, secret = listener.getsockname()[1], secrets.token_hex(16)

            def target(rank: int, heartbeat: Callable[[int], None]) -> None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                member = Membership(rank, self.workers, rank, self.workers, "127.0.0.1", port)
                if rank:
                    listener.close()
                rendezvous = Rendezvous(member, self._timeout, None if rank else listener, secret)
                # A second signal changes nothing here: who is in a hurry ends the launcher.
                self._work(job, member, rendezvous, heartbeat, lambda: None)

            run_processes(self.workers, target, folder, stops=True)

    def _join(self, job: Job, member: Membership, folder: Path) -> None:
        try:
            assert self._rendezvous
            self._work(job, member, self._rendezvous, lambda step: None, end_at_once)
        except StoppedError:
            raise
        except Exception as error:
            raise fault_of(error, member.rank, folder) from error

    def share(self, decide: Callable[[], Run], given: Mapping[str, str] = MappingProxyType({})) -> Run:
        """Lets rank 0 decide for all, so that they agree on one folder.

        Raises:
            ConfigError: on every rank, if rank 0 finds something wrong, or they were not all given the same.
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
            store.set("run", json.dumps({"error": str(error)}))
            self._await_hearers(store)
            raise
        store.set("run", _run_to_json(run))
        return run

    def _await_hearers(self, store: Any) -> None:
        # The store ends with this process, and who has not read by then sees a lost connection.
        with suppress(RuntimeError):
            store.wait([f"heard/{rank}" for rank in range(1, self.workers)], timedelta(seconds=_HEARING))

    def _work(
        self,
        job: Job,
        member: Membership,
        rendezvous: Rendezvous,
        heartbeat: Callable[[int], None],
        hurry: Callable[[], None],
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
            reason = f"no sign of rank {missing}; {first_line(error)}" if missing else first_line(error)
            raise PeerError(f"rank {member.rank} lost contact while the workers met: {reason}") from error
        cluster = ProcessGroupCluster(
            device=device, timeout=self._timeout, throttle=self._throttle, streams=self._streams
        )
        stopping = Stopping(rendezvous.connect, member.rank, member.size, self._timeout, self._orphaned)
        with listening(stopping.ask, hurry) as received, stopping.watching():
            try:
                job(cluster, device, beating(heartbeat, stopping))
            except StoppedError as stopped:
                stopped.interrupted = received[:1] == [signal.SIGINT]
                raise
        cluster.close()

    def _orphaned(self) -> bool:
        """Whether the torchrun agent or the Slurm step that started this worker has died."""
        return self._member is not None and os.getppid() != self._parent


def _read(store: Any, key: str) -> bytes:
    try:
        # Rank 0 may have large checkpoints to verify. If it is gone, so is the store, and this ends at once.
        store.wait([key], timedelta(seconds=_DECIDING))
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


def _listen(port: int | None) -> socket.socket:
    try:
        return listen("127.0.0.1", port or 0)
    except OSError as error:
        raise ConfigError(
            f"cluster.port={port} cannot be used ({error}); leave cluster.port away for a free one"
        ) from error
