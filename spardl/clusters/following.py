"""A line for every message that training sends: ``SPARDL_DEBUG=1``, or the logger ``spardl`` at level DEBUG.

Programs are followed from outside, and only if that is wanted when a cluster is made: else they run as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from spardl.basics.errors import ConfigError
from spardl.clusters.ledger import ring_cost
from spardl.protocol.programs import AllGather, AllReduce, Exchange, Program, ReduceScatter, Step, Worker

__all__ = ["LOGGER", "VARIABLE", "Follow", "follower"]

VARIABLE = "SPARDL_DEBUG"
LOGGER = logging.getLogger("spardl")

Follow: TypeAlias = Callable[[Sequence[Program[Any]], Sequence[Worker]], Sequence[Program[Any]]]


def follower() -> Follow:
    """What a new cluster makes of the programs that it is to run and count: the same ones, or followed ones.

    Raises:
        ConfigError: if ``SPARDL_DEBUG`` is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE) or "0"
    if wanted not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1, got {wanted!r}")
    if wanted == "1":
        LOGGER.setLevel(logging.DEBUG)
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(logging.StreamHandler())
    return _followed if LOGGER.isEnabledFor(logging.DEBUG) else _as_they_are


def _as_they_are(programs: Sequence[Program[Any]], workers: Sequence[Worker]) -> Sequence[Program[Any]]:
    return programs


def _followed(programs: Sequence[Program[Any]], workers: Sequence[Worker]) -> Sequence[Program[Any]]:
    return [_told(program, worker) for program, worker in zip(programs, workers, strict=True)]


def _told(program: Program[Any], worker: Worker) -> Program[Any]:
    """The same program, of which each message is told by its sender.

    A synchronization's rounds count from 1, over a boundary, too. What belongs to no step of a method has step 0. A
    backend's own collective is told once, with what a ring would send, as the ledger counts it.
    """
    step = rounds = 0
    try:
        request = next(program)
        while True:
            if isinstance(request, Step):
                step = request.number
            elif isinstance(request, Exchange):
                rounds += 1
                for send in request.sends:
                    if send.payload.numel():
                        _tell(step, rounds, worker.rank, str(send.to), send.words, send.payload.nbytes)
            elif isinstance(request, AllReduce | ReduceScatter | AllGather):
                more, elements = ring_cost(request, worker.size)
                _tell(step, rounds + 1, worker.rank, "all", elements, elements * request.tensor.itemsize)
                rounds += more
            request = program.send((yield request))
    except StopIteration as stop:
        return stop.value


def _tell(step: int, rounds: int, source: int, target: str, words: int, nbytes: int) -> None:
    LOGGER.debug("step=%d round=%d from=%d to=%s words=%d bytes=%d", step, rounds, source, target, words, nbytes)
