"""One process per worker, over torch.distributed."""

from __future__ import annotations

import atexit
import os
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from spardl.basics.checks import check_kind, check_seconds, check_whole
from spardl.basics.errors import ConfigError, PeerError
from spardl.basics.weak import when_dropped
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
    Step,
)
from spardl.vector.sparse import SparseVector

__all__ = [
    "Background",
    "Channel",
    "Journey",
    "ProcessFlight",
    "ProcessGroupCluster",
    "by_host",
    "check_streams",
    "contact",
    "lasting",
    "over_gloo",
    "reason_of",
    "traffic",
]


# A thread that communicates while the main thread computes.


T = TypeVar("T")

# Seconds that a thread which waits for a peer may take to hear that all is over; it is a daemon after that.
_PATIENCE = 5.0


class Background:
    """Works off jobs one after the other. After one that failed, all others fail like it.

    On a GPU the jobs have a stream of their own: a job begins when what the caller's stream held at ``submit`` is
    done, and the caller's stream goes on after ``result`` when the job's work is done.

    Args:
        device: where the jobs' tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], torch.cuda.Event | None] | None]
        self._jobs = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="spardl-communication", daemon=True)
        self._thread.start()
        # A daemon that still runs when the interpreter is taken down can abort the process.
        atexit.register(self.close)

    def submit(self, job: Callable[[], T]) -> Future[tuple[T, torch.cuda.Event | None]]:
        """Queues a job; ``result`` of this class reads what is returned."""
        future: Future[tuple[T, torch.cuda.Event | None]] = Future()
        self._jobs.put((future, job, self._mark()))
        return future

    def result(self, future: Future[tuple[T, torch.cuda.Event | None]]) -> T:
        """What a job returned, once it is done; raises what the job raised."""
        value, event = future.result()
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in _tensors(value):
                tensor.record_stream(current)
        return value

    def close(self) -> None:
        """Ends the thread, unless it still waits for somebody."""
        self.leave()
        self._thread.join(_PATIENCE)

    def leave(self) -> None:
        """Lets the thread end when it has done its jobs, and waits for nothing: may be called while memory is freed."""
        atexit.unregister(self.close)
        self._jobs.put(None)

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _work(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while self._next():
                pass

    def _next(self) -> bool:
        # Of its own, so that nothing here keeps a job, and all that belongs to it, until there is another.
        entry = self._jobs.get()
        if entry is not None:
            self._do(*entry)
        return entry is not None

    def _do(self, future: Future[Any], job: Callable[[], Any], after: torch.cuda.Event | None) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        try:
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            value = job()
            future.set_result((value, self._mark()))
        except BaseException as error:
            self._failure = error
            future.set_exception(error)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Boundary):
        return _tensors(value.shard)
    if isinstance(value, SparseVector):
        return [value.indices, value.values]
    return [value] if isinstance(value, Tensor) else []


# Slow networks for who cannot shape a real one: waiting until a network would have been done, at the earliest.


# Sleeps take up to so much longer than asked for (the kernel's timer slack of 50 us, and waking up): the last bit of a
# wait is spent looking at the clock, and other processes may have the core meanwhile.
_OVERSLEPT = 200e-6


@contextmanager
def lasting(network: Network, rounds: int, nbytes: int) -> Iterator[None]:
    """Waits, after what is done inside, until it has lasted ``alpha * rounds + beta * nbytes`` seconds.

    Args:
        network: how fast the links would be.
        rounds: how often messages are started one after the other.
        nbytes: the larger of what a worker sends and what it receives, links being full duplex.
    """
    due = time.perf_counter() + network.alpha * rounds + network.beta * nbytes
    yield
    _wait_until(due)


def traffic(exchange: Exchange) -> int:
    """Bytes that a worker sends or receives in an exchange, whichever are more."""
    sent = sum(send.payload.nbytes for send in exchange.sends)
    return max(sent, sum(receive.size * receive.dtype.itemsize for receive in exchange.receives))


def _wait_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _OVERSLEPT:
        time.sleep(left - _OVERSLEPT)
    while time.perf_counter() < due:
        os.sched_yield()


# Programs over a process group of torch.distributed.


# Newer versions of torch have other names for these two, and warn of the old ones.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """What one thread of one worker sends and receives.

    Args:
        group: whose members are the workers; its timeout bounds every wait. No other thread may use it.
        device: where messages live.
        throttle: a network; what takes less time than it would there is slowed down.
    """

    def __init__(self, group: Any, device: torch.device, throttle: Network | None = None) -> None:
        self._group = group
        self._device = device
        self._throttle = throttle
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._by_host = by_host(group, device)

    def communicate(self, request: Exchange | Collective, ledger: Ledger) -> list[Tensor]:
        """Does what a program asks for, and counts it.

        Args:
            request: what is asked for.
            ledger: where it is counted.

        Returns:
            What arrived, in the shapes that were announced.

        Raises:
            PeerError: if contact with another worker is lost, or it does not answer in time.
        """
        if isinstance(request, Exchange):
            ledger.count_exchange(request)
            with self._slowed(1, lambda: traffic(request)):
                return self._exchange(request)
        run = _COLLECTIVES[type(request)]
        (rounds, elements), itemsize = ring_cost(request, self._size), request.tensor.itemsize
        ledger.count_collective(rounds, elements, itemsize)
        contact = self._contact(f"the backend's {type(request).__name__} over all workers")
        with self._slowed(rounds, lambda: elements * itemsize), contact:
            return [self._collected(run, request.tensor)]

    def _collected(self, run: Callable[[Tensor, dist.ProcessGroup, int], Tensor], tensor: Tensor) -> Tensor:
        if not self._by_host:
            return run(tensor, self._group, self._rank)
        host = _copied(tensor)
        found = run(host, self._group, self._rank)
        return tensor.copy_(found) if found is host else found.to(tensor.device)

    def meet(self) -> None:
        """Waits for all workers: who lets go of the group earlier breaks the connections that others still make.

        Raises:
            PeerError: if contact with another worker is lost, or it does not answer in time.
        """
        with self._contact("a barrier"):
            dist.barrier(group=self._group)

    def _exchange(self, exchange: Exchange) -> list[Tensor]:
        buffers = [self._buffer(receive) for receive in exchange.receives]
        # gloo runs a pair's two directions one after the other unless the receive is posted first, and
        # neither backend needs to move an empty message whose size both sides know.
        operations = [
            dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=receive.source)
            for buffer, receive in zip(buffers, exchange.receives, strict=True)
            if buffer.numel()
        ]
        operations += [
            dist.P2POp(dist.isend, self._outgoing(send.payload), group=self._group, group_peer=send.to)
            for send in exchange.sends
            if send.payload.numel()
        ]
        contact = partial(self._contact, _describe(exchange))
        begun: list[dist.Work] = []
        if operations:
            with contact():
                begun = dist.batch_isend_irecv(operations)
        if exchange.meanwhile is not None:
            exchange.meanwhile()
        with contact():
            for work in begun:
                work.wait()
        return [self._landed(*pair) for pair in zip(buffers, exchange.receives, strict=True)]

    def _outgoing(self, payload: Tensor) -> Tensor:
        return _copied(payload) if self._by_host else payload.contiguous()

    def _buffer(self, receive: Receive) -> Tensor:
        if self._by_host:
            return torch.empty(receive.size, dtype=receive.dtype)
        return self._place(receive)

    def _landed(self, buffer: Tensor, receive: Receive) -> Tensor:
        return self._place(receive).copy_(buffer) if self._by_host else buffer

    def _place(self, receive: Receive) -> Tensor:
        if receive.into is not None:
            return receive.into
        return torch.empty(receive.size, dtype=receive.dtype, device=self._device)

    def _slowed(self, rounds: int, nbytes: Callable[[], int]) -> AbstractContextManager[None]:
        if self._throttle is None:
            return nullcontext()
        if self._device.type == "cuda":
            # What the GPU has to do before it can send must not count as sending.
            torch.cuda.current_stream(self._device).synchronize()
        return lasting(self._throttle, rounds, nbytes())

    def _contact(self, what: str) -> AbstractContextManager[None]:
        return contact(self._rank, what)


@contextmanager
def contact(rank: int, what: str) -> Iterator[None]:
    """Lets a backend's errors be those of a lost worker.

    Args:
        rank: who waits.
        what: it waits for, in words.

    Raises:
        PeerError: in place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"rank {rank} lost contact in {what}: {reason_of(error)}") from error


def by_host(group: Any, device: torch.device) -> bool:
    """Whether messages on a ``device`` go through the host's memory, as the backend of a ``group`` sends no other.

    gloo would give the address of a GPU's memory to the kernel's sockets, which refuse it.
    """
    return device.type != "cpu" and over_gloo(group, device)


def over_gloo(group: Any, device: torch.device) -> bool:
    """Whether gloo sends a group's messages on a device, which may have a backend of its own ("cpu:gloo,cuda:nccl")."""
    return f"{device.type}:gloo" in dist.get_backend_config(group)


def _copied(tensor: Tensor) -> Tensor:
    """In the host's memory, contiguous, and nobody else's."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def reason_of(error: RuntimeError) -> str:
    """What gloo says, without its source file in front and its advice behind."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).split(" This is typically caused")[0].rstrip(".")


def _describe(exchange: Exchange) -> str:
    sources = ", ".join(str(receive.source) for receive in exchange.receives)
    targets = ", ".join(str(send.to) for send in exchange.sends)
    return f"an exchange (receiving from rank {sources or 'none'}, sending to rank {targets or 'none'})"


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def _reduce_scatter(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    chunks = tensor.tensor_split(group.size())
    out = tensor.new_empty(chunks[0].numel())
    _REDUCE_SCATTER(out, _even(tensor, chunks), group=group)
    return out[: chunks[rank].numel()]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    chunks = tensor.tensor_split(group.size())
    longest = chunks[0].numel()
    everything = tensor.new_empty(longest * len(chunks))
    _ALL_GATHER(everything, _padded(chunks[rank], longest), group=group)
    for chunk, part in zip(chunks, everything.split(longest), strict=True):
        chunk.copy_(part[: chunk.numel()])
    return tensor


def _even(tensor: Tensor, chunks: tuple[Tensor, ...]) -> Tensor:
    """All chunks at the length of the first, which is the longest."""
    longest = chunks[0].numel()
    if tensor.numel() == longest * len(chunks):
        return tensor
    return torch.cat([_padded(chunk, longest) for chunk in chunks])


def _padded(chunk: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(chunk, (0, length - chunk.numel()))


_COLLECTIVES: Mapping[type[Collective], Callable[[Tensor, dist.ProcessGroup, int], Tensor]] = MappingProxyType(
    {AllReduce: _all_reduce, ReduceScatter: _reduce_scatter, AllGather: _all_gather}
)


class Journey(Generic[T]):
    """One worker's program on its way.

    Args:
        program: what to run.
        channel: where its messages go.
        ledger: where its cost is entered.
        beside: whether it runs beside the computation.
    """

    def __init__(self, program: Program[T], channel: Channel, ledger: Ledger, *, beside: bool = False) -> None:
        self._program, self._channel, self._ledger, self._beside = program, channel, ledger, beside
        self._phase = Phase.MERGE
        self._reply: list[Tensor] | None = None
        self._result: T | None = None

    def to_the_end(self) -> T:
        """Runs what is left of the program, past any boundary."""
        while self.to_a_boundary() is not None:
            pass
        return cast("T", self._result)

    def to_a_boundary(self) -> Boundary | None:
        """Runs until the next boundary; ``None`` if there is none any more."""
        watch = Stopwatch(self._ledger, beside=self._beside)
        watch.switch(self._phase)
        try:
            while True:
                request = next(self._program) if self._reply is None else self._program.send(self._reply)
                self._reply = []
                if isinstance(request, Boundary):
                    return request
                if isinstance(request, Phase):
                    self._phase = request
                elif not isinstance(request, Step):
                    if isinstance(request, Exchange) and request.meanwhile is not None:
                        request = replace(request, meanwhile=partial(self._aside, watch, request.meanwhile))
                    watch.switch(Phase.COMMUNICATE)
                    self._reply = self._channel.communicate(request, self._ledger)
                watch.switch(self._phase)
        except StopIteration as stop:
            self._result = stop.value
            return None
        finally:
            watch.switch(None)

    def _aside(self, watch: Stopwatch, work: Callable[[], None]) -> None:
        """Work that hides behind messages is entered as what it is."""
        watch.switch(self._phase)
        work()
        watch.switch(Phase.COMMUNICATE)


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
            PeerError: if a stream cannot be opened, because a worker has died or does not come in time.
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
            PeerError: if a worker has died or does not come in time.
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
