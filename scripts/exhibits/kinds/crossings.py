"""Which of several ways is the fastest at which bandwidth, between those that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["Stretch", "between", "stretches"]

# Seconds that something takes, by Mbit/s.
Paces: TypeAlias = Mapping[float, float]
# Steps of the search from one measured bandwidth to the next.
STEPS = 200


class Stretch(NamedTuple):
    """Bandwidths at which the same way is the fastest.

    Attributes:
        low: Mbit/s where it begins.
        high: Mbit/s where it ends.
        name: of the way.
    """

    low: float
    high: float
    name: str


def between(paces: Paces, bandwidth: float) -> float:
    """Seconds at a bandwidth: measured, or interpolated linearly in seconds per bit.

    Args:
        paces: Measured seconds by bandwidth.
        bandwidth: Mbit/s, between the least and the most of these.
    """
    known = sorted(paces)
    low = max(each for each in known if each <= bandwidth)
    high = min(each for each in known if each >= bandwidth)
    if low == high:
        return paces[low]
    share = (1 / low - 1 / bandwidth) / (1 / low - 1 / high)
    return paces[low] + share * (paces[high] - paces[low])


def stretches(ways: Mapping[str, Paces]) -> list[Stretch]:
    """The fastest method, from the smallest measured bandwidth to the largest.

    Args:
        ways: seconds of each, all at the same bandwidths.
    """
    if not ways:
        return []
    grid = _grid(sorted(next(iter(ways.values()))))
    best = [(each, min(ways, key=lambda name: between(ways[name], each))) for each in grid]
    runs = [(name, [place for place, _ in run]) for name, run in groupby(best, key=lambda pair: pair[1])]
    starts = [run[0] for _, run in runs] + [grid[-1]]
    return [Stretch(low, high, name) for (name, _), (low, high) in zip(runs, pairwise(starts), strict=True)]


def _grid(known: Sequence[float]) -> list[float]:
    """Bandwidths from each known one to the next, at equal factors."""
    inner = [
        low * math.exp(step / STEPS * math.log(high / low)) for low, high in pairwise(known) for step in range(STEPS)
    ]
    return [*inner, known[-1]]
