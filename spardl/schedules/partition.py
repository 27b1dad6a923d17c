"""Partitions of gradients that may have several types, or whose flat order is that of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from spardl.schedules.fusion import Range, by_size
from spardl.vector.storage import Storage

__all__ = ["by_megabytes", "flat_order", "is_partition", "within"]

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
