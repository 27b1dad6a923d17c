"""Groups of neighbouring layers that are synchronized together, and when their synchronizations end.

Layers are counted in flat order: the order in which they are registered, used by the forward pass, and laid into the
flat gradient. The backward pass reaches them the other way round, so groups are sent from the last to the first.
Times are seconds since the backward pass began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from spardl.basics.errors import ConfigError

__all__ = ["Range", "by_count", "by_share", "by_size", "ends", "finish"]

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
