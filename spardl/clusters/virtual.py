"""Programs of P workers on a virtual network, with virtual clocks.

A message of m bytes sent at t arrives no earlier than t + alpha + beta * m, and a link carries one message at a time in
each direction. A program that does not fit to the others' is an error that names both ranks, never a hang.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.basics.errors import ProgramError
from spardl.clusters.ledger import Ledger, Stopwatch, ring_cost
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

__all__ = ["VirtualRun"]


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
