"""P workers in one process, on a virtual network with a virtual clock.

The programs are the ones that run on a real cluster, line for line; here they take turns.
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

from spardl.basics.checks import check_flag, check_kind, check_whole
from spardl.basics.errors import ConfigError, ProgramError
from spardl.clusters.base import Cluster, Flight
from spardl.clusters.ledger import Ledger, PhaseStack, Stopwatch, follower, ring_cost
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


# Programs of P workers on a virtual network, with virtual clocks.
#
# A message of m bytes sent at t arrives no earlier than t + alpha + beta * m, and a link carries one message at a time
# in each direction. A program that does not fit to the others' is an error that names both ranks, never a hang.


class _Letter(NamedTuple):
    payload: Tensor
    arrival: float


class VirtualRun:
    """One synchronization, or half of one: programs advance in the order of their virtual clocks.

    Args:
        programs: one per worker.
        network: what messages cost.
        ledgers: one per worker.
        clocks: when each worker begins; moved on to when it ends.
        count_local: whether measured seconds of the programs' own work pass on the clocks.
        begun: whether the programs have run up to a boundary before.
        pauses: whether they end at their first boundary.
        beside: whether they run beside the computation.
        timer: what the programs' own work is measured with, in seconds.
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
        beside: bool = False,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._programs = programs
        self._network = network
        self._ledgers = ledgers
        self._clocks = clocks
        self._count_local = count_local
        self._begun = begun
        self._pauses = pauses
        self._beside = beside
        self._watches = [Stopwatch(ledger, beside=beside, timer=timer) for ledger in ledgers]
        self._phases = [Phase.MERGE] * len(programs)
        self._waiting: dict[int, Exchange] = {}
        # When what a worker does while its messages are under way is done.
        self._busy = list(clocks)
        self._collective: dict[int, Collective] = {}
        self._letters: defaultdict[tuple[int, int], deque[_Letter]] = defaultdict(deque)
        # Each worker's messages that have not begun to travel, and when the first of each is expected to.
        self._outbox: list[deque[Send]] = [deque() for _ in programs]
        self._heads: list[tuple[float, int]] = []
        self._out_free = list(clocks)
        self._in_free = list(clocks)
        self._results: dict[int, Any] = {}
        # A rank is in here once at most, so replies, which have no order, are never compared.
        self._ready: list[tuple[float, int, list[Tensor] | None]] = []

    def to_the_end(self) -> list[Any]:
        """Runs until every program has returned, or is at its boundary; gives what it returned, or the boundary."""
        # What rests at its boundary waits for a reply; a fresh generator takes none.
        first: list[Tensor] | None = [] if self._begun else None
        self._ready = [(clock, rank, first) for rank, clock in enumerate(self._clocks)]
        heapq.heapify(self._ready)
        while self._ready or self._heads:
            # Who is earlier: a message that begins to travel, or a program that may send another. No program sends
            # before its own clock, and clocks never go back: so no message is overtaken by one that is not known yet.
            # At equal times the program goes first, since it may send one that begins just then.
            if self._heads and not (self._ready and self._ready[0][0] <= self._heads[0][0]):
                self._carry()
            else:
                _, rank, reply = heapq.heappop(self._ready)
                self._advance(rank, reply)
        self._check_end()
        return [self._results[rank] for rank in range(len(self._programs))]

    def _advance(self, rank: int, reply: list[Tensor] | None) -> None:
        """Resumes one program until it waits for others or ends."""
        program, watch = self._programs[rank], self._watches[rank]
        watch.switch(self._phases[rank])
        try:
            request: Request = next(program) if reply is None else program.send(reply)
            while isinstance(request, (Phase, Step)) or (isinstance(request, Boundary) and not self._pauses):
                if isinstance(request, Phase):
                    self._pass(rank, watch.switch(request))
                    self._phases[rank] = request
                request = program.send([])
        except StopIteration as stop:
            self._results[rank] = stop.value
            self._pass(rank, watch.switch(None))
            return
        self._pass(rank, watch.switch(None))
        if isinstance(request, Boundary):
            self._results[rank] = request
        else:
            self._post(rank, request)

    def _pass(self, rank: int, seconds: float) -> None:
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
        self._next(rank)
        self._busy[rank] = self._clocks[rank] + self._work(rank, request.meanwhile)
        self._deliver(rank)

    def _work(self, rank: int, meanwhile: Callable[[], None] | None) -> float:
        """Seconds on the worker's clock of what it does while its messages are under way."""
        if meanwhile is None:
            return 0.0
        watch = self._watches[rank]
        watch.switch(self._phases[rank])
        meanwhile()
        lasted = watch.switch(None)
        return lasted if self._count_local else 0.0

    def _next(self, source: int) -> None:
        """Lines up a worker's next message, if there is one."""
        if self._outbox[source]:
            heapq.heappush(self._heads, (self._start(source), source))

    def _start(self, source: int) -> float:
        """When a worker's next message can begin to travel; later, if others go to the same target meanwhile."""
        target = self._outbox[source][0].to
        return max(self._clocks[source], self._out_free[source], self._in_free[target])

    def _carry(self) -> None:
        """Puts the earliest message on the way."""
        expected, source = heapq.heappop(self._heads)
        start = self._start(source)
        if start > expected:
            # Another message took the target's link since this one was lined up.
            heapq.heappush(self._heads, (start, source))
            return
        send = self._outbox[source].popleft()
        busy = start + self._network.beta * send.payload.nbytes
        # Latency keeps no link busy: the next message may begin while this one is still on its way.
        self._out_free[source] = self._in_free[send.to] = busy
        # The sender may write into the payload as soon as its own exchange is over.
        self._letters[source, send.to].append(_Letter(send.payload.clone(), busy + self._network.alpha))
        self._next(source)
        for waiting in sorted({source, send.to}):
            self._deliver(waiting)

    def _deliver(self, rank: int) -> None:
        """Resumes a waiting worker if all that it sends and waits for is on the way."""
        exchange = self._waiting.get(rank)
        if exchange is None or self._outbox[rank]:
            return
        for receive in exchange.receives:
            if not self._letters[receive.source, rank]:
                return
        del self._waiting[rank]
        letters = [self._open(rank, receive) for receive in exchange.receives]
        now = self._busy[rank]
        then = max([now, self._out_free[rank] if exchange.sends else now, *(letter.arrival for letter in letters)])
        self._ledgers[rank].spend(Phase.COMMUNICATE, then - now, beside=self._beside)
        self._clocks[rank] = then
        heapq.heappush(self._ready, (then, rank, [letter.payload for letter in letters]))

    def _open(self, rank: int, receive: Receive) -> _Letter:
        letter = self._letters[receive.source, rank].popleft()
        if letter.payload.numel() != receive.size or letter.payload.dtype != receive.dtype:
            raise ProgramError(
                f"rank {receive.source} sends {letter.payload.numel()} x {letter.payload.dtype} to rank {rank}, "
                f"which expects {receive.size} x {receive.dtype}"
            )
        if receive.into is None:
            return letter
        return letter._replace(payload=receive.into.copy_(letter.payload))

    def _collect(self) -> None:
        """A backend's collective: at the ideal cost of a ring, sums in the order of the ranks."""
        requests = [self._collective[rank] for rank in range(len(self._programs))]
        kinds = {type(request) for request in requests}
        if len(kinds) > 1:
            raise ProgramError(f"the ranks do not agree on a collective: {' and '.join(sorted(map(str, kinds)))}")
        (kind,), tensors = kinds, [request.tensor for request in requests]
        rounds, elements = ring_cost(requests[0], len(requests))
        cost = rounds * self._network.alpha + elements * tensors[0].itemsize * self._network.beta
        then = max(self._clocks) + cost
        replies = _COLLECTIVES[kind](tensors)
        self._collective.clear()
        for rank, reply in enumerate(replies):
            self._ledgers[rank].count_collective(rounds, elements, reply.itemsize)
            self._ledgers[rank].spend(Phase.COMMUNICATE, then - self._clocks[rank], beside=self._beside)
            self._clocks[rank] = then
            heapq.heappush(self._ready, (then, rank, [reply]))

    def _check_end(self) -> None:
        for rank, exchange in sorted(self._waiting.items()):
            for receive in exchange.receives:
                if not self._letters[receive.source, rank]:
                    raise ProgramError(
                        f"rank {rank} waits for a message from rank {receive.source}, {self._doing(receive.source)}"
                    )
        if self._collective:
            missing = min(set(range(len(self._programs))) - set(self._collective))
            raise ProgramError(
                f"rank {min(self._collective)} waits in a collective for rank {missing}, {self._doing(missing)}"
            )
        for (source, target), letters in self._letters.items():
            if letters:
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
    """All workers in this process.

    Every worker has two virtual clocks: of its computation, and of the communication beside it.

    Args:
        workers: P.
        network: what the virtual seconds of messages are reckoned with.
        device: where the model and all messages live.
        count_local: whether the measured seconds of local work (forward and backward pass, selection, ...) pass on the
            virtual clocks too; without, they show the network alone.
        profile: seconds of the forward and backward pass to use instead of measured ones.
        timer: what local work is measured with, in seconds. ``time.thread_time`` leaves out what other programs take of
            a busy machine; it is wrong where several threads work, or a GPU.

    Raises:
        ConfigError: if there is not at least one worker, or an argument is of a wrong type.

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
        check_whole("cluster.workers", workers, least=1)
        check_kind("network", network, Network)
        check_flag("count_local", count_local)
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
        # Seconds of the profile that have passed in the pass which each worker is in.
        self._passed = [0.0] * workers
        self._follow = follower()
        self._stack = PhaseStack(self._charge, timer)
        self._run = partial(VirtualRun, timer=timer)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs."""
        followed = self._follow(programs, self.local_workers)
        return self._run(followed, self._network, self.ledgers, self._clocks, self._count_local).to_the_end()

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs while the clocks stand still."""
        return self._run(programs, self._network, self._spare_ledgers(), [0.0] * self.size, False).to_the_end()

    def time_aside(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Virtual seconds, on clocks that are thrown away."""
        clocks = [0.0] * self.size
        self._run(programs, self._network, self._spare_ledgers(), clocks, self._count_local).to_the_end()
        return clocks

    def _spare_ledgers(self) -> list[Ledger]:
        return [Ledger() for _ in self.local_ranks]

    def flight(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Flight[T]:
        """Prepares all workers' programs; they run when the first result is asked for."""
        return _SimulatedFlight(self, self._follow(programs, self.local_workers), pauses)

    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Enters measured seconds for each, and lets them pass on their virtual clocks."""
        return self._stack.timed(phase, local)

    def expect(self, layers: Sequence[int]) -> None:
        """Checks that the profile, if there is one, is of this model."""
        if self._profile is not None and tuple(layers) != self._profile.entries:
            raise ConfigError(
                f"cluster.profile is of a model with {len(self._profile.entries)} layers and "
                f"{sum(self._profile.entries)} parameters, this one has {len(layers)} and {sum(layers)}; make one of "
                "this model with spardl profile"
            )

    @contextmanager
    def computing(self, local: int) -> Iterator[None]:
        """Measured seconds, or those of the profile."""
        with self.timed(Phase.COMPUTE, [local]):
            yield
        if self._profile is not None:
            self._proceed(local, self._profile.forward + self._profile.backward)
            self._passed[local] = 0.0

    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Moves the clock on to where the profile has these layers."""
        if self._profile is None:
            return
        times = [self._profile.layers[layer] for layer in layers]
        if backward:
            self._proceed(local, self._profile.forward + max((each.ready for each in times), default=0.0))
        else:
            self._proceed(local, min((each.needed for each in times), default=0.0))

    def _proceed(self, local: int, seconds: float) -> None:
        ahead = max(0.0, seconds - self._passed[local])
        self._passed[local] += ahead
        self._clocks[local] += ahead
        self.ledgers[local].spend(Phase.COMPUTE, ahead)

    def _charge(self, phase: Phase, local: Sequence[int], seconds: float) -> None:
        if phase is Phase.COMPUTE and self._profile is not None:
            return
        for rank in local:
            self.ledgers[rank].spend(phase, seconds)
            self._clocks[rank] += seconds if self._count_local else 0.0

    def seconds(self) -> float:
        """Virtual seconds of the slowest worker."""
        return max(self._clocks)

    def close(self) -> None:
        """Nothing to leave."""

    def now(self, local: int) -> float:
        """Virtual seconds."""
        self._stack.settle()
        return self._clocks[local]

    def enqueue(self, job: _Job) -> None:
        """Puts ``job``, communication, into the streams of all workers."""
        self._jobs.append(job)

    def arrive(self, local: int, job: _Job) -> Any:
        """Lets a worker's computation wait until its part of a job is done.

        Args:
            local: which local rank.
            job: as enqueued.

        Returns:
            The result of its program.
        """
        while job.results is None:
            self._work_off(self._jobs.popleft())
        waited = max(0.0, job.ends[local] - self.now(local))
        self._clocks[local] += waited
        self.ledgers[local].spend(Phase.WAIT, waited)
        return job.results[local]

    def _work_off(self, job: _Job) -> None:
        job.ends = [max(pair) for pair in zip(self._streams, job.starts(), strict=True)]
        job.results = self._run(
            job.programs,
            self._network,
            self.ledgers,
            job.ends,
            self._count_local,
            begun=job.begun,
            pauses=job.pauses,
            beside=True,
        ).to_the_end()
        self._streams = list(job.ends)


class _Job:
    """All workers' programs up to a boundary, from one, or whole.

    Attributes:
        ends: when each worker is through, on the clocks of communication.
        results: of each worker; ``None`` before it ran.
    """

    def __init__(self, programs: Sequence[Program[Any]], *, begun: bool = False, pauses: bool = False) -> None:
        self.programs, self.begun, self.pauses = programs, begun, pauses
        self.released: dict[int, float] = {}
        self.ends: list[float] = []
        self.results: list[Any] | None = None

    def starts(self) -> list[float]:
        """When each worker released it."""
        missing = set(range(len(self.programs))) - set(self.released)
        if missing:
            raise ProgramError(f"a result is asked for that rank {min(missing)} has not begun to send")
        return [self.released[rank] for rank in range(len(self.programs))]


class _SimulatedFlight(Flight[T]):
    """Programs that wait for all workers to release them."""

    def __init__(self, cluster: SimulatedCluster, programs: Sequence[Program[T]], pauses: bool) -> None:
        self._cluster = cluster
        self._first = _Job(programs, pauses=pauses)
        self._last = _Job(programs, begun=True) if pauses else self._first

    def release(self, local: int) -> None:
        if not self._first.released:
            self._cluster.enqueue(self._first)
        self._first.released[local] = self._cluster.now(local)

    def boundary(self, local: int) -> Boundary:
        reached = self._cluster.arrive(local, self._first)
        assert isinstance(reached, Boundary)
        return reached

    def resume(self) -> None:
        self._last.released = {local: self._cluster.now(local) for local in range(self._cluster.size)}
        self._cluster.enqueue(self._last)

    def wait(self, local: int) -> T:
        result: T = self._cluster.arrive(local, self._last)
        return result
