"""The simulated cluster: P workers in one process, on a virtual network with virtual clocks.

It runs the same communication programs as a real cluster, one at a time.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from spardl.basics.checks import check_bool, check_integer, check_type
from spardl.basics.errors import ConfigError, ProgramError
from spardl.clusters.base import Cluster, Work
from spardl.clusters.ledger import Ledger, PhaseStack, Stopwatch, message_logging, ring_cost
from spardl.clusters.network import Network
from spardl.protocol.programs import (
    AllGather,
    AllReduce,
    Boundary,
    Collective,
    Exchange,
    Phase,
    Program,
    Receive,
    ReduceScatter,
    Request,
    Send,
    Step,
)

if TYPE_CHECKING:
    from spardl.clusters.profile import Profile

__all__ = ["SimulatedCluster", "VirtualRun"]


# The virtual network. A message of m bytes sent at time t arrives at t + alpha + beta * m or later, and a link carries
# one message at a time in each direction. Mismatched programs raise an error that names both ranks instead of hanging.


class _Message(NamedTuple):
    payload: Tensor
    arrival: float


class VirtualRun:
    """Runs one synchronization or half of one, always continuing the program whose virtual clock is earliest.

    Args:
        programs: One program per worker.
        network: Network that determines the duration of messages.
        ledgers: One ledger per worker.
        clocks: Start time of each worker in seconds; overwritten with the end times.
        count_local: Whether the measured time of the programs' local work advances the clocks.
        begun: Whether the programs have already run up to a boundary, where they pause.
        pauses: Whether the programs stop at their first boundary.
        overlapped: Whether the programs overlap the computation.
        timer: Function that returns the time in seconds, to measure local work.
    """

    def __init__(
        self,
        programs: Sequence[Program[Any]],
        network: Network,
        ledgers: Sequence[Ledger],
        clocks: list[float],
        count_local: bool,
        *,
        begun: bool = False,
        pauses: bool = False,
        overlapped: bool = False,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._programs = programs
        self._network = network
        self._ledgers = ledgers
        self._clocks = clocks
        self._count_local = count_local
        self._begun = begun
        self._pauses = pauses
        self._overlapped = overlapped
        self._watches = [Stopwatch(ledger, overlapped=overlapped, timer=timer) for ledger in ledgers]
        self._phases = [Phase.MERGE] * len(programs)
        self._waiting: dict[int, Exchange] = {}
        # Time at which each worker has finished the work that overlaps its messages.
        self._busy = list(clocks)
        self._collective: dict[int, Collective] = {}
        self._in_flight: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        # Messages per worker that have not been sent yet, and the expected start time of the first of each.
        self._outbox: list[deque[Send]] = [deque() for _ in programs]
        self._heads: list[tuple[float, int]] = []
        self._out_free = list(clocks)
        self._in_free = list(clocks)
        self._results: dict[int, Any] = {}
        # Each rank occurs at most once, so the heap never compares replies, which have no order.
        self._ready: list[tuple[float, int, list[Tensor] | None]] = []

    def run_to_end(self) -> list[Any]:
        """Runs until each program has returned or paused; returns by rank its result or, if it paused, its boundary."""
        # A paused generator expects a reply; a new one accepts only None.
        first: list[Tensor] | None = [] if self._begun else None
        self._ready = [(clock, rank, first) for rank, clock in enumerate(self._clocks)]
        heapq.heapify(self._ready)
        while self._ready or self._heads:
            # The earlier event goes first: a message that starts, or a program that may send one. No program sends
            # before its own clock, and clocks never go back, so no unknown message can precede a started one. On a tie
            # the program goes first, because it may send a message at that very time.
            if self._heads and not (self._ready and self._ready[0][0] <= self._heads[0][0]):
                self._send_earliest()
            else:
                _, rank, reply = heapq.heappop(self._ready)
                self._advance(rank, reply)
        self._check_end()
        return [self._results[rank] for rank in range(len(self._programs))]

    def _advance(self, rank: int, reply: list[Tensor] | None) -> None:
        """Resumes one program until it waits for other workers or ends."""
        program, watch = self._programs[rank], self._watches[rank]
        watch.switch(self._phases[rank])
        try:
            request: Request = next(program) if reply is None else program.send(reply)
            while isinstance(request, (Phase, Step)) or (isinstance(request, Boundary) and not self._pauses):
                if isinstance(request, Phase):
                    self._advance_clock(rank, watch.switch(request))
                    self._phases[rank] = request
                request = program.send([])
        except StopIteration as stop:
            self._results[rank] = stop.value
            self._advance_clock(rank, watch.switch(None))
            return
        self._advance_clock(rank, watch.switch(None))
        if isinstance(request, Boundary):
            self._results[rank] = request
        else:
            self._post(rank, request)

    def _advance_clock(self, rank: int, seconds: float) -> None:
        if self._count_local:
            self._clocks[rank] += seconds

    def _post(self, rank: int, request: Exchange | Collective) -> None:
        if not isinstance(request, Exchange):
            self._collective[rank] = request
            if len(self._collective) == len(self._programs):
                self._collect()
            return
        self._ledgers[rank].count_exchange(request)
        self._waiting[rank] = request
        for send in request.sends:
            if not 0 <= send.to < len(self._programs):
                raise ProgramError(f"rank {rank} sends to rank {send.to}, but there are {len(self._programs)} workers")
        self._outbox[rank].extend(request.sends)
        self._enqueue_next(rank)
        self._busy[rank] = self._clocks[rank] + self._run_meanwhile(rank, request.meanwhile)
        self._deliver(rank)

    def _run_meanwhile(self, rank: int, meanwhile: Callable[[], None] | None) -> float:
        """Runs the work that overlaps a worker's messages; returns its duration on the virtual clock, in seconds."""
        if meanwhile is None:
            return 0.0
        watch = self._watches[rank]
        watch.switch(self._phases[rank])
        meanwhile()
        lasted = watch.switch(None)
        return lasted if self._count_local else 0.0

    def _enqueue_next(self, source: int) -> None:
        if self._outbox[source]:
            heapq.heappush(self._heads, (self._start(source), source))

    def _start(self, source: int) -> float:
        """Returns the earliest start of a worker's next message; other messages to the same target may delay it."""
        target = self._outbox[source][0].to
        return max(self._clocks[source], self._out_free[source], self._in_free[target])

    def _send_earliest(self) -> None:
        expected, source = heapq.heappop(self._heads)
        start = self._start(source)
        if start > expected:
            # Another message has occupied the link of the target since this start was computed.
            heapq.heappush(self._heads, (start, source))
            return
        send = self._outbox[source].popleft()
        busy = start + self._network.beta * send.payload.nbytes
        # Latency does not occupy a link: the next message may start while this one is still in flight.
        self._out_free[source] = self._in_free[send.to] = busy
        # The sender may overwrite the payload as soon as its own exchange ends.
        self._in_flight[source, send.to].append(_Message(send.payload.clone(), busy + self._network.alpha))
        self._enqueue_next(source)
        # Sorted, so that the order of events does not depend on the hash of a set.
        for waiting in sorted({source, send.to}):
            self._deliver(waiting)

    def _deliver(self, rank: int) -> None:
        """Resumes a waiting worker once all its messages are sent and all expected ones are in flight."""
        exchange = self._waiting.get(rank)
        if exchange is None or self._outbox[rank]:
            return
        for receive in exchange.receives:
            if not self._in_flight[receive.source, rank]:
                return
        del self._waiting[rank]
        messages = [self._receive(rank, receive) for receive in exchange.receives]
        now = self._busy[rank]
        then = max([now, self._out_free[rank] if exchange.sends else now, *(message.arrival for message in messages)])
        self._ledgers[rank].spend(Phase.COMMUNICATE, then - now, overlapped=self._overlapped)
        self._clocks[rank] = then
        heapq.heappush(self._ready, (then, rank, [message.payload for message in messages]))

    def _receive(self, rank: int, receive: Receive) -> _Message:
        message = self._in_flight[receive.source, rank].popleft()
        if message.payload.numel() != receive.size or message.payload.dtype != receive.dtype:
            raise ProgramError(
                f"rank {receive.source} sends {message.payload.numel()} x {message.payload.dtype} to rank {rank}, "
                f"which expects {receive.size} x {receive.dtype}"
            )
        if receive.into is None:
            return message
        return message._replace(payload=receive.into.copy_(message.payload))

    def _collect(self) -> None:
        # Counted at the ideal cost of a ring; sums run in rank order, so that all runs give the same bits.
        requests = [self._collective[rank] for rank in range(len(self._programs))]
        kinds = {type(request) for request in requests}
        if len(kinds) > 1:  # a real backend would hang or corrupt data
            raise ProgramError(f"the ranks start different collectives: {' and '.join(sorted(map(str, kinds)))}")
        (kind,), tensors = kinds, [request.tensor for request in requests]
        rounds, elements = ring_cost(requests[0], len(requests))
        cost = rounds * self._network.alpha + elements * tensors[0].itemsize * self._network.beta
        # A collective starts when the last worker has reached it, and ends at the same time on all of them.
        then = max(self._clocks) + cost
        replies = _COLLECTIVES[kind](tensors)
        self._collective.clear()
        for rank, reply in enumerate(replies):
            self._ledgers[rank].count_collective(rounds, elements, reply.itemsize)
            self._ledgers[rank].spend(Phase.COMMUNICATE, then - self._clocks[rank], overlapped=self._overlapped)
            self._clocks[rank] = then
            heapq.heappush(self._ready, (then, rank, [reply]))

    def _check_end(self) -> None:
        for rank, exchange in sorted(self._waiting.items()):
            for receive in exchange.receives:
                if not self._in_flight[receive.source, rank]:
                    raise ProgramError(
                        f"rank {rank} waits for a message from rank {receive.source}, {self._doing(receive.source)}"
                    )
        if self._collective:
            missing = min(set(range(len(self._programs))) - set(self._collective))
            raise ProgramError(
                f"rank {min(self._collective)} waits in a collective for rank {missing}, {self._doing(missing)}"
            )
        for (source, target), messages in self._in_flight.items():
            if messages:
                raise ProgramError(f"rank {source} sent a message that rank {target} never received")

    def _doing(self, rank: int) -> str:
        if rank in self._results:
            return "which has ended"
        if rank in self._collective:
            return "which waits in a collective"
        if rank in self._waiting:
            return f"which waits for rank {', '.join(str(r.source) for r in self._waiting[rank].receives)}"
        return "which does not exist"


def _all_reduce(tensors: Sequence[Tensor]) -> list[Tensor]:
    total = _sum(tensors)
    return [tensor.copy_(total) for tensor in tensors]


def _reduce_scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [chunk.clone() for chunk in _sum(tensors).tensor_split(len(tensors))]


def _all_gather(tensors: Sequence[Tensor]) -> list[Tensor]:
    chunks = [tensor.tensor_split(len(tensors))[rank] for rank, tensor in enumerate(tensors)]
    everything = torch.cat(chunks)
    return [tensor.copy_(everything) for tensor in tensors]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


_COLLECTIVES: Mapping[type[Collective], Callable[[Sequence[Tensor]], list[Tensor]]] = MappingProxyType(
    {AllReduce: _all_reduce, ReduceScatter: _reduce_scatter, AllGather: _all_gather}
)


T = TypeVar("T")


class SimulatedCluster(Cluster):
    """Cluster that simulates all workers in one process, on a virtual network.

    Each worker has two virtual clocks: one for its computation and one for its overlapped communication.

    Args:
        workers: Number of workers, P.
        network: Network that determines the virtual seconds of messages.
        device: Device of the model and all messages.
        count_local: Whether the measured time of local work (forward and backward pass, selection, ...) advances the
            virtual clocks; otherwise the clocks only count the time of messages.
        profile: Layer times to use instead of the measured times of the forward and backward pass; ``None`` measures
            them.
        timer: Function that returns the time in seconds, to measure local work. ``time.thread_time`` ignores the load
            of other programs on a busy machine, but is wrong with several threads or a GPU.

    Raises:
        ConfigError: If the number of workers is below 1, or an argument has the wrong type.

    Example:
        >>> from spardl.vector.layout import Layout
        >>> method = spardl.make_method("spardl", density=0.01)
        >>> network = spardl.clusters.Network(alpha=50e-6, gbit=1)
        >>> cluster = spardl.clusters.SimulatedCluster(8, network, count_local=False)
        >>> states = [method.init_state(Layout.flat(100_000), torch.float32) for _ in cluster.local_ranks]
        >>> for state in states:
        ...     method.accumulate(torch.randn(100_000), state)
        >>> averages = cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states)])
        >>> ledger = cluster.ledgers[0]
        >>> print(f"{ledger.rounds} rounds, {ledger.bytes_sent} bytes, {1e3 * cluster.seconds():.2f} ms")
        6 rounds, 9068 bytes, 0.37 ms
    """

    def __init__(
        self,
        workers: int,
        network: Network,
        *,
        device: torch.device | str = "cpu",
        count_local: bool = True,
        profile: Profile | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_integer("cluster.workers", workers, least=1)
        check_type("network", network, Network)
        check_bool("count_local", count_local)
        self.size = workers
        self.device = torch.device(device)
        self.local_ranks = range(workers)
        self.ledgers = [Ledger() for _ in range(workers)]
        self._clocks = [0.0] * workers
        self._streams = [0.0] * workers
        self._jobs: deque[_Job] = deque()
        self._network = network
        self._count_local = count_local
        self._profile = profile
        # Seconds of the profile that each worker has spent in its current pass.
        self._passed = [0.0] * workers
        self._with_logging = message_logging()
        self._stack = PhaseStack(self._charge, timer, self.ledgers[0])
        self._run = partial(VirtualRun, timer=timer)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs the programs of all workers, and advances their virtual clocks."""
        wrapped = self._with_logging(programs, self.local_workers)
        return self._run(wrapped, self._network, self.ledgers, self._clocks, self._count_local).run_to_end()

    def run_uncounted(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs the programs of all workers without advancing the clocks."""
        return self._run(programs, self._network, self._spare_ledgers(), [0.0] * self.size, False).run_to_end()

    def time_uncounted(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Runs the programs on temporary clocks; returns the virtual seconds of each worker."""
        clocks = [0.0] * self.size
        self._run(programs, self._network, self._spare_ledgers(), clocks, self._count_local).run_to_end()
        return clocks

    def _spare_ledgers(self) -> list[Ledger]:
        return [Ledger() for _ in self.local_ranks]

    def enqueue(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Work[T]:
        """Queues the programs of all workers; they run when the first result is requested."""
        return _SimulatedWork(self, self._with_logging(programs, self.local_workers), pauses)

    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Records the measured time of the ``with`` block for each local rank, and advances their virtual clocks."""
        return self._stack.timed(phase, local)

    def expect(self, layers: Sequence[int]) -> None:
        """Checks that the profile, if any, has the given numbers of entries per layer."""
        if self._profile is not None and tuple(layers) != self._profile.entries:
            raise ConfigError(
                f"cluster.profile describes a model with {len(self._profile.entries)} layers and "
                f"{sum(self._profile.entries)} parameters, but this model has {len(layers)} and {sum(layers)}; create "
                "one for this model with spardl profile"
            )

    @contextmanager
    def computing(self, local: int) -> Iterator[None]:
        """Records the ``with`` block as computation that takes the profile's time; without a profile, measures it."""
        with self.timed(Phase.COMPUTE, [local]):
            yield
        if self._profile is not None:
            self._proceed(local, self._profile.forward + self._profile.backward)
            self._passed[local] = 0.0

    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Advances the virtual clock to the time at which, according to the profile, the pass reaches these layers."""
        if self._profile is None:
            return
        times = [self._profile.layers[layer] for layer in layers]
        if backward:
            self._proceed(local, self._profile.forward + max((each.ready for each in times), default=0.0))
        else:
            self._proceed(local, min((each.needed for each in times), default=0.0))

    def _proceed(self, local: int, seconds: float) -> None:
        # Reports may repeat or arrive late; the clock never goes back.
        ahead = max(0.0, seconds - self._passed[local])
        self._passed[local] += ahead
        self._clocks[local] += ahead
        self.ledgers[local].spend(Phase.COMPUTE, ahead)

    def _charge(self, phase: Phase, local: Sequence[int], seconds: float) -> None:
        if phase is Phase.COMPUTE and self._profile is not None:
            return  # the profile replaces measured seconds
        for rank in local:
            self.ledgers[rank].spend(phase, seconds)
            self._clocks[rank] += seconds if self._count_local else 0.0

    def seconds(self) -> float:
        """Returns the virtual seconds of the slowest worker."""
        return max(self._clocks)

    def close(self) -> None:
        """Does nothing: a simulation holds no resources."""

    def now(self, local: int) -> float:
        """Returns the virtual time of local rank ``local`` in seconds."""
        self._stack.settle()  # the running phase has not advanced the clock yet
        return self._clocks[local]

    def append(self, job: _Job) -> None:
        """Appends ``job`` (one program per worker) to the communication streams of all workers."""
        self._jobs.append(job)

    def arrive(self, local: int, job: _Job) -> Any:
        """Advances a worker's computation clock to the end of its program in a job, and returns the result.

        Args:
            local: Position of the rank in ``local_ranks``.
            job: Job that was passed to ``append``.

        Returns:
            The result of the worker's program.
        """
        # Jobs run lazily, in the order in which they were enqueued, as in a communication thread.
        while job.results is None:
            self._run_job(self._jobs.popleft())
        waited = max(0.0, job.ends[local] - self.now(local))
        self._clocks[local] += waited
        self.ledgers[local].spend(Phase.WAIT, waited)
        return job.results[local]

    def _run_job(self, job: _Job) -> None:
        # A job starts when its stream is free and the worker has released it.
        job.ends = [max(pair) for pair in zip(self._streams, job.starts(), strict=True)]
        job.results = self._run(
            job.programs,
            self._network,
            self.ledgers,
            job.ends,
            self._count_local,
            begun=job.begun,
            pauses=job.pauses,
            overlapped=True,
        ).run_to_end()
        self._streams = list(job.ends)


class _Job:
    """The programs of all workers: as a whole, or the half before or after their boundary.

    Attributes:
        ends: Time at which each worker's program ends, in seconds on its communication clock.
        results: Result of each worker; ``None`` until the job has run.
    """

    def __init__(self, programs: Sequence[Program[Any]], *, begun: bool = False, pauses: bool = False) -> None:
        self.programs, self.begun, self.pauses = programs, begun, pauses
        self.released: dict[int, float] = {}
        self.ends: list[float] = []
        self.results: list[Any] | None = None

    def starts(self) -> list[float]:
        """Returns the virtual time in seconds at which each worker allowed the job to start, by rank."""
        missing = set(range(len(self.programs))) - set(self.released)
        if missing:
            raise ProgramError(f"a result is requested, but rank {min(missing)} has not released its program")
        return [self.released[rank] for rank in range(len(self.programs))]


class _SimulatedWork(Work[T]):
    """Programs that start once all workers have released them."""

    def __init__(self, cluster: SimulatedCluster, programs: Sequence[Program[T]], pauses: bool) -> None:
        self._cluster = cluster
        self._first = _Job(programs, pauses=pauses)
        # Programs that pause run as two jobs, because the computation between them takes virtual time.
        self._last = _Job(programs, begun=True) if pauses else self._first

    def release(self, local: int) -> None:
        if not self._first.released:
            self._cluster.append(self._first)
        self._first.released[local] = self._cluster.now(local)

    def boundary(self, local: int) -> Boundary:
        reached = self._cluster.arrive(local, self._first)
        assert isinstance(reached, Boundary)
        return reached

    def resume(self) -> None:
        self._last.released = {local: self._cluster.now(local) for local in range(self._cluster.size)}
        self._cluster.append(self._last)

    def wait(self, local: int) -> T:
        result: T = self._cluster.arrive(local, self._last)
        return result
