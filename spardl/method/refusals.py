"""Who is told when of gradients that were refused: left out, since they are not finite, or cut, since a sum overflowed.

The worker that refuses one says so at once. That all others count it too costs no message in a usual step: counts are
exchanged after steps 1, 2, 4, ..., 64, and then after every 64th.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spardl.method.method import MethodState

__all__ = ["Refusals", "Refused", "is_due"]

_PERIOD = 64
# A refusal so many steps after the last one is news. In between, each tenfold of what was told is.
_PAUSE, _GROWTH = 100, 10
_MOST_NAMED = 8


class Refused(NamedTuple):
    """What one worker refused.

    Attributes:
        number: gradients (of a group of parameters) so far.
        last: the step of the last one, counted from 1; 0 if there was none since this process began.
    """

    number: int
    last: int

    @classmethod
    def of(cls, states: Iterable[MethodState]) -> Refused:
        """By one worker, whose ``states`` of all groups these are."""
        found = [(state.refused, state.refused_last) for state in states]
        return cls(sum(count for count, _ in found), max((last for _, last in found), default=0))


class Refusals:
    """Keeps count for some workers, and decides what is worth a line.

    Args:
        size: how many workers there are.
    """

    def __init__(self, size: int) -> None:
        self._counts, self._lasts = [0] * size, [0] * size
        self._told = 0

    @property
    def total(self) -> int:
        """Refused by all workers, as far as is known here."""
        return sum(self._counts)

    def learn(self, counts: Sequence[int]) -> None:
        """Is told the ``counts`` of all ranks."""
        self._counts = list(counts)

    def notice(self, found: Mapping[int, Refused]) -> str | None:
        """Looks for news.

        Args:
            found: what some ranks refused so far.

        Returns:
            One line that names ranks and step, where a burst of refusals begins, or has grown much; else ``None``.
        """
        before = max(self._lasts)
        fresh = [rank for rank, each in found.items() if each.last > self._lasts[rank]]
        for rank, each in found.items():
            self._counts[rank], self._lasts[rank] = each
        begins = before == 0 or max(self._lasts) - before > _PAUSE
        if not fresh or not (begins or self.total >= _GROWTH * self._told):
            return None
        self._told = self.total
        named = ", ".join(map(str, fresh[:_MOST_NAMED]))
        others = f" and {len(fresh) - _MOST_NAMED} others" if len(fresh) > _MOST_NAMED else ""
        return (
            f"rank{'s' * (len(fresh) > 1)} {named}{others} refused a gradient in step {max(self._lasts)}: it is not "
            f"finite, or too large to be added up in its type ({self.total} so far, see `refused`)"
        )


def is_due(step: int) -> bool:
    """Whether workers tell one another their counts after ``step`` steps."""
    return step % _PERIOD == 0 or step & (step - 1) == 0
