"""Counts and reports gradients that were skipped (NaN or infinity) and sums that were clipped (overflow).

A worker reports its own skipped or clipped gradients at once. Counts of all workers are exchanged only after steps 1,
2, 4, ..., 64, and then after every 64th step, so most steps send no extra message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spardl.method.method import MethodState

__all__ = ["NonFiniteCounts", "NonFiniteReports", "is_due"]

_PERIOD = 64
# A report is due if no gradient was skipped or clipped in this number of steps before, or if the total has grown by
# this factor since the last report.
_PAUSE, _GROWTH = 100, 10
_MOST_NAMED = 8


class NonFiniteCounts(NamedTuple):
    """Number of skipped and clipped gradients of one worker.

    Attributes:
        number: Number of skipped or clipped gradients, counted per bucket.
        last: Step of the most recent one, counted from 1; 0 if there was none since this process started.
    """

    number: int
    last: int

    @classmethod
    def of(cls, states: Iterable[MethodState]) -> NonFiniteCounts:
        """Sums the counts of one worker over the ``states`` of its buckets, without waiting for a GPU."""
        states = list(states)
        for state in states:
            state.catch_up(wait=False)
        found = [(state.refused, state.refused_last) for state in states]
        return cls(sum(count for count, _ in found), max((last for _, last in found), default=0))


class NonFiniteReports:
    """Counts skipped and clipped gradients of all workers, and decides which of them to report.

    Args:
        size: Number of workers.
    """

    def __init__(self, size: int) -> None:
        self._counts, self._lasts = [0] * size, [0] * size
        self._reported = 0

    @property
    def total(self) -> int:
        """Number of skipped or clipped gradients of all workers that this worker knows of."""
        return sum(self._counts)

    def learn(self, counts: Sequence[int]) -> None:
        """Replaces the stored counts of all workers by the exchanged ``counts``, one per rank."""
        self._counts = list(counts)

    def notice(self, found: Mapping[int, NonFiniteCounts]) -> str | None:
        """Updates the counts and returns a report if one is due.

        Args:
            found: New counts of some workers, by rank.

        Returns:
            One line that names ranks and step, if these are the first cases in 100 steps, or if the total has grown
            tenfold since the last report; otherwise ``None``.
        """
        before = max(self._lasts)
        fresh = [rank for rank, each in found.items() if each.last > self._lasts[rank]]
        for rank, each in found.items():
            self._counts[rank], self._lasts[rank] = each
        begins = before == 0 or max(self._lasts) - before > _PAUSE
        if not fresh or not (begins or self.total >= _GROWTH * self._reported):
            return None
        self._reported = self.total
        named = ", ".join(map(str, fresh[:_MOST_NAMED]))
        others = f" and {len(fresh) - _MOST_NAMED} others" if len(fresh) > _MOST_NAMED else ""
        return (
            f"rank{'s' * (len(fresh) > 1)} {named}{others} skipped or clipped a gradient in step {max(self._lasts)} "
            f"because of a NaN, an infinity or an overflow ({self.total} so far, see `refused`)"
        )


def is_due(step: int) -> bool:
    """Returns whether workers exchange their counts after ``step`` steps."""
    return step % _PERIOD == 0 or step & (step - 1) == 0
