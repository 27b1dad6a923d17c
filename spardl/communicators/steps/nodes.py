"""Programs of workers that share nodes: dense means inside each node, and a method between the nodes.

All workers of a node start from the same mean gradient, run the same program of the method, and so hold the same
messages. Each of them sends an equal part of every message to its counterpart on the other node, and the workers of the
receiving node then exchange these parts. The link of a node carries each message once, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.dense import Dense
from spardl.protocol.programs import Boundary, Collective, Exchange, Program, Receive, Request, Send, Worker

__all__ = ["Nodes"]

T = TypeVar("T")


@dataclass(frozen=True)
class Nodes:
    """Layout of the workers: consecutive ranks share a node, and all nodes have equally many.

    Args:
        ranks_per_node: Number of workers of each node, at least 1.
    """

    ranks_per_node: int = 1

    def check(self, workers: int) -> None:
        """Checks that the workers fill whole nodes.

        Args:
            workers: Number of workers.

        Raises:
            ConfigError: If they do not.
        """
        if workers % self.ranks_per_node:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} does not divide the {workers} workers; start equally many "
                "workers on each node"
            )

    def count(self, workers: int) -> int:
        """Returns the number of nodes of ``workers`` workers."""
        return workers // self.ranks_per_node

    def node_of(self, worker: Worker) -> Worker:
        """Returns the node of a ``worker``, as one of the workers between which a method runs."""
        return Worker(worker.rank // self.ranks_per_node, self.count(worker.size))

    def mean_inside(self, worker: Worker, gradient: Tensor) -> Program[None]:
        """Replaces the gradients of a node by their mean, bit-identical on its workers; each of them runs this.

        Args:
            worker: Worker that runs this generator.
            gradient: Gradient of the worker, shape (n,); overwritten.
        """
        count = self.ranks_per_node
        if count == 1:
            return
        first = worker.rank - worker.rank % count
        total = Dense().total(Worker(worker.rank - first, count), gradient)

        def ask(request: Request) -> Program[list[Tensor]]:
            if isinstance(request, Boundary):
                return []  # the sum over all workers comes later
            if isinstance(request, Exchange):
                sends = [send._replace(to=first + send.to) for send in request.sends]
                receives = [receive._replace(source=first + receive.source) for receive in request.receives]
                request = Exchange(sends, receives, inside=True)
            return (yield request)

        # The sum of finite float16 numbers often overflows.
        early = gradient.dtype == torch.float16
        if early:
            gradient.div_(count)
        yield from _translated(total, ask)
        if not early:
            gradient.div_(count)

    def between(self, worker: Worker, program: Program[T], device: torch.device) -> Program[T]:
        """Runs the program of a node, whose requests name nodes, on all workers of the node.

        Args:
            worker: Worker that runs this generator.
            program: Program of the worker's node, with the same bits on all workers of the node.
            device: Device of the messages.

        Returns:
            The result of ``program``.
        """
        if self.ranks_per_node == 1:
            return (yield from program)

        def ask(request: Request) -> Program[list[Tensor]]:
            if isinstance(request, Exchange):
                return (yield from self._exchange(worker, request, device))
            if isinstance(request, Collective):
                raise ConfigError(
                    f"ranks_per_node={self.ranks_per_node} does not support a communicator that yields "
                    f"{type(request).__name__}, a collective of all workers; declare it with `collective = True`"
                )
            return (yield request)

        return (yield from _translated(program, ask))

    def _exchange(self, worker: Worker, request: Exchange, device: torch.device) -> Program[list[Tensor]]:
        """Sends this worker's parts of the messages of its node, and completes what the node receives."""
        count, own = self.ranks_per_node, worker.rank % self.ranks_per_node
        whole = [_buffer(receive, device) for receive in request.receives]
        sends = [
            Send(count * send.to + own, _part(send.payload, own, count), _words(send.words, own, count))
            for send in request.sends
        ]
        receives = [
            _into(count * receive.source + own, _part(buffer, own, count))
            for receive, buffer in zip(request.receives, whole, strict=True)
        ]
        yield Exchange(sends, receives, request.meanwhile)
        for message in whole:
            yield _share(message, worker.rank - own, own, count)
        return whole


def _translated(program: Program[T], ask: Callable[[Request], Program[list[Tensor]]]) -> Program[T]:
    """Runs a program whose requests are made by other programs, the results of ``ask``."""
    request = next(program)
    while True:
        reply = yield from ask(request)
        try:
            request = program.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result


def _share(message: Tensor, first: int, own: int, count: int) -> Exchange:
    """Exchanges the parts of a received message among the workers of the node."""
    others = [other for other in range(count) if other != own]
    return Exchange(
        [Send(first + other, _part(message, own, count), 0) for other in others],
        [_into(first + other, _part(message, other, count)) for other in others],
        inside=True,
    )


def _buffer(receive: Receive, device: torch.device) -> Tensor:
    if receive.into is not None:
        return receive.into
    return torch.empty(receive.size, dtype=receive.dtype, device=device)


def _into(source: int, part: Tensor) -> Receive:
    return Receive(source, part.numel(), part.dtype, part)


def _part(message: Tensor, number: int, count: int) -> Tensor:
    """Part ``number`` of ``count`` of a message of shape (m,), as a view; parts differ by at most one element."""
    return message.tensor_split(count)[number]


def _words(words: int, number: int, count: int) -> int:
    return words * (number + 1) // count - words * number // count
