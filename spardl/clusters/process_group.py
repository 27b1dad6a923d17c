"""A cluster with one process per worker, on top of torch.distributed.

Programs (sequences of messages of one worker) run in the main thread or, overlapped with the computation, in
communication threads. Each communication thread has its own process group, because torch.distributed requires the same
order of operations in a group on all ranks.
"""

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

from spardl.basics.checks import check_integer, check_seconds, check_type
from spardl.basics.errors import ConfigError, PeerError
from spardl.basics.weakrefs import on_finalize
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
    Step,
)
from spardl.vector.sparse import SparseVector

__all__ = [
    "Background",
    "Channel",
    "ProcessGroupCluster",
    "ProcessWork",
    "ProgramRunner",
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

# Seconds to wait for a communication thread at exit. A thread that still waits for a peer is left behind as a daemon.
_PATIENCE = 5.0


class Background:
    """A thread that runs jobs (functions) one after the other. After a failed job, later jobs raise the same error.

    On a GPU, jobs run on a separate CUDA stream: a job starts after the work that the caller's stream held at
    ``submit``, and the caller's stream waits for the job's work at ``result``.

    Args:
        device: Device of the jobs' tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], torch.cuda.Event | None] | None]
        self._jobs = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="spardl-communication", daemon=True)
        self._thread.start()
        # A daemon thread that still runs during interpreter shutdown can abort the process.
        atexit.register(self.close)

    def submit(self, job: Callable[[], T]) -> Future[tuple[T, torch.cuda.Event | None]]:
        """Queues a job, and returns a future, to be passed to ``result``."""
        future: Future[tuple[T, torch.cuda.Event | None]] = Future()
        self._jobs.put((future, job, self._mark()))
        return future

    def result(self, future: Future[tuple[T, torch.cuda.Event | None]]) -> T:
        """Waits for a job and returns its result, or raises its error."""
        value, event = future.result()
        if event is not None:
            # The caller's stream waits, not the host; record_stream keeps the allocator from reusing the memory early.
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in _tensors(value):
                tensor.record_stream(current)
        return value

    def close(self) -> None:
        """Ends the thread after its jobs; leaves it running if it still waits for another worker."""
        self.leave()
        self._thread.join(_PATIENCE)

    def leave(self) -> None:
        """Asks the thread to exit after its queued jobs. Does not block, so that a finalizer may call it."""
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
        # A separate function, so that its locals do not keep a finished job and its tensors alive until the next one.
        entry = self._jobs.get()
        if entry is not None:
            self._do(*entry)
        return entry is not None

    def _do(self, future: Future[Any], job: Callable[[], Any], after: torch.cuda.Event | None) -> None:
        # After a failure the ranks no longer agree on the next message, so later jobs must not communicate.
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


# Emulation of a slower network: each operation lasts at least as long as it would take there.


# Sleeping overshoots by up to this many seconds (timer slack of 50 us, plus wake-up), so the end of a wait polls the
# clock and yields the core to other processes.
_OVERSLEPT = 200e-6


@contextmanager
def lasting(network: Network, rounds: int, nbytes: int) -> Iterator[None]:
    """Context manager that lasts at least ``alpha * rounds + beta * nbytes`` seconds, to emulate a network.

    Args:
        network: Network to emulate.
        rounds: Number of messages that are sent one after the other.
        nbytes: Number of bytes sent or number of bytes received by a worker, whichever is larger (full-duplex links).
    """
    due = time.perf_counter() + network.alpha * rounds + network.beta * nbytes
    yield
    _wait_until(due)


def traffic(exchange: Exchange) -> int:
    """Returns the larger of two numbers: the bytes that a worker sends and those it receives in an exchange."""
    sent = sum(send.payload.nbytes for send in exchange.sends)
    return max(sent, sum(receive.size * receive.dtype.itemsize for receive in exchange.receives))


def _wait_until(due: float) -> None:
    remaining = due - time.perf_counter()
    if remaining > _OVERSLEPT:
        time.sleep(remaining - _OVERSLEPT)
    while time.perf_counter() < due:
        os.sched_yield()


# Running programs over a process group.


# Newer versions of torch rename these two functions and warn about the old names.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """Sends and receives the messages of one thread of one worker.

    Args:
        group: Process group of the workers, which no other thread may use. Its timeout limits every wait.
        device: Device of the messages.
        throttle: Slower network to emulate: each operation lasts at least as long as on that network; ``None`` for no
            delay.
    """

    def __init__(self, group: Any, device: torch.device, throttle: Network | None = None) -> None:
        self._group = group
        self._device = device
        self._throttle = throttle
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._by_host = by_host(group, device)

    def communicate(self, request: Exchange | Collective, ledger: Ledger) -> list[Tensor]:
        """Performs an exchange or collective that a program requests, and counts its messages.

        Args:
            request: Exchange or collective to perform.
            ledger: Ledger that counts the messages.

        Returns:
            The received tensors, with the shapes that the request states.

        Raises:
            PeerError: If the connection to another worker is lost, or a worker does not answer in time.
        """
        if isinstance(request, Exchange):
            ledger.count_exchange(request)
            if request.inside:
                return self._exchange(request)
            with self._throttled(1, lambda: traffic(request)):
                return self._exchange(request)
        run = _COLLECTIVES[type(request)]
        (rounds, elements), itemsize = ring_cost(request, self._size), request.tensor.itemsize
        ledger.count_collective(rounds, elements, itemsize)
        contact = self._contact(f"the {type(request).__name__} of the backend")
        with self._throttled(rounds, lambda: elements * itemsize), contact:
            return [self._run_collective(run, request.tensor)]

    def _run_collective(self, run: Callable[[Tensor, dist.ProcessGroup, int], Tensor], tensor: Tensor) -> Tensor:
        if not self._by_host:
            return run(tensor, self._group, self._rank)
        host = _host_copy(tensor)
        found = run(host, self._group, self._rank)
        return tensor.copy_(found) if found is host else found.to(tensor.device)

    def meet(self) -> None:
        """Waits until all workers have called this (a barrier).

        Raises:
            PeerError: If the connection to another worker is lost, or a worker does not answer in time.
        """
        # A rank that destroys the group early breaks connections that other ranks are still opening.
        with self._contact("a barrier"):
            dist.barrier(group=self._group)

    def _exchange(self, exchange: Exchange) -> list[Tensor]:
        buffers = [self._receive_buffer(receive) for receive in exchange.receives]
        # Receives come first: otherwise gloo runs the two directions of a pair one after the other. Empty messages are
        # skipped, because both sides know their size.
        operations = [
            dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=receive.source)
            for buffer, receive in zip(buffers, exchange.receives, strict=True)
            if buffer.numel()
        ]
        operations += [
            dist.P2POp(dist.isend, self._send_buffer(send.payload), group=self._group, group_peer=send.to)
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
        return [self._receive(*pair) for pair in zip(buffers, exchange.receives, strict=True)]

    def _send_buffer(self, payload: Tensor) -> Tensor:
        return _host_copy(payload) if self._by_host else payload.contiguous()

    def _receive_buffer(self, receive: Receive) -> Tensor:
        if self._by_host:
            return torch.empty(receive.size, dtype=receive.dtype)
        return self._destination(receive)

    def _receive(self, buffer: Tensor, receive: Receive) -> Tensor:
        return self._destination(receive).copy_(buffer) if self._by_host else buffer

    def _destination(self, receive: Receive) -> Tensor:
        if receive.into is not None:
            return receive.into
        return torch.empty(receive.size, dtype=receive.dtype, device=self._device)

    def _throttled(self, rounds: int, nbytes: Callable[[], int]) -> AbstractContextManager[None]:
        if self._throttle is None:
            return nullcontext()
        if self._device.type == "cuda":
            # Kernels that are queued before the send must not count as transfer time.
            torch.cuda.current_stream(self._device).synchronize()
        return lasting(self._throttle, rounds, nbytes())

    def _contact(self, what: str) -> AbstractContextManager[None]:
        return contact(self._rank, what)


@contextmanager
def contact(rank: int, what: str) -> Iterator[None]:
    """Context manager that raises ``PeerError`` instead of errors of the backend (gloo, NCCL).

    Args:
        rank: Rank of this worker, for the error message.
        what: Operation, for the error message.

    Raises:
        PeerError: Instead of the error of the backend.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"rank {rank} lost contact in {what}: {reason_of(error)}") from error


def by_host(group: Any, device: torch.device) -> bool:
    """Returns whether messages on ``device`` must be copied to the host, because gloo cannot send them from a GPU.

    gloo would pass the GPU address to the kernel's sockets, which reject it.
    """
    return device.type != "cpu" and over_gloo(group, device)


def over_gloo(group: Any, device: torch.device) -> bool:
    """Returns whether gloo sends messages on ``device``; backends may differ per device ("cpu:gloo,cuda:nccl")."""
    return f"{device.type}:gloo" in dist.get_backend_config(group)


def _host_copy(tensor: Tensor) -> Tensor:
    # A new tensor even for one in host memory: the caller may overwrite the original while gloo sends.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def reason_of(error: RuntimeError) -> str:
    """Returns the text of a gloo error without its source location and without the advice at its end."""
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
    _REDUCE_SCATTER(out, _equal_chunks(tensor, chunks), group=group)
    return out[: chunks[rank].numel()]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    chunks = tensor.tensor_split(group.size())
    longest = chunks[0].numel()
    everything = tensor.new_empty(longest * len(chunks))
    _ALL_GATHER(everything, _padded(chunks[rank], longest), group=group)
    for chunk, part in zip(chunks, everything.split(longest), strict=True):
        chunk.copy_(part[: chunk.numel()])
    return tensor


def _equal_chunks(tensor: Tensor, chunks: tuple[Tensor, ...]) -> Tensor:
    # The backend needs chunks of equal length; the first one is the longest.
    longest = chunks[0].numel()
    if tensor.numel() == longest * len(chunks):
        return tensor
    return torch.cat([_padded(chunk, longest) for chunk in chunks])


def _padded(chunk: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(chunk, (0, length - chunk.numel()))


_COLLECTIVES: Mapping[type[Collective], Callable[[Tensor, dist.ProcessGroup, int], Tensor]] = MappingProxyType(
    {AllReduce: _all_reduce, ReduceScatter: _reduce_scatter, AllGather: _all_gather}
)


class ProgramRunner(Generic[T]):
    """Runs the program of one worker: sends and receives the messages that it requests.

    Args:
        program: Program to run.
        channel: Channel that sends and receives its messages.
        ledger: Ledger that records its messages and times.
        overlapped: Whether the program overlaps the computation.
    """

    def __init__(self, program: Program[T], channel: Channel, ledger: Ledger, *, overlapped: bool = False) -> None:
        self._program, self._channel, self._ledger, self._overlapped = program, channel, ledger, overlapped
        self._phase = Phase.MERGE
        self._reply: list[Tensor] | None = None
        self._result: T | None = None

    def run_to_end(self) -> T:
        """Runs the program to its end, without a pause at its boundary; returns its result."""
        while self.run_to_boundary() is not None:
            pass
        return cast("T", self._result)

    def run_to_boundary(self) -> Boundary | None:
        """Runs the program up to its next boundary and returns that; returns ``None`` if the program ends first."""
        watch = Stopwatch(self._ledger, overlapped=self._overlapped)
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
        # Work that overlaps messages counts for its own phase, not as communication.
        watch.switch(self._phase)
        work()
        watch.switch(Phase.COMMUNICATE)


# Seconds between two polls of the store, and seconds that late workers get before they count as missing after a
# failure.
_POLL, _LINGER = 0.05, 1.0


class ProcessGroupCluster(Cluster):
    """Cluster of the workers of a process group; overlapped programs run in threads with separate groups.

    Args:
        group: Process group of the workers; ``None`` for the default group, which must be initialized. Its timeout
            limits every wait.
        device: Device of the messages; NCCL needs the GPU of the worker.
        timeout: Timeout of every wait of the communication threads, in seconds.
        throttle: Slower network to emulate: in each thread, a round lasts at least as long as on that network.
            Congestion, also between threads, is not emulated.
        streams: Number of communication threads, each with its own process group. Successive synchronizations use them
            in turn, so that one can select or merge entries while another sends messages. More than one helps if a
            round trip takes milliseconds and a schedule synchronizes several groups of layers.

    Raises:
        ConfigError: If the number of streams is below 1 or does not suit the device, if there is no process group, or
            if this process is not a member of it.
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
        check_type("throttle", throttle, Network, optional=True)
        check_streams(streams, torch.device(device), throttle)
        if not dist.is_initialized():
            raise ConfigError("no process group is initialized; call torch.distributed.init_process_group() first")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                "this process is not a member of the process group; pass a group that contains it, or None for the "
                "default group"
            )
        check_type("group", group, dist.ProcessGroup, optional=True)
        self._group = dist.group.WORLD if group is None else group
        self._timeout = timedelta(seconds=timeout)
        self._throttle = throttle
        self._channel = Channel(self._group, torch.device(device), throttle)
        self._side_groups: list[_SideGroup] = []
        self._streams, self._turn = streams, -1
        self.device = torch.device(device)
        self._with_logging = message_logging()
        self._started = time.perf_counter()
        self.size = dist.get_world_size(self._group)
        self.local_ranks = (dist.get_rank(self._group),)
        ledger = Ledger()
        self.ledgers = (ledger,)
        # The callback captures the ledger, not self: a reference cycle would keep the group alive until the next
        # garbage collection, beyond destroy_process_group(), and its threads can abort a process that ends in between.
        self._stack = PhaseStack(lambda phase, local, seconds: ledger.spend(phase, seconds), ledger=ledger)
        on_finalize(self, _end_unreleased, self._side_groups)  # at exit, Background ends its thread itself

    @property
    def group(self) -> Any:
        """Process group of the workers."""
        return self._group

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs the program of this worker in the main thread; returns a list with its result."""
        (program,) = self._with_logging(programs, self.local_workers)
        return [ProgramRunner(program, self._channel, self.ledgers[0]).run_to_end()]

    def run_uncounted(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs the program of this worker without recording its costs; returns a list with its result."""
        return [ProgramRunner(programs[0], self._channel, Ledger()).run_to_end()]

    def time_uncounted(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Runs the program of this worker without recording its costs; returns a list with its wall-clock seconds."""
        began = self.now(0)
        (self.run if self.counts_calibration else self.run_uncounted)(programs)
        return [self.now(0) - began]

    def enqueue(self, programs: Sequence[Program[T]], *, pauses: bool = False, counted: bool = True) -> ProcessWork[T]:
        """Prepares the program of this worker to run in a communication thread.

        Each of the first ``streams`` calls opens a thread and its group; all workers must make these calls at the same
        time.

        Args:
            programs: List with the program of this worker.
            pauses: Whether the program pauses at its first ``Boundary`` until it is resumed.
            counted: Whether the ledger counts the program as part of training.

        Returns:
            The asynchronous work, which releases the program and waits for it.

        Raises:
            PeerError: If a stream cannot be opened, because a worker has ended or does not answer in time.
        """
        if len(self._side_groups) < self._streams:
            self._side_groups.append(self._open())
        # All workers prepare the same programs in the same order, so rotation selects the same stream on all ranks.
        self._turn = (self._turn + 1) % self._streams
        side = self._side_groups[self._turn]
        (program,) = self._with_logging(programs, self.local_workers) if counted else programs
        runner = ProgramRunner(program, side.channel, self.ledgers[0] if counted else Ledger(), overlapped=True)
        return ProcessWork(runner, side.thread, self._stack, pauses)

    def check_alive(self) -> None:
        """Checks that the process group still exists.

        Raises:
            ConfigError: If the process group was destroyed.
        """
        try:
            alive = dist.is_initialized() and dist.get_rank(self._group) >= 0
        except ValueError:  # torch no longer knows it
            alive = False
        if not alive:
            raise ConfigError(
                "the process group of this handle was destroyed; call destroy_process_group() after the last step, or "
                "create a new handle after init_process_group()"
            )

    def open(self) -> None:
        """Opens all communication threads now instead of on first use; all workers must call this at the same time.

        Raises:
            PeerError: If a worker has ended or does not answer in time.
        """
        while len(self._side_groups) < self._streams:
            self._side_groups.append(self._open())

    def _open(self) -> _SideGroup:
        ranks = dist.get_process_group_ranks(self._group)
        backend = dist.get_backend(self._group)
        with contact(dist.get_rank(self._group), "creating a process group, which needs all workers"):
            self._await_all()
            group: Any = dist.new_group(ranks, timeout=self._timeout, backend=backend, use_local_synchronization=True)
        channel = Channel(group, self.device, self._throttle)
        if over_gloo(group, self.device):  # other backends connect on the first message
            channel.meet()
        return _SideGroup(group, channel, Background(self.device))

    def _await_all(self) -> None:
        """Waits until all workers open a stream; ``new_group`` alone would wait for a dead worker until the timeout.

        Raises:
            RuntimeError: If a worker has ended or does not answer in time; names it if the store can be read.
        """
        # Each worker counts its calls in the store of the group, which shows the missing workers. gloo also reports a
        # closed connection at once: to rank 0, and to the other ranks when rank 0 has ended.
        rank = self.local_ranks[0]
        # torch exposes the store of a group since version 2.8.
        store = getattr(self._group, "get_group_store", lambda: None)()
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
                with suppress(RuntimeError):  # the store ends with the worker that holds it
                    # Late workers are not missing, and they need the store that rank 0 holds.
                    while (len(found := missing()) > 1 or rank == 0) and time.monotonic() < until:
                        time.sleep(_POLL)
                raise RuntimeError(f"{_missing_prefix(found)}{reason_of(error)}") from error
            return
        until = time.monotonic() + self._timeout.total_seconds()
        while found := missing():
            if time.monotonic() > until:
                raise RuntimeError(f"{_missing_prefix(found)}timed out after {self._timeout.total_seconds():g} seconds")
            time.sleep(_POLL)

    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Records the wall-clock time of the ``with`` block as time of ``phase``."""
        return self._stack.timed(phase, local)

    def expect(self, layers: Sequence[int]) -> None:
        """Does nothing: processes can train any model."""

    def computing(self, local: int) -> AbstractContextManager[None]:
        """Records the wall-clock time of the ``with`` block as computation."""
        return self.timed(Phase.COMPUTE, [local])

    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Does nothing: wall clocks advance on their own."""

    def now(self, local: int) -> float:
        """Returns the wall-clock seconds since this object was created, after waiting for queued GPU work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.seconds()

    def seconds(self) -> float:
        """Returns the wall-clock seconds since this object was created."""
        return time.perf_counter() - self._started

    def release(self) -> None:
        """Ends the communication threads and destroys their groups."""
        while self._side_groups:
            side = self._side_groups.pop()
            side.thread.close()
            with suppress(ValueError):  # all groups may already be destroyed
                dist.destroy_process_group(side.group)

    def close(self) -> None:
        """Ends the communication threads and destroys their groups, and the default process group if it is used."""
        self.release()
        if self._group is dist.group.WORLD:
            dist.destroy_process_group()


def _missing_prefix(ranks: Sequence[int]) -> str:
    return f"no answer from rank {', '.join(map(str, ranks))}; " if ranks else ""


def check_streams(streams: int, device: torch.device, throttle: Network | None) -> None:
    """Checks the number of communication threads.

    Raises:
        ConfigError: If the number is below 1, or is above 1 on a GPU or with a throttle.
    """
    check_integer("cluster.streams", streams, least=1)
    if streams > 1 and device.type == "cuda":
        raise ConfigError(f"cluster.streams={streams} can deadlock on GPUs (NCCL groups wait for one another); use 1")
    # Throttling delays each thread alone, as if each had a full link.
    if streams > 1 and throttle is not None:
        raise ConfigError(
            f"cluster.streams={streams} cannot be combined with a throttle, as each stream would have the full rate; "
            "use 1"
        )


@dataclass(frozen=True)
class _SideGroup:
    """A communication thread with its process group."""

    group: dist.ProcessGroup
    channel: Channel
    thread: Background


def _end_unreleased(side_groups: Sequence[_SideGroup]) -> None:
    """Ends the threads of a cluster that was garbage-collected without ``release``."""
    # No program can be in flight: it would keep the cluster alive. The groups are not destroyed here, because that
    # changes global state of torch and a finalizer may run at any time.
    for side in side_groups:
        side.thread.leave()
    if side_groups and dist.is_initialized():
        warnings.warn(
            "spardl: a handle was garbage-collected without detach(), so its process group stays open until the "
            "process exits; call detach() (Outer: close())",
            ResourceWarning,
            stacklevel=3,
        )


class ProcessWork(Work[T]):
    """Asynchronous work of one worker: its program runs in a communication thread."""

    def __init__(self, runner: ProgramRunner[T], thread: Background, stack: PhaseStack, pauses: bool) -> None:
        self._runner, self._thread, self._stack, self._pauses = runner, thread, stack, pauses
        self._paused: Future[Any] | None = None
        self._ended: Future[Any] | None = None

    def release(self, local: int) -> None:
        """Starts the program as soon as the communication thread is free."""
        if self._pauses:
            self._paused = self._thread.submit(self._runner.run_to_boundary)
        else:
            self._ended = self._thread.submit(self._runner.run_to_end)

    def boundary(self, local: int) -> Boundary:
        """Waits until the program pauses, and returns its boundary."""
        with self._stack.timed(Phase.WAIT, [local]):
            assert self._paused is not None
            reached = self._thread.result(self._paused)
            assert isinstance(reached, Boundary)
            return reached

    def resume(self) -> None:
        """Continues the paused program as soon as the communication thread is free."""
        self._ended = self._thread.submit(self._runner.run_to_end)

    def wait(self, local: int) -> T:
        """Waits until the program ends, and returns its result."""
        with self._stack.timed(Phase.WAIT, [local]):
            assert self._ended is not None
            result: T = self._thread.result(self._ended)
            return result
