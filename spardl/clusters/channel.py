"""Programs over a process group of torch.distributed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from spardl.basics.errors import PeerError
from spardl.clusters.ledger import Ledger, Stopwatch, ring_cost
from spardl.clusters.network import Network
from spardl.clusters.throttle import lasting, traffic
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

__all__ = ["Channel", "Journey", "by_host", "contact", "over_gloo", "reason_of"]

T = TypeVar("T")

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
