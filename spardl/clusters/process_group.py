"""One process per worker, over torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spardl.clusters.base import Cluster
from spardl.clusters.ledger import Ledger, Stopwatch
from spardl.errors import PeerError
from spardl.programs import AllReduce, Exchange, Phase, Program, Receive, Request

__all__ = ["ProcessGroupCluster"]

T = TypeVar("T")


class ProcessGroupCluster(Cluster):
    """Drives one program over a process group.

    Args:
        group: whose members are the workers; ``None`` is the default group, which must be initialised. Its
            timeout bounds every wait.
        device: where messages live; NCCL needs the worker's GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.device = torch.device(device)
        self._rank = dist.get_rank(self._group)
        self._started = time.perf_counter()
        self.size = dist.get_world_size(self._group)
        self.local_ranks = (self._rank,)
        self.ledgers = (Ledger(),)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program."""
        return [self._drive(programs[0], self.ledgers[0])]

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program with a ledger that is thrown away."""
        return [self._drive(programs[0], Ledger())]

    @contextmanager
    def timed(self, phase: Phase, local: Sequence[int]) -> Iterator[None]:
        """Enters wall seconds."""
        watch = Stopwatch(self.ledgers[0])
        watch.switch(phase)
        try:
            yield
        finally:
            watch.switch(None)

    def seconds(self) -> float:
        """Wall seconds since this object was made."""
        return time.perf_counter() - self._started

    def close(self) -> None:
        """Destroys the default process group, if it is the one in use."""
        if self._group is dist.group.WORLD:
            dist.destroy_process_group()

    def _drive(self, program: Program[T], ledger: Ledger) -> T:
        watch = Stopwatch(ledger)
        phase = Phase.MERGE
        reply: list[Tensor] = []
        watch.switch(phase)
        try:
            request = next(program)
            while True:
                if isinstance(request, Phase):
                    phase, reply = request, []
                else:
                    watch.switch(Phase.COMMUNICATE)
                    reply = self._communicate(request, ledger)
                watch.switch(phase)
                request = program.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            watch.switch(None)

    def _communicate(self, request: Request, ledger: Ledger) -> list[Tensor]:
        if isinstance(request, Exchange):
            ledger.count_exchange(request)
            return self._exchange(request)
        assert isinstance(request, AllReduce)
        ideal = 2 * request.tensor.numel() * (self.size - 1) // self.size
        ledger.count_collective(2 * (self.size - 1), ideal, request.tensor.itemsize)
        with self._contact("the backend's all-reduce over all workers"):
            dist.all_reduce(request.tensor, group=self._group)
        return [request.tensor]

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
            dist.P2POp(dist.isend, send.payload.contiguous(), group=self._group, group_peer=send.to)
            for send in exchange.sends
            if send.payload.numel()
        ]
        if operations:
            with self._contact(_describe(exchange)):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return buffers

    def _buffer(self, receive: Receive) -> Tensor:
        return torch.empty(receive.size, dtype=receive.dtype, device=self.device)

    @contextmanager
    def _contact(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerError(f"rank {self._rank} lost contact in {what}: {reason}") from error


def _describe(exchange: Exchange) -> str:
    sources = ", ".join(str(receive.source) for receive in exchange.receives)
    targets = ", ".join(str(send.to) for send in exchange.sends)
    return f"an exchange (receiving from rank {sources or 'none'}, sending to rank {targets or 'none'})"
