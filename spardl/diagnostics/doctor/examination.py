"""The doctor's row of checks, by workers of this machine or by those that torchrun or srun started."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError, PeerError, SpardlError, WorkerError
from spardl.basics.messages import first_line
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.devices import pick_device
from spardl.clusters.workers.membership import Membership
from spardl.clusters.workers.processes import run_processes
from spardl.diagnostics.doctor import alpha_beta, board, correctness, installation, links, peers
from spardl.diagnostics.doctor.findings import Findings
from spardl.method.method import Method

__all__ = ["Examination", "Settings", "examine"]

# Seconds after which kernels of no further method are compiled: with all checks, the doctor takes a minute.
_COMPILING = 25.0


@dataclass(frozen=True)
class Settings:
    """How to examine.

    Attributes:
        workers: how many.
        timeout: seconds that bound every wait for a worker.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: a file for the network as it was measured.
    """

    workers: int
    timeout: float
    device: str
    out: Path | None


class Examination:
    """What one worker does.

    Args:
        settings: of all.
        member: this worker.
        findings: where the first worker says what was found.
    """

    def __init__(self, settings: Settings, member: Membership, findings: Findings) -> None:
        self._settings, self._member, self._findings = settings, member, findings
        self._device = pick_device(settings.device, member.local_rank, member.local_size, "--device")
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._doing = "installation"

    def perform(self, store: Any) -> bool:
        """Finds out who is there, and then what the cluster does; all workers get the same answer.

        Returns:
            Whether all is well.

        Raises:
            PeerError: if the first worker is lost, which would say what is wrong.
        """
        began = time.perf_counter()
        place = board.Board(self._member, store, self._settings.timeout)
        installation.check_versions(self._findings)
        installation.check_extras(self._findings)
        with closing(peers.listen(self._backend)) as listener:
            present = peers.roll_call(place, self._backend, listener, self._findings)
            if present and peers.reach_all(place, present, self._findings):
                self._attempt(place, present)
        well = peers.agree(place, self._findings)
        if well:
            self._findings.ok(f"all checks took {time.perf_counter() - began:.0f} s")
        return well

    def _attempt(self, place: board.Board, present: Sequence[peers.Peer]) -> None:
        """Goes on as long as nobody is lost."""
        peers.check_present(present, self._findings)
        try:
            self._measure_and_verify(place.store, present)
        except Exception as error:
            # Whatever it is, the others must hear of it.
            own = not isinstance(error, PeerError)
            reason = f"worker {self._member.rank}: {type(error).__name__}: {first_line(error)}" if own else str(error)
            peers.name_lost(place, present, self._doing, reason, own, self._findings)

    def _measure_and_verify(self, store: Any, present: Sequence[peers.Peer]) -> None:
        """Over a process group."""
        cluster, findings = self._open(store), self._findings
        hosts, networked = [peer.host for peer in present], peers.networked(present)
        self._doing = "links"
        speed = links.probe(cluster)
        links.check_links(links.measure(cluster, hosts, speed), networked, findings)
        self._doing = "network"
        network = alpha_beta.fit(cluster, speed)
        alpha_beta.write_preset(network, hosts, self._backend, self._settings.out if cluster.leads else None, findings)
        self._doing = "all-reduce"
        alpha_beta.check_all_reduce(cluster, network, networked, findings)
        self._doing = "synchronizations"
        correctness.check_spardl(cluster, networked, findings)
        correctness.check_methods(cluster, findings)
        correctness.check_pace(cluster, network, findings)
        cluster.close()

    def _open(self, store: Any) -> ProcessGroupCluster:
        self._doing = f"backend {self._backend}"
        patience = self._settings.timeout
        group: Any = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
        rank, size = self._member.rank, self._member.size
        try:
            dist.init_process_group(
                self._backend, store=group, rank=rank, world_size=size, timeout=timedelta(seconds=patience)
            )
        except RuntimeError as error:
            raise PeerError(f"worker {rank} could not connect: {first_line(error)}") from error
        self._findings.ok(f"backend: {self._backend} on {self._device.type}, {size} workers")
        return ProcessGroupCluster(device=self._device, timeout=patience)


def examine(settings: Settings, member: Membership | None) -> bool:
    """Examines, and prints what was found.

    Args:
        settings: how.
        member: this process, if torchrun or srun started it; ``None`` to start workers on this machine.

    Returns:
        Whether all is well.

    Raises:
        ConfigError: if there are not as many GPUs or processes as asked for.
    """
    torch.set_num_threads(1)
    # Compiled once, before workers are forked and before they wait for one another.
    precompile(torch.float32, _within_budget(speaks=member is None or member.rank == 0))
    return _join(settings, member) if member else _start(settings)


def _within_budget(speaks: bool) -> Iterator[Method]:
    """The methods that the doctor checks, as far as they can be compiled in time; on a warm cache these are all."""
    began = time.perf_counter()
    if speaks:
        print(f"compiling kernels, for at most {_COMPILING:.0f} s ...", file=sys.stderr, flush=True)
    methods = correctness.every_method(Findings(False))
    for done, (name, method) in enumerate(methods.items(), start=1):
        if time.perf_counter() - began > _COMPILING:
            return
        if speaks:
            print(f"compiling kernels: {name} ({done} of {len(methods)})", file=sys.stderr, flush=True)
        yield method


def _start(settings: Settings) -> bool:
    """With workers of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = folder / "told"

        def target(rank: int, heartbeat: object) -> None:
            os.environ.setdefault(installation.VARIABLES["gloo"], "lo")
            member = Membership(rank, settings.workers, rank, settings.workers, "127.0.0.1", 0)
            findings = Findings(rank == 0)
            store = dist.FileStore(str(folder / "store"), settings.workers)  # type: ignore[attr-defined]
            try:
                healthy = Examination(settings, member, findings).perform(store)
            finally:
                if findings.failures and findings.speaks:
                    told.touch()
            if not healthy:
                raise WorkerError("not all is well")

        try:
            run_processes(settings.workers, target, folder)
        except ConfigError:
            raise
        except SpardlError as error:
            if not told.exists():
                Findings(True).fail(f"workers: {str(error).replace(' at step 0', '')}")
            return False
    return True


def _join(settings: Settings, member: Membership) -> bool:
    """As one of the workers that torchrun or srun started."""
    findings = Findings(member.rank == 0)
    try:
        store = board.join_store(member, settings.timeout)
        return Examination(settings, member, findings).perform(store)
    except PeerError as error:
        Findings(True).fail(f"workers: {error}")
        return False
