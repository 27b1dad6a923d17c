"""What a method has sent and kept, for people and for logs."""

from __future__ import annotations

from typing import NamedTuple

from spardl.clusters.ledger import Ledger
from spardl.programs import Phase

__all__ = ["Stats"]


class Stats(NamedTuple):
    """What one worker did so far, on average over steps.

    Attributes:
        steps: synchronizations so far.
        rounds: exchanges of messages in a step.
        words: sent in a step; an index or a value is one word.
        bytes_sent: payload bytes sent in a step.
        dense_bytes: payload bytes that a ring all-reduce of the same gradients would send in a step.
        seconds: of a step, by phase: ``select``, ``pack``, ``communicate``, ``merge``; they pass beside the backward
            pass.
        refused: gradients (of a group of parameters) left out so far, since they were not finite.
    """

    steps: int
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    seconds: dict[str, float]
    refused: int

    @classmethod
    def of(cls, ledger: Ledger, steps: int, nbytes: int, size: int, refused: int) -> Stats:
        """From what a worker's ledger has counted.

        Args:
            ledger: of the worker.
            steps: synchronizations so far.
            nbytes: bytes of the gradients of a step.
            size: number of workers.
            refused: gradients left out so far.

        Returns:
            Averages over steps.
        """
        each = max(1, steps)
        phases = (Phase.SELECT, Phase.PACK, Phase.COMMUNICATE, Phase.MERGE)
        spent = {phase.value: (ledger.seconds[phase] + ledger.beside[phase]) / each for phase in phases}
        return cls(
            steps,
            ledger.rounds / each,
            ledger.words / each,
            ledger.bytes_sent / each,
            2 * nbytes * (size - 1) / size,
            spent,
            refused,
        )
