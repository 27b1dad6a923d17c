"""Runs the checks of ``spardl doctor``, on workers of this machine or on those that torchrun or srun started."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError, PeerError, SpardlError, WorkerError, first_line
from spardl.clusters import ProcessGroupCluster, gather_rows
from spardl.clusters.network import Network
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.membership import Membership, pick_device
from spardl.clusters.workers.processes import run_processes
from spardl.diagnostics.doctor import board, correctness, links, peers
from spardl.diagnostics.doctor.board import Findings
from spardl.method.method import Method

__all__ = ["Examination", "Settings", "TimeBudget", "examine", "place_of", "run_stages"]

# Seconds after which no further method is compiled, so that the doctor takes a minute in total.
_COMPILING = 25.0
# Checks whose lost workers are reported under one name.
_SYNCHRONIZING = ("SparDL", "methods", "pace")


@dataclass(frozen=True)
class Settings:
    """Options of ``spardl doctor``.

    Attributes:
        workers: Number of workers.
        timeout: Timeout of every wait for a worker, in seconds.
        device: Device of the messages: ``auto``, ``cpu`` or ``cuda``.
        out: File that the measured network is written to, or ``None``.
        budget: Seconds after the start from which on no further check starts.
    """

    workers: int
    timeout: float
    device: str
    out: Path | None
    budget: float


class TimeBudget:
    """Time limit that all checks share.

    Args:
        seconds: Seconds after the start from which on no further check starts.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._clock, self._began = seconds, clock, clock()

    @property
    def spent(self) -> float:
        """Time since the start, in seconds."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Time until the limit, in seconds; negative after the limit."""
        return self.seconds - self.spent


Stage: TypeAlias = tuple[str, Callable[[], None]]


def run_stages(stages: Sequence[Stage], left: Callable[[], float], findings: Findings) -> None:
    """Runs checks until the time limit, and reports the skipped ones.

    Args:
        stages: Name and function of each check.
        left: Function that returns the remaining seconds, equal on all workers.
        findings: Receives the reports on progress and skipped checks.
    """
    for done, (name, check) in enumerate(stages):
        if left() <= 0:
            missing = ", ".join(name for name, _ in stages[done:])
            findings.warn(
                f"not checked within --budget: {missing}; run this again on an idle machine and network, or with a "
                "larger --budget, or run spardl doctor --thorough (ten minutes, this machine only)"
            )
            return
        findings.progress(f"checking {name} ({done + 1} of {len(stages)}) ...")
        check()


def place_of(wanted: str, member: Membership) -> tuple[torch.device, str]:
    """Returns device and backend of a worker; workers of one machine may share its GPUs.

    Args:
        wanted: Device of ``--device``: ``auto``, ``cpu`` or ``cuda``.
        member: Rank of this worker and address of rank 0.

    Raises:
        ConfigError: If there are fewer GPUs than requested.
    """
    there = torch.cuda.device_count() if wanted == "cuda" and torch.cuda.is_available() else 0
    # NCCL rejects two workers on one GPU; gloo does not.
    shares = member.alone and 0 < there < member.local_size
    device = pick_device(wanted, member.local_rank, 1 if shares else member.local_size, "--device")
    return device, "nccl" if device.type == "cuda" and not shares else "gloo"


class Examination:
    """The checks of one worker.

    Args:
        settings: Options, equal on all workers.
        member: Rank of this process among the workers, and address of rank 0.
        findings: Receives the results that worker 0 reports.
        budget: Time limit of all checks; the clock of worker 0 decides.
    """

    def __init__(self, settings: Settings, member: Membership, findings: Findings, budget: TimeBudget) -> None:
        self._settings, self._member, self._findings, self._budget = settings, member, findings, budget
        self._device, self._backend = place_of(settings.device, member)
        self._doing = "installation"

    def run(self, store: Any) -> bool:
        """Checks that all workers are present, and then the cluster; all workers get the same result.

        Returns:
            Whether all checks passed.

        Raises:
            PeerError: If worker 0, which reports the results, is lost.
        """
        place = board.Board(self._member, store, self._settings.timeout)
        board.check_versions(self._findings)
        board.check_extras(self._findings)
        if self._device.type == "cuda" and self._backend == "gloo":
            self._findings.warn(
                f"device: {self._settings.workers} workers share {torch.cuda.device_count()} GPU(s), so messages pass "
                "through host memory with gloo, and NCCL is not checked; run this on a machine with a GPU per worker"
            )
        with closing(peers.listen(self._backend)) as listener:
            present = peers.roll_call(place, self._backend, listener, self._findings)
            if present and peers.connect_all(place, present, self._findings):
                self._attempt(place, present)
        healthy = peers.share_result(place, self._findings)
        if healthy:
            self._findings.ok(f"all checks took {self._budget.spent:.0f} s")
        return healthy

    def _attempt(self, place: board.Board, present: Sequence[peers.Peer]) -> None:
        peers.check_present(present, self._findings)
        try:
            self._measure_and_verify(place.store, present)
        except Exception as error:
            # Any error must reach the other workers, which otherwise wait until the timeout.
            own = not isinstance(error, PeerError)
            reason = f"worker {self._member.rank}: {type(error).__name__}: {first_line(error)}" if own else str(error)
            peers.report_lost_worker(place, present, self._doing, reason, own, self._findings)

    def _measure_and_verify(self, store: Any, present: Sequence[peers.Peer]) -> None:
        cluster, findings = self._open(store), self._findings
        hosts, networked = [peer.host for peer in present], peers.networked(present)
        self._doing = "links"
        speed = links.probe(cluster)
        out = self._settings.out if cluster.leads else None

        network: Network | None = None

        def fitted() -> Network:
            nonlocal network
            network = network or links.fit(cluster, speed)
            return network

        def left() -> float:
            # The clock of worker 0 decides, so that all workers skip the same checks.
            return float(gather_rows(cluster, [torch.tensor([self._budget.left], dtype=torch.float64)])[0])

        stages: list[Stage] = [
            ("links", lambda: links.check_links(links.measure(cluster, hosts, speed), networked, findings)),
            ("network", lambda: links.write_preset(fitted(), hosts, self._backend, out, findings)),
            ("all-reduce", lambda: links.check_all_reduce(cluster, fitted(), networked, findings)),
            ("SparDL", lambda: correctness.check_spardl(cluster, networked, findings)),
            ("methods", lambda: correctness.check_methods(cluster, findings)),
            ("pace", lambda: correctness.check_pace(cluster, fitted(), findings)),
        ]
        run_stages([self._named(*stage) for stage in stages], left, findings)
        cluster.close()

    def _named(self, name: str, check: Callable[[], None]) -> Stage:
        def run() -> None:
            # A worker that is lost during the check is reported under its name.
            self._doing = "synchronizations" if name in _SYNCHRONIZING else name
            check()

        return name, run

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
    """Runs all checks and prints the results.

    Args:
        settings: Options of the command.
        member: Rank of this process and address of rank 0, if torchrun or srun started it; ``None`` starts workers on
            this machine.

    Returns:
        Whether all checks passed.

    Raises:
        ConfigError: If there are fewer GPUs or processes than requested.
    """
    torch.set_num_threads(1)  # several workers share the cores
    budget = TimeBudget(settings.budget)
    if member is None or member.rank == 0:
        print(
            f"doctor: the checks stop after about {settings.budget:.0f} s; remaining ones are skipped",
            file=sys.stderr,
            flush=True,
        )
    # Compiled before the fork, once for all workers, and before they wait for one another.
    precompile(torch.float32, _within_budget(prints=member is None or member.rank == 0))
    return _join(settings, member, budget) if member else _start(settings, budget)


def _within_budget(prints: bool) -> Iterator[Method]:
    """Yields the methods to check, as far as they can be compiled in time; with a warm cache, all methods."""
    began = time.perf_counter()
    if prints:
        print(f"compiling kernels, for at most {_COMPILING:.0f} s ...", file=sys.stderr, flush=True)
    methods = correctness.every_method(Findings(False))
    for done, (name, method) in enumerate(methods.items(), start=1):
        if time.perf_counter() - began > _COMPILING:
            return
        if prints:
            print(f"compiling kernels: {name} ({done} of {len(methods)})", file=sys.stderr, flush=True)
        yield method


def _start(settings: Settings, budget: TimeBudget) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reported = folder / "reported"

        def target(rank: int, heartbeat: object) -> None:
            # The workers share this machine, so the loopback interface works even without a network.
            os.environ.setdefault(board.VARIABLES["gloo"], "lo")
            member = Membership(rank, settings.workers, rank, settings.workers, "127.0.0.1", 0, alone=True)
            findings = Findings(rank == 0)
            store = dist.FileStore(str(folder / "store"), settings.workers)  # type: ignore[attr-defined]
            try:
                healthy = Examination(settings, member, findings, budget).run(store)
            finally:
                # Marks that a failure has been printed, so that the parent does not print it again.
                if findings.failures and findings.prints:
                    reported.touch()
            if not healthy:
                raise WorkerError("a check failed")

        try:
            run_processes(settings.workers, target, folder)
        except ConfigError:
            raise
        except SpardlError as error:
            if not reported.exists():
                # Workers of the doctor report no steps.
                Findings(True).fail(f"workers: {str(error).replace(' at step 0', '')}")
            return False
    return True


def _join(settings: Settings, member: Membership, budget: TimeBudget) -> bool:
    findings = Findings(member.rank == 0)
    try:
        store = board.join_store(member, settings.timeout)
        return Examination(settings, member, findings, budget).run(store)
    except PeerError as error:
        Findings(True).fail(f"workers: {error}")
        return False
