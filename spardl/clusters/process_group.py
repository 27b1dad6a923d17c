"""One process per worker, over torch.distributed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spardl.basics.checks import check_kind, check_seconds, check_whole
from spardl.basics.errors import ConfigError
from spardl.basics.weak import when_dropped
from spardl.clusters.background import Background
from spardl.clusters.base import Cluster, Flight
from spardl.clusters.channel import Channel, Journey, contact, over_gloo, reason_of
from spardl.clusters.following import follower
from spardl.clusters.ledger import Ledger, PhaseStack
from spardl.clusters.network import Network
from spardl.protocol.programs import Boundary, Phase, Program

__all__ = ["ProcessFlight", "ProcessGroupCluster", "check_streams"]

T = TypeVar("T")

# Seconds between two looks at the store, and until a worker that has not come counts as missing if another has died.
_POLL, _LINGER = 0.05, 1.0


class ProcessGroupCluster(Cluster):
    """Drives one program over a process group, and others beside it in a thread with a group of its own.

    Args:
        group: whose members are the workers; ``None`` is the default group, which must be initialised. Its
            timeout bounds every wait.
        device: where messages live; NCCL needs the worker's GPU.
        timeout: seconds that bound every wait of what runs beside the computation.
        throttle: a network that the real one is slowed down to: no round, in either thread, is over before it would be
            over there. A lower bound in time, for each worker and each thread alone: queues are not emulated.
        streams: threads beside the computation, each with a group of its own. Synchronizations take turns with them, so
            one can select or merge while another's messages are under way. More than one gains where a round trip takes
            milliseconds and a schedule has several groups.

    Raises:
        ConfigError: if there is not at least one stream, or there are several where that cannot work; if there is no
            process group yet, or this process is not in it.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        throttle: Network | None = None,
        streams: int = 1,
    ) -> None:
        check_seconds("timeout", timeout)
        check_kind("throttle", throttle, Network, optional=True)
        check_streams(streams, torch.device(device), throttle)
        if not dist.is_initialized():
            raise ConfigError("there is no process group yet; call torch.distributed.init_process_group() first")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                "this process is no member of the process group; give a group that it is in, or None for the default "
                "one"
            )
        check_kind("group", group, dist.ProcessGroup, optional=True)
        self._group = dist.group.WORLD if group is None else group
        self._timeout = timedelta(seconds=timeout)
        self._throttle = throttle
        self._channel = Channel(self._group, torch.device(device), throttle)
        self._beside: list[_Beside] = []
        self._streams, self._turn = streams, -1
        self.device = torch.device(device)
        self._follow = follower()
        self._started = time.perf_counter()
        self.size = dist.get_world_size(self._group)
        self.local_ranks = (dist.get_rank(self._group),)
        ledger = Ledger()
        self.ledgers = (ledger,)
        # Nothing here may refer to this object, or the group would outlive it, and destroy_process_group(), until the
        # next garbage collection: its threads then abort a process that ends meanwhile.
        self._stack = PhaseStack(lambda phase, local, seconds: ledger.spend(phase, seconds))
        when_dropped(self, _forgotten, self._beside)  # at the end of the program Background sees to that

    @property
    def group(self) -> Any:
        """Whose members are the workers."""
        return self._group

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program."""
        (program,) = self._follow(programs, self.local_workers)
        return [Journey(program, self._channel, self.ledgers[0]).to_the_end()]

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program with a ledger that is thrown away."""
        return [Journey(programs[0], self._channel, Ledger()).to_the_end()]

    def time_aside(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Wall seconds."""
        began = self.now(0)
        (self.run if self.counts_calibration else self.run_aside)(programs)
        return [self.now(0) - began]

    def flight(self, programs: Sequence[Program[T]], *, pauses: bool = False, counted: bool = True) -> ProcessFlight[T]:
        """Prepares this worker's program for another thread; the first times, all workers must call this at once.

        Args:
            programs: this worker's.
            pauses: whether it rests at its first ``Boundary`` until it is resumed.
            counted: whether it is part of training, and entered in the ledger, or housekeeping.

        Returns:
            What is released, and waited for.

        Raises:
            RuntimeError: if a stream cannot be opened, because a worker has died or does not come in time.
        """
        if len(self._beside) < self._streams:
            self._beside.append(self._open())
        # All workers prepare the same flights in the same order, so each flight has the same stream everywhere.
        self._turn = (self._turn + 1) % self._streams
        beside = self._beside[self._turn]
        (program,) = self._follow(programs, self.local_workers) if counted else programs
        journey = Journey(program, beside.channel, self.ledgers[0] if counted else Ledger(), beside=True)
        return ProcessFlight(journey, beside.thread, self._stack, pauses)

    def check_alive(self) -> None:
        """Accepts a process group that was not destroyed since this was made.

        Raises:
            ConfigError: if it was.
        """
        try:
            alive = dist.is_initialized() and dist.get_rank(self._group) >= 0
        except ValueError:  # torch no longer knows it
            alive = False
        if not alive:
            raise ConfigError(
                "the process group of this handle was destroyed; call destroy_process_group() after the last step, or "
                "make the handle anew after init_process_group()"
            )

    def open(self) -> None:
        """Opens all streams now instead of when they are first needed; all workers must call this at once.

        Raises:
            RuntimeError: if a worker has died or does not come in time.
        """
        while len(self._beside) < self._streams:
            self._beside.append(self._open())

    def _open(self) -> _Beside:
        ranks = dist.get_process_group_ranks(self._group)
        backend = dist.get_backend(self._group)
        with contact(dist.get_rank(self._group), "making a group of its own, to which all workers must come"):
            self._await_all()
            group: Any = dist.new_group(ranks, timeout=self._timeout, backend=backend, use_local_synchronization=True)
        channel = Channel(group, self.device, self._throttle)
        if over_gloo(group, self.device):  # others connect when they first send
            channel.meet()
        return _Beside(group, channel, Background(self.device))

    def _await_all(self) -> None:
        """Waits until all workers are here. A new group would wait for a worker that has died until the timeout.

        Each worker counts its calls in the store of the group, which shows who is missing. gloo also tells rank 0 at
        once that a connection has been closed, and the others when rank 0 has ended.

        Raises:
            RuntimeError: if a worker has died, or does not come in time; names it if the store can be read.
        """
        rank, store = self.local_ranks[0], _store_of(self._group)
        calls = [f"spardl/calls/{other}" for other in range(self.size)]
        here = store.add(calls[rank], 1) if store else 0

        def missing() -> list[int]:
            return [other for other, key in enumerate(calls) if store.add(key, 0) < here] if store else []

        if dist.get_backend(self._group) == dist.Backend.GLOO:
            try:
                dist.monitored_barrier(self._group, self._timeout)
            except RuntimeError as error:
                found: list[int] = []
                until = time.monotonic() + _LINGER
                with suppress(RuntimeError):  # the store may have ended with the worker that held it
                    # Workers that are about to come are not missing, and rank 0 keeps the store for them.
                    while (len(found := missing()) > 1 or rank == 0) and time.monotonic() < until:
                        time.sleep(_POLL)
                raise RuntimeError(f"{_no_sign(found)}{reason_of(error)}") from error
            return
        until = time.monotonic() + self._timeout.total_seconds()
        while found := missing():
            if time.monotonic() > until:
                raise RuntimeError(f"{_no_sign(found)}waited {self._timeout.total_seconds():g} seconds")
            time.sleep(_POLL)

    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Enters wall seconds."""
        return self._stack.timed(phase, local)

    def expect(self, layers: Sequence[int]) -> None:
        """Any model will do."""

    def computing(self, local: int) -> AbstractContextManager[None]:
        """Enters wall seconds."""
        return self.timed(Phase.COMPUTE, [local])

    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Wall clocks need not be told."""

    def now(self, local: int) -> float:
        """Wall seconds since this object was made."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.seconds()

    def seconds(self) -> float:
        """Wall seconds since this object was made."""
        return time.perf_counter() - self._started

    def release(self) -> None:
        """Ends the threads and destroys their groups."""
        while self._beside:
            beside = self._beside.pop()
            beside.thread.close()
            with suppress(ValueError):  # all groups may be gone already
                dist.destroy_process_group(beside.group)

    def close(self) -> None:
        """Ends the threads; destroys the groups, the given one only if it is the default group."""
        self.release()
        if self._group is dist.group.WORLD:
            dist.destroy_process_group()


def _store_of(group: Any) -> Any:
    """The store in which the members of a group met; ``None`` if torch does not show it (before 2.8)."""
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def _no_sign(ranks: Sequence[int]) -> str:
    return f"no sign of rank {', '.join(map(str, ranks))}; " if ranks else ""


def check_streams(streams: int, device: torch.device, throttle: Network | None) -> None:
    """Accepts a number of streams.

    Raises:
        ConfigError: if there is not at least one, or there are several where that cannot work.
    """
    check_whole("cluster.streams", streams, least=1)
    if streams > 1 and device.type == "cuda":
        raise ConfigError("cluster.streams: on GPUs, several groups of NCCL can wait for one another; use 1")
    if streams > 1 and throttle is not None:
        raise ConfigError("cluster.streams: a throttle slows each stream down as if it had the link alone; use 1")


@dataclass(frozen=True)
class _Beside:
    """A stream beside the computation."""

    group: dist.ProcessGroup
    channel: Channel
    thread: Background


def _forgotten(beside: Sequence[_Beside]) -> None:
    """Nobody has the cluster any more; streams that it did not release are idle, or their programs would have it.

    Their groups stay: to destroy one changes what torch knows of all, and memory may be freed at any time.
    """
    for each in beside:
        each.thread.leave()
    if beside and dist.is_initialized():
        warnings.warn(
            "spardl: a handle was dropped without detach() (Outer: close()); its process group, of threads and "
            "sockets, stays until the process ends",
            ResourceWarning,
            stacklevel=3,
        )


class ProcessFlight(Flight[T]):
    """A program in the other thread; see :class:`Flight` for what it does."""

    def __init__(self, journey: Journey[T], thread: Background, stack: PhaseStack, pauses: bool) -> None:
        self._journey, self._thread, self._stack, self._pauses = journey, thread, stack, pauses
        self._paused: Future[Any] | None = None
        self._ended: Future[Any] | None = None

    def release(self, local: int) -> None:
        """Queues the program."""
        if self._pauses:
            self._paused = self._thread.submit(self._journey.to_a_boundary)
        else:
            self._ended = self._thread.submit(self._journey.to_the_end)

    def boundary(self, local: int) -> Boundary:
        """Waits for the program to pause."""
        with self._stack.timed(Phase.WAIT, [local]):
            assert self._paused is not None
            reached = self._thread.result(self._paused)
            assert isinstance(reached, Boundary)
            return reached

    def failing(self, tell: Callable[[BaseException], None]) -> None:
        """Tells, in any thread, what went wrong with a released program, if something does."""
        assert self._ended is not None

        def look(ended: Future[Any]) -> None:
            error = ended.exception()
            if error is not None:
                tell(error)

        self._ended.add_done_callback(look)

    def resume(self) -> None:
        """Queues what comes after the pause."""
        self._ended = self._thread.submit(self._journey.to_the_end)

    def wait(self, local: int) -> T:
        """Waits for the program to end."""
        with self._stack.timed(Phase.WAIT, [local]):
            assert self._ended is not None
            result: T = self._thread.result(self._ended)
            return result
