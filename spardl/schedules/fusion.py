"""Groups of neighbouring layers that are synchronized together, and when their synchronizations end.

Layers are counted in flat order: the order in which they are registered, used by the forward pass, and laid into the
flat gradient. The backward pass reaches them the other way round, so groups are sent from the last to the first.
Times are seconds since the backward pass began.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from spardl.basics.errors import ConfigError
from spardl.vector.flat import Storage

__all__ = [
    "Linear",
    "Range",
    "by_count",
    "by_megabytes",
    "by_share",
    "by_size",
    "ends",
    "finish",
    "flat_order",
    "is_partition",
    "within",
]


# A time that grows with the size of what is sent: the cost that schedules plan with.


@dataclass(frozen=True)
class Linear:
    """A time that grows with the size of a group, such as a + b * size or alpha + beta * bytes.

    Attributes:
        fixed: seconds of a group of any size, even of none.
        per_entry: seconds per entry.
    """

    fixed: float
    per_entry: float

    def __call__(self, entries: int) -> float:
        """Seconds of a group with so many entries."""
        return self.fixed + self.per_entry * entries

    @classmethod
    def fit(cls, entries: Sequence[int], seconds: Sequence[float]) -> Linear:
        """The line that is nearest to measured times (least squares), with no coefficient below 0.

        The squared error is convex. So if the free optimum has a coefficient below 0, the optimum sought has a
        coefficient that is exactly 0, and it is enough to compare the two fits with one coefficient: this is exact,
        and needs no iteration. Cutting off a negative coefficient and keeping the other would not be optimal.

        Args:
            entries: sizes of the measured groups, at least two different ones.
            seconds: the time of each.

        Raises:
            ConfigError: if there are not as many times as sizes, or fewer than two sizes, or a time is not finite.
        """
        if len(entries) != len(seconds) or not all(map(math.isfinite, seconds)):
            raise ConfigError(f"fusion: a cost needs one finite time for each of {len(entries)} sizes, got {seconds!r}")
        if len(set(entries)) < 2:
            raise ConfigError(f"fusion: a cost needs times of at least two sizes, got {sorted(set(entries))}")
        slope, intercept = statistics.linear_regression(entries, seconds)
        if min(slope, intercept) >= 0:
            return cls(intercept, slope)
        along = math.fsum(x * y for x, y in zip(entries, seconds, strict=True)) / sum(x * x for x in entries)
        flat = cls(max(0.0, statistics.fmean(seconds)), 0.0)
        steep = cls(0.0, max(0.0, along))
        return min(flat, steep, key=lambda line: line.error(entries, seconds))

    def error(self, entries: Sequence[int], seconds: Sequence[float]) -> float:
        """The sum of squared differences from measured times, in seconds squared."""
        return math.fsum((self(x) - y) ** 2 for x, y in zip(entries, seconds, strict=True))


Range: TypeAlias = tuple[int, int]
"""Layers [start, stop). A partition is a list of ranges in flat order that holds every layer exactly once."""


def by_size(entries: Sequence[int], limit: float) -> list[Range]:
    """Groups of a limited size, filled from the last layer to the first.

    This is the order in which torch's DistributedDataParallel fills its buckets; but that closes a bucket only when it
    has reached the limit, so that its buckets may be larger than that. Here a group is closed when it is full, or when
    the next layer would make it larger than the limit. A layer is never cut: one that is larger than the limit is a
    group of its own.

    Args:
        entries: of each layer, in flat order; 0 is allowed.
        limit: most entries of a group: 0 leaves every layer alone, infinity puts all into one group.

    Returns:
        The partition: empty if there is no layer.

    Raises:
        ConfigError: if the limit is not a number, or below 0.
    """
    if not limit >= 0:
        raise ConfigError(f"fusion: a group's size must be a number of entries, at least 0, got {limit!r}")
    groups: list[Range] = []
    stop, held = len(entries), 0
    for layer in reversed(range(len(entries))):
        begun = stop > layer + 1
        if begun and (held >= limit or held + entries[layer] > limit):
            groups.append((layer + 1, stop))
            stop, held = layer + 1, 0
        held += entries[layer]
    if stop:
        groups.append((0, stop))
    return groups[::-1]


def by_count(layers: int, count: int) -> list[Range]:
    """Groups of a fixed number of neighbouring layers, counted from the first, as DeAR's "nearby layers".

    Args:
        layers: of the model.
        count: layers of a group; the last group may have fewer.

    Returns:
        The partition: empty if there is no layer.

    Raises:
        ConfigError: if the count is below 1.
    """
    if count < 1:
        raise ConfigError(f"fusion: a group must have at least 1 layer, got {count!r}")
    return [(start, min(start + count, layers)) for start in range(0, layers, count)]


def by_share(entries: Sequence[int], count: int) -> list[Range]:
    """Groups of nearly as many entries each, each of at least one layer.

    Args:
        entries: of each layer, in flat order.
        count: of the groups.

    Returns:
        The partition.

    Raises:
        ConfigError: if there are fewer layers.
    """
    if count > len(entries):
        raise ConfigError(f"{count} fragments need as many layers, and the model has {len(entries)}; use fewer")
    total, borders, passed = sum(entries), [0], 0
    for layer, own in enumerate(entries[:-1], 1):
        passed += own
        wanted, needed = len(borders), count - len(borders)
        if len(borders) < count and (passed * count >= wanted * total or len(entries) - layer == needed):
            borders.append(layer)
    return list(zip(borders, [*borders[1:], len(entries)], strict=True))


def ends(
    groups: Sequence[Range], entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]
) -> list[float]:
    """When the synchronization of each group ends.

    Groups are synchronized one at a time, from the last to the first. Each starts when the one before has ended and
    the gradients of all its layers are there, but not before 0.

    Args:
        groups: the partition, in flat order.
        entries: of each layer, in flat order.
        ready: when the gradient of each layer is there; need not fall with the layer's place.
        cost: seconds that a group of so many entries takes.

    Returns:
        The end of each group, in flat order: so they fall.
    """
    found: list[float] = []
    free = 0.0
    for start, stop in reversed(groups):
        free = max(free, *ready[start:stop]) + cost(sum(entries[start:stop]))
        found.append(free)
    return found[::-1]


def finish(
    groups: Sequence[Range], entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]
) -> float:
    """When the last synchronization ends (see ``ends``): that of the first group; 0 if there is no group."""
    return max(ends(groups, entries, ready, cost), default=0.0)


# Partitions of gradients that may have several types, or whose flat order is that of the backward pass.


_MEGABYTE = 1024 * 1024


def flat_order(gradient: Storage, choose: Callable[[list[int]], Sequence[Range]]) -> list[Range]:
    """The partition of a model whose layers are shown in forward order.

    Args:
        gradient: of the model.
        choose: gets the numbers of all layers in forward order, and returns a partition of their places.

    Returns:
        The same in flat order.
    """
    count = len(gradient.layers)
    if not gradient.backwards:
        return list(choose(list(range(count))))
    return [(count - stop, count - start) for start, stop in reversed(choose(list(reversed(range(count)))))]


def by_megabytes(gradient: Storage, megabytes: float) -> list[Range]:
    """Groups of a limited size, filled from the last layer to the first; none holds two types.

    Args:
        gradient: of the model.
        megabytes: most megabytes (2^20 bytes) of gradients in a group; 0: every layer alone.

    Returns:
        The partition, in flat order.
    """
    sizes, step = gradient.entries, -1 if gradient.backwards else 1
    found: list[Range] = []
    for start, stop in gradient.runs:
        itemsize = gradient.parameters[gradient.layers[start].tensors[0]].itemsize
        groups = by_size(sizes[start:stop][::step], megabytes * _MEGABYTE / itemsize)
        if gradient.backwards:
            groups = [(stop - start - last, stop - start - first) for first, last in reversed(groups)]
        found += [(start + first, start + last) for first, last in groups]
    return found


def is_partition(value: Any, layers: int) -> bool:
    """Whether plain data, such as a state that was saved, is a partition of so many layers."""
    try:
        ends = [0, *(stop for _, stop in value)]
        whole = all(type(end) is int for end in ends)
        return whole and [tuple(each) for each in value] == list(pairwise(ends)) and ends == sorted({*ends, layers})
    except (TypeError, ValueError):
        return False


def within(runs: Sequence[Range], partition: Sequence[Range]) -> Iterator[Range]:
    """Cuts groups where runs of layers end.

    Args:
        runs: all layers, in flat order.
        partition: likewise.

    Yields:
        Groups, in flat order.
    """
    for start, stop in partition:
        for first, last in runs:
            if max(start, first) < min(stop, last):
                yield max(start, first), min(stop, last)
