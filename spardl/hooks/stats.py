"""What a method has sent and kept, for people and for logs."""

from __future__ import annotations

from typing import NamedTuple

from spardl.clusters.ledger import Ledger
from spardl.protocol.programs import Phase
from spardl.schedules.quality import Waiting

__all__ = ["Meter", "Stats"]

_PHASES = (Phase.SELECT, Phase.PACK, Phase.COMMUNICATE, Phase.MERGE)


class Stats(NamedTuple):
    """What one worker did so far, on average over steps; printed, a table with units.

    Attributes:
        steps: synchronizations so far.
        rounds: exchanges of messages in a step.
        words: sent in a step; an index or a value is one word.
        bytes_sent: payload bytes sent in a step. Messages with which ``mg_wfbp`` and ``layer_fusion`` measure the
            network, once, count like all others, in ``rounds``, ``words`` and ``seconds`` as well.
        dense_bytes: payload bytes that a ring all-reduce of the same gradients would send in a step.
        seconds: of a step, by phase: ``select``, ``pack``, ``communicate``, ``merge``; they pass beside the backward
            pass. The handle's first step, in which much is compiled and set up, is left out once there is another.
        refused: gradients (of a group of parameters) left out so far, since they were not finite, or cut, since a sum
            overflowed: those of all workers, who tell one another after steps 1, 2, 4, ..., 64, and every 64th; of
            ``all_reduce``, those of this worker.
        residual_ratio: norm of what this worker carries over, as a multiple of the norm of what a step adds (its
            gradient, or its update where the optimizer's state is moved), which is measured in every 16th step;
            ``None`` if that is not known. It grows at first, and should then stay.
        residual_age: steps that an entry waits in the mean, by Little's law: the sum of the magnitudes that are carried
            over, as a multiple of that of what a step adds.
    """

    steps: int
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    seconds: dict[str, float]
    refused: int
    residual_ratio: float | None = None
    residual_age: float | None = None

    @property
    def share(self) -> float:
        """Bytes sent, as a share of those that dense would send; 0 for one worker alone, who sends nothing."""
        return self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0

    def __str__(self) -> str:
        waiting = "unknown"
        if self.residual_ratio is not None and self.residual_age is not None:
            waiting = f"{self.residual_ratio:.3g} x what a step adds, some {self.residual_age:.3g} steps old"
        rows = [
            ("steps", f"{self.steps:,}"),
            ("rounds", f"{self.rounds:,.4g} a step"),
            ("words", f"{self.words:,.0f} a step"),
            ("sent", f"{self.bytes_sent:,.0f} bytes a step, {self.share:.2%} of dense ({self.dense_bytes:,.0f})"),
            *((phase, f"{1000 * seconds:,.3f} ms a step") for phase, seconds in self.seconds.items()),
            ("refused", f"{self.refused:,} gradients"),
            ("residual", waiting),
        ]
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


class _Counts(NamedTuple):
    steps: int
    rounds: int
    words: int
    bytes_sent: int
    seconds: dict[str, float]


class Meter:
    """Makes averages over steps of what a worker's ledger counts.

    Args:
        ledger: of the worker.
        size: number of workers.

    Attributes:
        steps: that are over.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger, self._size = ledger, size
        self.steps = 0
        self._since = self._timed = self._counts(0)
        self._refused = 0

    def step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.steps == 1:
            self._timed = self._counts(1)

    def reset(self, refused: int) -> None:
        """Begins to count anew; ``refused``: gradients left out so far."""
        self._since = self._timed = self._counts(self.steps)
        self._refused = refused

    def stats(self, nbytes: float, refused: int, waiting: Waiting | None = None, *, under_way: bool = False) -> Stats:
        """Averages over the steps since ``reset``.

        Args:
            nbytes: bytes of the gradients of a step.
            refused: gradients left out so far.
            waiting: what is carried over.
            under_way: whether a step has begun that is not over, and counts.
        """
        now = self._counts(self.steps + under_way)
        since, timed = self._since, self._timed if now.steps > self._timed.steps else self._since
        each, each_timed = max(1, now.steps - since.steps), max(1, now.steps - timed.steps)
        return Stats(
            now.steps - since.steps,
            (now.rounds - since.rounds) / each,
            (now.words - since.words) / each,
            (now.bytes_sent - since.bytes_sent) / each,
            2 * nbytes * (self._size - 1) / self._size,
            {phase: (seconds - timed.seconds[phase]) / each_timed for phase, seconds in now.seconds.items()},
            max(0, refused - self._refused),
            waiting.norm if waiting else None,
            waiting.age if waiting else None,
        )

    def _counts(self, steps: int) -> _Counts:
        ledger = self._ledger
        seconds = {phase.value: ledger.seconds[phase] + ledger.beside[phase] for phase in _PHASES}
        return _Counts(steps, ledger.rounds, ledger.words, ledger.bytes_sent, seconds)
