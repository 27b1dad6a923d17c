"""What a worker sent and what its seconds went to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from spardl.basics.errors import ConfigError
from spardl.protocol.programs import (
    AllGather,
    AllReduce,
    Collective,
    Exchange,
    Phase,
    Program,
    ReduceScatter,
    Step,
    Worker,
)

__all__ = ["LOGGER", "VARIABLE", "Follow", "Ledger", "PhaseStack", "Stopwatch", "follower", "ring_cost"]


@dataclass
class Ledger:
    """Counts of one worker.

    Attributes:
        rounds: exchanges it took part in.
        messages: messages it sent (empty ones are not sent).
        words: what it sent, in the papers' unit: an index or a value is one word.
        bytes_sent: payload bytes it sent.
        bytes_received: payload bytes it received.
        seconds: by phase. In a simulated cluster ``communicate`` and ``wait`` are virtual, the others are measured.
            ``wait`` is what the computation lost to synchronizations beside it.
        beside: seconds of these, likewise by phase.
    """

    rounds: int = 0
    messages: int = 0
    words: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    beside: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    # Several threads enter what they did.
    _lock: AbstractContextManager[Any] = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def spend(self, phase: Phase, seconds: float, *, beside: bool = False) -> None:
        """Enters time.

        Args:
            phase: what it was spent on.
            seconds: how many seconds.
            beside: whether by what runs beside the computation.
        """
        with self._lock:
            (self.beside if beside else self.seconds)[phase] += seconds

    def count_exchange(self, exchange: Exchange) -> None:
        """Enters one round, ``exchange``."""
        received = sum([receive.size * receive.dtype.itemsize for receive in exchange.receives])
        messages = words = sent = 0
        for send in exchange.sends:
            nbytes = send.payload.nbytes
            messages += nbytes > 0
            words += send.words
            sent += nbytes
        self._count(1, messages, words, sent, received)

    def count_collective(self, rounds: int, elements: int, itemsize: int) -> None:
        """Enters a backend's own collective, of which only the ideal cost is known.

        Args:
            rounds: exchanges, a message each.
            elements: entries sent, and as many received.
            itemsize: bytes of an entry.
        """
        self._count(rounds, rounds, elements, elements * itemsize, elements * itemsize)

    def _count(self, rounds: int, messages: int, words: int, sent: int, received: int) -> None:
        with self._lock:
            self.rounds += rounds
            self.messages += messages
            self.words += words
            self.bytes_sent += sent
            self.bytes_received += received

    def state_dict(self) -> dict[str, Any]:
        """All counts as plain numbers."""
        return {
            "rounds": self.rounds,
            "messages": self.messages,
            "words": self.words,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "seconds": {phase.value: seconds for phase, seconds in self.seconds.items()},
            "beside": {phase.value: seconds for phase, seconds in self.beside.items()},
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from ``values``, as saved."""
        for name in ("rounds", "messages", "words", "bytes_sent", "bytes_received"):
            setattr(self, name, values[name])
        self.seconds = {phase: values["seconds"][phase.value] for phase in Phase}
        self.beside = {phase: values["beside"][phase.value] for phase in Phase}


def ring_cost(request: Collective, workers: int) -> tuple[int, int]:
    """What a backend's own collective is counted as, whatever it does: a ring.

    Args:
        request: the collective.
        workers: P.

    Returns:
        Rounds, and elements that each worker sends.
    """
    rounds = (2 if isinstance(request, AllReduce) else 1) * (workers - 1)
    return rounds, rounds * request.tensor.numel() // workers


class Stopwatch:
    """Splits the time of one worker between phases.

    Args:
        ledger: where the seconds are entered.
        beside: whether they run beside the computation.
        timer: seconds.
    """

    def __init__(self, ledger: Ledger, *, beside: bool = False, timer: Callable[[], float] = time.perf_counter) -> None:
        self._ledger, self._beside, self._timer = ledger, beside, timer
        self._phase: Phase | None = None
        self._since = 0.0

    def switch(self, phase: Phase | None) -> float:
        """Ends the running phase and starts another, or none.

        Returns:
            Seconds that the ended phase lasted since the last switch.
        """
        now = self._timer()
        lasted = now - self._since if self._phase else 0.0
        if self._phase:
            self._ledger.spend(self._phase, lasted, beside=self._beside)
        self._phase, self._since = phase, now
        return lasted


class _Open(NamedTuple):
    phase: Phase
    local: Sequence[int]


class PhaseStack:
    """Phases that may interrupt one another: seconds go to the innermost.

    Args:
        charge: told a phase, the local ranks it is of, and seconds.
        timer: seconds.
    """

    def __init__(
        self,
        charge: Callable[[Phase, Sequence[int], float], None],
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._charge, self._timer = charge, timer
        self._open: list[_Open] = []
        self._since = 0.0

    @contextmanager
    def timed(self, phase: Phase, local: Sequence[int]) -> Iterator[None]:
        """Spends the seconds inside on a phase of some local ranks."""
        self.settle()
        self._open.append(_Open(phase, local))
        try:
            yield
        finally:
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Charges what the running phase has spent up to now."""
        now = self._timer()
        if self._open:
            self._charge(*self._open[-1], now - self._since)
        self._since = now


# A line for every message that training sends: ``SPARDL_DEBUG=1``, or the logger ``spardl`` at level DEBUG.
#
# Programs are followed from outside, and only if that is wanted when a cluster is made: else they run as they are.


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
