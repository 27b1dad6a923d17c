"""P workers in one process, on a virtual network with a virtual clock.

The programs are the ones that run on a real cluster, line for line; here they take turns. A message of m bytes
sent at t arrives no earlier than t + alpha + beta * m, and a link carries one message at a time in each
direction.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from spardl.clusters.base import Cluster
from spardl.clusters.ledger import Ledger, Stopwatch
from spardl.clusters.network import Network
from spardl.errors import ConfigError, ProgramError
from spardl.programs import AllReduce, Exchange, Phase, Program, Receive, Request

__all__ = ["SimulatedCluster"]

T = TypeVar("T")


class _Letter(NamedTuple):
    payload: Tensor
    arrival: float


class SimulatedCluster(Cluster):
    """All workers in this process.

    Args:
        workers: P.
        network: what the virtual seconds are reckoned with.
        device: where the model and all messages live.
        count_local: whether the measured seconds of local work (forward and backward pass, selection, ...)
            pass on the virtual clock too; without, it shows the network alone.

    Raises:
        ConfigError: if there is not at least one worker.
    """

    def __init__(
        self,
        workers: int,
        network: Network,
        *,
        device: torch.device | str = "cpu",
        count_local: bool = True,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"cluster.workers must be at least 1, got {workers}")
        self.size = workers
        self.device = torch.device(device)
        self.local_ranks = range(workers)
        self.ledgers = [Ledger() for _ in range(workers)]
        self._clocks = [0.0] * workers
        self._network = network
        self._count_local = count_local

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs."""
        run = _Run(programs, self._network, self.ledgers, self._clocks, self._count_local)
        return run.to_the_end()

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs while the clocks stand still."""
        ledgers = [Ledger() for _ in programs]
        return _Run(programs, self._network, ledgers, [0.0] * self.size, False).to_the_end()

    @contextmanager
    def timed(self, phase: Phase, local: Sequence[int]) -> Iterator[None]:
        """Enters measured seconds for each, and lets them pass on their virtual clocks."""
        started = time.perf_counter()
        try:
            yield
        finally:
            lasted = time.perf_counter() - started
            for rank in local:
                self.ledgers[rank].seconds[phase] += lasted
                self._clocks[rank] += lasted if self._count_local else 0.0

    def seconds(self) -> float:
        """Virtual seconds of the slowest worker."""
        return max(self._clocks)

    def close(self) -> None:
        """Nothing to leave."""


class _Run:
    """One synchronization: programs advance in the order of their virtual clocks."""

    def __init__(
        self,
        programs: Sequence[Program[Any]],
        network: Network,
        ledgers: Sequence[Ledger],
        clocks: list[float],
        count_local: bool,
    ) -> None:
        self._programs = programs
        self._network = network
        self._ledgers = ledgers
        self._clocks = clocks
        self._count_local = count_local
        self._watches = [Stopwatch(ledger) for ledger in ledgers]
        self._phases = [Phase.MERGE] * len(programs)
        self._waiting: dict[int, Exchange] = {}
        self._collective: dict[int, AllReduce] = {}
        self._letters: defaultdict[tuple[int, int], deque[_Letter]] = defaultdict(deque)
        self._out_free = list(clocks)
        self._in_free = list(clocks)
        self._results: dict[int, Any] = {}
        self._ready: list[tuple[float, int, list[Tensor] | None]] = []

    def to_the_end(self) -> list[Any]:
        """Runs until every program has returned."""
        self._ready = [(clock, rank, None) for rank, clock in enumerate(self._clocks)]
        heapq.heapify(self._ready)
        while self._ready:
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
            while isinstance(request, Phase):
                self._pass(rank, watch.switch(request))
                self._phases[rank] = request
                request = program.send([])
        except StopIteration as stop:
            self._results[rank] = stop.value
            self._pass(rank, watch.switch(None))
            return
        self._pass(rank, watch.switch(None))
        self._post(rank, request)

    def _pass(self, rank: int, seconds: float) -> None:
        if self._count_local:
            self._clocks[rank] += seconds

    def _post(self, rank: int, request: Exchange | AllReduce) -> None:
        if isinstance(request, AllReduce):
            self._collective[rank] = request
            if len(self._collective) == len(self._programs):
                self._all_reduce()
            return
        self._ledgers[rank].count_exchange(request)
        self._waiting[rank] = request
        for send in request.sends:
            self._carry(rank, send.to, send.payload)
        for waiting in sorted({rank, *(send.to for send in request.sends)}):
            self._deliver(waiting)

    def _carry(self, source: int, target: int, payload: Tensor) -> None:
        """Puts a message on the way."""
        if not 0 <= target < len(self._programs):
            raise ProgramError(f"rank {source} sends to rank {target}, but there are {len(self._programs)} workers")
        start = max(self._clocks[source], self._out_free[source], self._in_free[target])
        busy = start + self._network.beta * payload.nbytes
        self._out_free[source] = self._in_free[target] = busy
        # The sender may write into the payload as soon as its own exchange is over.
        self._letters[source, target].append(_Letter(payload.clone(), busy + self._network.alpha))

    def _deliver(self, rank: int) -> None:
        """Resumes a waiting worker if all it waits for is on the way."""
        exchange = self._waiting.get(rank)
        if exchange is None or not all(self._letters[r.source, rank] for r in exchange.receives):
            return
        del self._waiting[rank]
        letters = [self._open(rank, receive) for receive in exchange.receives]
        now = self._clocks[rank]
        then = max([now, self._out_free[rank] if exchange.sends else now, *(letter.arrival for letter in letters)])
        self._ledgers[rank].seconds[Phase.COMMUNICATE] += then - now
        self._clocks[rank] = then
        heapq.heappush(self._ready, (then, rank, [letter.payload for letter in letters]))

    def _open(self, rank: int, receive: Receive) -> _Letter:
        letter = self._letters[receive.source, rank].popleft()
        if letter.payload.numel() != receive.size or letter.payload.dtype != receive.dtype:
            raise ProgramError(
                f"rank {receive.source} sends {letter.payload.numel()} x {letter.payload.dtype} to rank {rank}, "
                f"which expects {receive.size} x {receive.dtype}"
            )
        return letter

    def _all_reduce(self) -> None:
        """A backend's collective: summed in the order of the ranks, at the ideal cost of a ring."""
        size = len(self._programs)
        tensors = [self._collective[rank].tensor for rank in range(size)]
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        rounds, elements = 2 * (size - 1), 2 * total.numel() * (size - 1) // size
        cost = rounds * self._network.alpha + elements * total.itemsize * self._network.beta
        then = max(self._clocks) + cost
        for rank, tensor in enumerate(tensors):
            self._ledgers[rank].count_collective(rounds, elements, total.itemsize)
            self._ledgers[rank].seconds[Phase.COMMUNICATE] += then - self._clocks[rank]
            self._clocks[rank] = then
            heapq.heappush(self._ready, (then, rank, [tensor.copy_(total)]))
        self._collective.clear()

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
                f"rank {min(self._collective)} waits in an all-reduce for rank {missing}, {self._doing(missing)}"
            )
        for (source, target), letters in self._letters.items():
            if letters:
                raise ProgramError(f"rank {source} sent a message that rank {target} never received")

    def _doing(self, rank: int) -> str:
        if rank in self._results:
            return "which has ended"
        if rank in self._collective:
            return "which waits in an all-reduce"
        if rank in self._waiting:
            return f"which waits for rank {', '.join(str(r.source) for r in self._waiting[rank].receives)}"
        return "which does not exist"
