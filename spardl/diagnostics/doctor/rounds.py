"""Messages between workers whose seconds are measured: there and back between two, and rounds of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spardl.clusters import ProcessGroupCluster
from spardl.protocol.programs import Exchange, Program, Receive, Send

__all__ = ["SHORT", "ring", "round_trip", "seconds"]

SHORT = 8
"""Bytes of a message that is all start-up."""
_CPU = torch.device("cpu")


def round_trip(
    rank: int, first: int = 0, second: int = 1, length: int = SHORT, device: torch.device = _CPU
) -> Program[None]:
    """A message of so many bytes from one worker to another, and a short one back; the rest have nothing to do."""
    for sender, receiver, size in ((first, second, length), (second, first, SHORT)):
        if rank == sender:
            yield Exchange([Send(receiver, torch.zeros(size, dtype=torch.uint8, device=device), 1)], [])
        elif rank == receiver:
            yield Exchange([], [Receive(sender, size, torch.uint8)])


def ring(rank: int, size: int, length: int, device: torch.device = _CPU) -> Program[None]:
    """A message of so many bytes from every worker to the next."""
    message = torch.zeros(length, dtype=torch.uint8, device=device)
    yield Exchange([Send((rank + 1) % size, message, 1)], [Receive((rank - 1) % size, length, torch.uint8)])


def seconds(cluster: ProcessGroupCluster, program: Callable[[], Program[None]], times: int) -> list[float]:
    """What each run of a program takes, but for the first, which opens connections."""
    return [cluster.time_aside([program()])[0] for _ in range(times + 1)][1:]
