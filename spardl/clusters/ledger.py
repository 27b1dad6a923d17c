"""Records of each worker's messages and phase times (ledgers), and the debug log of its messages."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch.profiler import record_function

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

__all__ = ["LOGGER", "VARIABLE", "Ledger", "PhaseStack", "ProgramWrapper", "Stopwatch", "message_logging", "ring_cost"]


@dataclass
class Ledger:
    """Message counts and times of one worker.

    Attributes:
        rounds: Number of message exchanges that the worker took part in.
        messages: Number of messages sent; empty messages are not sent.
        words: Number of words sent; as in the papers, an index or a value is one word.
        bytes_sent: Number of payload bytes sent.
        bytes_received: Number of payload bytes received.
        seconds: Time by phase, in seconds. In a simulated cluster, ``communicate`` and ``wait`` are virtual times, and
            the other phases are measured. ``wait`` is the time during which the computation waits for overlapped
            synchronizations.
        overlapped: Time of synchronizations that overlap the computation, by phase, in seconds.
        traced: Whether phases appear as ranges in traces of ``torch.profiler``; ranges cost time even without a trace.
    """

    rounds: int = 0
    messages: int = 0
    words: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    overlapped: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    traced: bool = field(default=False, repr=False, compare=False)
    # The main thread and the communication threads write to the same ledger.
    _lock: AbstractContextManager[Any] = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    # Locks do not support pickling.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def spend(self, phase: Phase, seconds: float, *, overlapped: bool = False) -> None:
        """Adds time to a phase.

        Args:
            phase: Phase that the time is attributed to.
            seconds: Duration in seconds.
            overlapped: Whether the time overlaps the computation.
        """
        with self._lock:
            (self.overlapped if overlapped else self.seconds)[phase] += seconds

    def count_exchange(self, exchange: Exchange) -> None:
        """Adds the messages of ``exchange``, one round, to the counts; none if they stay inside a node."""
        if exchange.inside:
            return
        # Receives are announced with their size, so they count before they arrive.
        received = sum([receive.size * receive.dtype.itemsize for receive in exchange.receives])
        messages = words = sent = 0
        for send in exchange.sends:
            nbytes = send.payload.nbytes
            messages += nbytes > 0  # empty messages are not sent
            words += send.words
            sent += nbytes
        self._count(1, messages, words, sent, received)

    def count_collective(self, rounds: int, elements: int, itemsize: int) -> None:
        """Counts a collective of the backend with the cost that ``ring_cost`` returns; its real messages are unknown.

        Args:
            rounds: Number of exchanges, with one message each.
            elements: Number of entries sent, and of entries received.
            itemsize: Number of bytes per entry.
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
        """Returns all counts, and all times in seconds, as plain numbers by name."""
        return {
            "rounds": self.rounds,
            "messages": self.messages,
            "words": self.words,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "seconds": {phase.value: seconds for phase, seconds in self.seconds.items()},
            "beside": {phase.value: seconds for phase, seconds in self.overlapped.items()},
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the counts from ``values``, as returned by ``state_dict``."""
        for name in ("rounds", "messages", "words", "bytes_sent", "bytes_received"):
            setattr(self, name, values[name])
        self.seconds = {phase: values["seconds"][phase.value] for phase in Phase}
        self.overlapped = {phase: values["beside"][phase.value] for phase in Phase}


def ring_cost(request: Collective, workers: int) -> tuple[int, int]:
    """Returns the cost of a backend collective if it is run as a ring, whatever algorithm the backend uses.

    Args:
        request: Collective whose cost is computed.
        workers: Number of workers, P.

    Returns:
        The number of rounds, and the number of elements that each worker sends in all rounds together.
    """
    rounds = (2 if isinstance(request, AllReduce) else 1) * (workers - 1)
    return rounds, rounds * request.tensor.numel() // workers


class Stopwatch:
    """Measures the time of one worker, and attributes it to phases.

    Args:
        ledger: Ledger that records the seconds.
        overlapped: Whether the time overlaps the computation.
        timer: Function that returns the current time in seconds.
    """

    def __init__(
        self, ledger: Ledger, *, overlapped: bool = False, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ledger, self._overlapped, self._timer = ledger, overlapped, timer
        self._phase: Phase | None = None
        self._since = 0.0
        self._range: AbstractContextManager[Any] | None = None

    def switch(self, phase: Phase | None) -> float:
        """Ends the current phase, and starts ``phase`` unless it is ``None``.

        Returns:
            Duration of the ended phase in seconds; 0 if none was running.
        """
        # One reading of the clock ends a phase and starts the next, so no time falls between two phases.
        now = self._timer()
        lasted = now - self._since if self._phase else 0.0
        if self._phase:
            self._ledger.spend(self._phase, lasted, overlapped=self._overlapped)
        self._phase, self._since = phase, now
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if phase and self._ledger.traced:
            self._range = _entered(phase)
        return lasted


def _entered(phase: Phase) -> AbstractContextManager[Any]:
    named = record_function(f"spardl.{phase.value}")
    named.__enter__()
    return named


class _Open(NamedTuple):
    phase: Phase
    local: Sequence[int]


class PhaseStack:
    """Measures nested phases; each second is attributed to the innermost one.

    Args:
        charge: Callback that receives a phase, its local ranks, and its duration in seconds.
        timer: Function that returns the current time in seconds.
        ledger: Ledger whose ``traced`` decides whether phases appear in traces; ``None`` for never.
    """

    def __init__(
        self,
        charge: Callable[[Phase, Sequence[int], float], None],
        timer: Callable[[], float] = time.perf_counter,
        ledger: Ledger | None = None,
    ) -> None:
        self._charge, self._timer, self._ledger = charge, timer, ledger
        self._open: list[_Open] = []
        self._since = 0.0

    @contextmanager
    def timed(self, phase: Phase, local: Sequence[int]) -> Iterator[None]:
        """Attributes the time spent in the ``with`` block to a phase of some local ranks."""
        self.settle()  # the outer phase up to here
        self._open.append(_Open(phase, local))
        named = _entered(phase) if self._ledger and self._ledger.traced else None
        try:
            yield
        finally:
            if named:
                named.__exit__(None, None, None)
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Attributes the time since the last measurement to the innermost running phase, by calling ``charge``."""
        now = self._timer()
        if self._open:
            self._charge(*self._open[-1], now - self._since)
        self._since = now


# The debug log: one line per message of training, with ``SPARDL_DEBUG=1`` or the logger ``spardl`` at level DEBUG.


VARIABLE = "SPARDL_DEBUG"
LOGGER = logging.getLogger("spardl")

ProgramWrapper: TypeAlias = Callable[[Sequence[Program[Any]], Sequence[Worker]], Sequence[Program[Any]]]


def message_logging() -> ProgramWrapper:
    """Returns a function that wraps a cluster's programs to log all messages; without logging, it changes nothing.

    Raises:
        ConfigError: If ``SPARDL_DEBUG`` is neither 0 nor 1.
    """
    # Checked once per cluster, so that programs run unwrapped, at no cost, unless messages are logged.
    wanted = os.environ.get(VARIABLE) or "0"
    if wanted not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1, got {wanted!r}")
    if wanted == "1":
        LOGGER.setLevel(logging.DEBUG)
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(logging.StreamHandler())
    # Applications may also enable the level themselves, without the variable.
    return _log_messages if LOGGER.isEnabledFor(logging.DEBUG) else _unlogged


def _unlogged(programs: Sequence[Program[Any]], workers: Sequence[Worker]) -> Sequence[Program[Any]]:
    return programs


def _log_messages(programs: Sequence[Program[Any]], workers: Sequence[Worker]) -> Sequence[Program[Any]]:
    return [_with_log(program, worker) for program, worker in zip(programs, workers, strict=True)]


def _with_log(program: Program[Any], worker: Worker) -> Program[Any]:
    """Logs each message of a program on the rank that sends it.

    Rounds count from 1 in each synchronization, across its boundary. Programs outside a step have step 0. A collective
    of the backend is logged once, with the cost of a ring, as in the ledger.
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
                        _log(step, rounds, worker.rank, str(send.to), send.words, send.payload.nbytes)
            elif isinstance(request, AllReduce | ReduceScatter | AllGather):
                # The ledger counts the same cost; the real messages of the backend are unknown.
                more, elements = ring_cost(request, worker.size)
                _log(step, rounds + 1, worker.rank, "all", elements, elements * request.tensor.itemsize)
                rounds += more
            request = program.send((yield request))
    except StopIteration as stop:
        return stop.value


def _log(step: int, rounds: int, source: int, target: str, words: int, nbytes: int) -> None:
    LOGGER.debug("step=%d round=%d from=%d to=%s words=%d bytes=%d", step, rounds, source, target, words, nbytes)
