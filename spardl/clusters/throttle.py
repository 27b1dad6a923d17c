"""Slow networks for who cannot shape a real one: waiting until a network would have been done, at the earliest."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spardl.clusters.network import Network
from spardl.protocol.programs import Exchange

__all__ = ["lasting", "traffic"]

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
