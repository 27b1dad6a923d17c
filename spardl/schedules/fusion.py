"""Functions that divide a model's layers into groups, and that compute when the synchronizations of the groups end.

A group is a range of neighboring layers that are synchronized together; a partition is a list of groups that contains
every layer once. Layers are counted in *flat order*: the order in which they are registered, used by the forward pass,
and stored in the flat gradient. The backward pass reaches them in reverse order, so groups are sent from the last to
the first. Times are seconds since the start of the backward pass.
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


# The cost model of the schedules.


@dataclass(frozen=True)
class Linear:
    """Time of a synchronization as a linear function of the size of a group, such as alpha + beta * bytes.

    Attributes:
        fixed: Seconds for a group of any size, including 0.
        per_entry: Seconds per entry of the group.
    """

    fixed: float
    per_entry: float

    def __call__(self, entries: int) -> float:
        """Returns the seconds for a group with the given number of ``entries``."""
        return self.fixed + self.per_entry * entries

    @classmethod
    def fit(cls, entries: Sequence[int], seconds: Sequence[float]) -> Linear:
        """Fits a line to measured times (least squares), with coefficients that are at least 0.

        The squared error is convex. If the best line has a negative coefficient, one coefficient of the best permitted
        line is therefore exactly 0, and it is enough to compare the two fits with one coefficient. Replacing a negative
        coefficient by 0 and keeping the other one would not be optimal.

        Args:
            entries: Sizes of the measured groups, with at least two different values.
            seconds: Measured time of each group, in seconds.

        Raises:
            ConfigError: If the number of times and sizes differs, there are fewer than two sizes, or a time is not
                finite.
        """
        if len(entries) != len(seconds) or not all(map(math.isfinite, seconds)):
            raise ConfigError(
                f"cannot fit a cost: expected one finite time for each of {len(entries)} sizes, got {seconds!r}"
            )
        if len(set(entries)) < 2:
            raise ConfigError(f"cannot fit a cost: measure at least two different sizes, got {sorted(set(entries))}")
        slope, intercept = statistics.linear_regression(entries, seconds)
        if min(slope, intercept) >= 0:
            return cls(intercept, slope)
        along = math.fsum(x * y for x, y in zip(entries, seconds, strict=True)) / sum(x * x for x in entries)
        flat = cls(max(0.0, statistics.fmean(seconds)), 0.0)
        steep = cls(0.0, max(0.0, along))
        return min(flat, steep, key=lambda line: line.error(entries, seconds))

    def error(self, entries: Sequence[int], seconds: Sequence[float]) -> float:
        """Returns the sum of squared differences between the fitted line and measured times, in seconds squared."""
        return math.fsum((self(x) - y) ** 2 for x, y in zip(entries, seconds, strict=True))


Range: TypeAlias = tuple[int, int]
"""Layers [start, stop). A partition is a list of ranges in flat order that contains every layer exactly once."""


def by_size(entries: Sequence[int], limit: float) -> list[Range]:
    """Forms groups of a limited size, filled from the last layer to the first.

    torch's DistributedDataParallel fills its buckets in the same order, but closes a bucket only when it has reached
    the limit, so its buckets may exceed the limit. Here a group is closed when it is full, or when the next layer would
    exceed the limit. Layers are never split: a layer that exceeds the limit forms its own group.

    Args:
        entries: Number of entries of each layer, in flat order; 0 is allowed.
        limit: Largest number of entries of a group; 0 for one group per layer, infinity for a single group.

    Returns:
        The partition; empty if there are no layers.

    Raises:
        ConfigError: If the limit is not a number, or below 0.
    """
    if not limit >= 0:
        raise ConfigError(f"fusion: the size limit must be a number of entries, at least 0, got {limit!r}")
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
    """Forms groups of a fixed number of neighboring layers, counted from the first, as DeAR's "nearby layers".

    Args:
        layers: Number of layers of the model.
        count: Number of layers per group; the last group may have fewer.

    Returns:
        The partition; empty if there are no layers.

    Raises:
        ConfigError: If the count is below 1.
    """
    if count < 1:
        raise ConfigError(f"fusion: the number of layers per group must be at least 1, got {count!r}")
    return [(start, min(start + count, layers)) for start in range(0, layers, count)]


def by_share(entries: Sequence[int], count: int) -> list[Range]:
    """Forms groups with similar numbers of entries, each with at least one layer.

    Args:
        entries: Number of entries of each layer, in flat order.
        count: Number of groups to form.

    Returns:
        Ranges of the groups, in the order of the flat gradient.

    Raises:
        ConfigError: If there are fewer layers than groups.
    """
    if count > len(entries):
        raise ConfigError(f"fragments={count} exceeds the {len(entries)} layers of the model; use fewer fragments")
    total, borders, passed = sum(entries), [0], 0
    for layer, own in enumerate(entries[:-1], 1):
        passed += own
        # Cut where the share is reached, or where each remaining group needs one of the remaining layers.
        wanted, needed = len(borders), count - len(borders)
        if len(borders) < count and (passed * count >= wanted * total or len(entries) - layer == needed):
            borders.append(layer)
    return list(zip(borders, [*borders[1:], len(entries)], strict=True))


def ends(
    groups: Sequence[Range], entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]
) -> list[float]:
    """Computes when the synchronization of each group ends.

    Groups are synchronized one at a time, from the last to the first. Each starts when the previous one has ended and
    the gradients of all its layers are complete, but not before 0.

    Args:
        groups: Partition in flat order.
        entries: Number of entries of each layer, in flat order.
        ready: Time at which the gradient of each layer is complete, in seconds; in flat order, but not sorted.
        cost: Function that returns the seconds that a group with a number of entries takes.

    Returns:
        The end of each group in flat order, in seconds; the values decrease.
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
    """Returns the time, in seconds, at which the last synchronization ends; 0 if there are no groups. See ``ends``.

    Args:
        groups: Partition in flat order.
        entries: Number of entries of each layer, in flat order.
        ready: Time at which the gradient of each layer is complete, in seconds.
        cost: Function that returns the seconds that a group with a number of entries takes.

    Returns:
        The end of the synchronization of the first group, which is the last one to be synchronized.
    """
    return max(ends(groups, entries, ready, cost), default=0.0)


# Partitions of gradients with several dtypes, or whose flat order is that of the backward pass.


_MEGABYTE = 1024 * 1024


def flat_order(gradient: Storage, choose: Callable[[list[int]], Sequence[Range]]) -> list[Range]:
    """Returns the partition in flat order that corresponds to groups chosen in the order of the forward pass.

    Args:
        gradient: Storage of the model's gradients.
        choose: Function that receives the numbers of all layers in forward order, and returns a partition of their
            positions.

    Returns:
        Ranges of the groups, in the order of the flat gradient.
    """
    count = len(gradient.layers)
    # Mirror the positions: ``choose`` expects the first layer of the forward pass at 0.
    if not gradient.backwards:
        return list(choose(list(range(count))))
    return [(count - stop, count - start) for start, stop in reversed(choose(list(reversed(range(count)))))]


def by_megabytes(gradient: Storage, megabytes: float) -> list[Range]:
    """Forms groups of a limited size, filled from the last layer to the first, each of one dtype and device.

    Args:
        gradient: Storage of the model's gradients.
        megabytes: Largest size of a group in megabytes (2^20 bytes) of gradients; 0 for one group per layer.

    Returns:
        Ranges of the groups, in the order of the flat gradient.
    """
    sizes, step = gradient.entries, -1 if gradient.backwards else 1
    found: list[Range] = []
    # The limit is in bytes, and the itemsize differs between runs.
    for start, stop in gradient.runs:
        itemsize = gradient.parameters[gradient.layers[start].tensors[0]].itemsize
        groups = by_size(sizes[start:stop][::step], megabytes * _MEGABYTE / itemsize)
        if gradient.backwards:
            groups = [(stop - start - last, stop - start - first) for first, last in reversed(groups)]
        found += [(start + first, start + last) for first, last in groups]
    return found


def is_partition(value: Any, layers: int) -> bool:
    """Returns whether ``value``, of any type, is a partition of ``layers`` layers: a list of (start, stop) pairs."""
    try:
        ends = [0, *(stop for _, stop in value)]
        whole = all(type(end) is int for end in ends)
        return whole and [tuple(each) for each in value] == list(pairwise(ends)) and ends == sorted({*ends, layers})
    except (TypeError, ValueError):
        return False


def within(runs: Sequence[Range], partition: Sequence[Range]) -> Iterator[Range]:
    """Splits groups so that each has a single dtype and device.

    Args:
        runs: Ranges of neighboring layers with equal dtype and device, in flat order; together, all layers.
        partition: Groups to split, in flat order; together, all layers.

    Yields:
        Groups in flat order.
    """
    for start, stop in partition:
        for first, last in runs:
            if max(start, first) < min(stop, last):
                yield max(start, first), min(stop, last)
