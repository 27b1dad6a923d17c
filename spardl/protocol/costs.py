"""What a synchronization costs, before it runs: rounds and words per worker, as the papers' formulas have them.

The simulated cluster counts the same, so every formula here is checked against what is really sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Bounds", "Cost", "log2_ceil"]


class Bounds(NamedTuple):
    """A whole number of which only the limits may be known beforehand.

    Attributes:
        low: the least, over all workers.
        high: the most, over all workers.
    """

    low: int
    high: int

    @classmethod
    def exactly(cls, number: int) -> Bounds:
        """A ``number`` that is known."""
        return cls(number, number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.low <= number <= self.high


class Cost(NamedTuple):
    """The cost of one synchronization for one worker.

    Attributes:
        rounds: exchanges that wait for one another.
        words: indices, values and counts sent, one word each; of codes, 32 bits are one word.
    """

    rounds: Bounds
    words: Bounds

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """Several ``costs``, one after the other."""
        rounds, words = zip(*costs, strict=True)
        return cls(*(Bounds(*map(sum, zip(*bounds, strict=True))) for bounds in (rounds, words)))


def log2_ceil(count: int) -> int:
    """Rounds in which something that doubles reaches ``count`` (at least 1): the logarithm to base 2, rounded up."""
    return (count - 1).bit_length()
