"""Fastest of several ways by bandwidth, interpolated between measured bandwidths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["Stretch", "between", "stretches"]

# Seconds by bandwidth in Mbit/s.
Paces: TypeAlias = Mapping[float, float]
# Steps of the search from one measured bandwidth to the next.
STEPS = 200


class Stretch(NamedTuple):
    """A range of bandwidths with the same fastest way.

    Attributes:
        low: Lower end in Mbit/s.
        high: Upper end in Mbit/s.
        name: Name of the fastest way.
    """

    low: float
    high: float
    name: str


def between(paces: Paces, bandwidth: float) -> float:
    """Seconds at a bandwidth: measured, or interpolated linearly in seconds per bit.

    Args:
        paces: Measured seconds by bandwidth.
        bandwidth: Bandwidth in Mbit/s within the measured range.
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
        ways: Measured seconds of each way, all at the same bandwidths.
    """
    if not ways:
        return []
    grid = _grid(sorted(next(iter(ways.values()))))
    best = [(each, min(ways, key=lambda name: between(ways[name], each))) for each in grid]
    runs = [(name, [place for place, _ in run]) for name, run in groupby(best, key=lambda pair: pair[1])]
    starts = [run[0] for _, run in runs] + [grid[-1]]
    return [Stretch(low, high, name) for (name, _), (low, high) in zip(runs, pairwise(starts), strict=True)]


def _grid(known: Sequence[float]) -> list[float]:
    """Bandwidths between the measured ones, spaced by equal factors."""
    inner = [
        low * math.exp(step / STEPS * math.log(high / low)) for low, high in pairwise(known) for step in range(STEPS)
    ]
    return [*inner, known[-1]]
