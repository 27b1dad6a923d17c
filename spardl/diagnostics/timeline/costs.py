"""Seconds of a synchronization: the published rounds and words on an alpha-beta network, and what compressing takes.

seconds = rounds * alpha + bytes * beta + compression, a word having 4 bytes (float32), or, where entries are sent with
their indices, what the wire format makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from spardl.clusters.network import Network
from spardl.method.method import Method
from spardl.protocol.context import Context
from spardl.protocol.costs import Bounds, Cost
from spardl.protocol.programs import Worker
from spardl.vector.layout import Layout

__all__ = ["GroupCost", "Work", "halves", "whole"]

# Past every warm-up, and a multiple of no period: nothing that is done every so many steps falls into it.
ORDINARY_STEP = 1_000_003


class Work(NamedTuple):
    """What the communication thread does for one group.

    Attributes:
        compress: seconds before the first message.
        transfer: seconds of messages.
    """

    compress: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.compress + self.transfer


@dataclass(frozen=True)
class GroupCost:
    """The work for a group of any size.

    Args:
        formula: rounds and words of a number of entries. Where only limits are known, their mean is taken.
        word: bytes of a word, for a number of entries.
        network: what moves them.
        compression: seconds to compress a number of entries.
    """

    formula: Callable[[int], Cost]
    word: Callable[[int], float]
    network: Network
    compression: Callable[[int], float]

    def __call__(self, entries: int) -> Work:
        """The work for one group of so many entries."""
        rounds, words = map(_mean, self.formula(entries))
        seconds = rounds * self.network.alpha + words * self.word(entries) * self.network.beta
        return Work(self.compression(entries), seconds)

    def seconds(self, entries: int) -> float:
        """Of compression and messages together, as the functions that cut models into groups ask for it."""
        return self(entries).seconds

    @property
    def startup(self) -> float:
        """Seconds of the smallest group: what joining two groups saves."""
        return self.seconds(1)


def whole(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> GroupCost:
    """A method's synchronization in one piece.

    A group is taken for one vector of unknown tensors. A method that compresses by matrix is taken for dense by that,
    unless the model's tensors are known: then each entry costs what it does on average over the model.

    Args:
        method: how gradients are averaged.
        workers: P.
        network: what moves them.
        compression: seconds to compress a number of entries, such as a ``Linear``.
        dtype: of the gradients.
        layout: the model's tensors, if they are known.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    if layout and method.compressor.by_matrix:
        return GroupCost(_on_average(method, workers, layout), lambda entries: dtype.itemsize, network, compression)
    formula = cache(lambda entries: method.published_cost(_context(workers, entries)))
    return GroupCost(formula, _word_bytes(method, workers, dtype), network, compression)


def halves(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
) -> tuple[GroupCost, GroupCost]:
    """A method's synchronization in two: up to each worker's reduced shard, and the rest.

    All compression counts with the first, in which entries are selected.

    Args:
        method: how gradients are averaged.
        workers: P.
        network: what moves them.
        compression: seconds to compress a number of entries.
        dtype: of the gradients.

    Raises:
        ConfigError: if the method cannot be split, or does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    both = cache(lambda entries: method.half_costs(_context(workers, entries)))
    both(1)
    word = _word_bytes(method, workers, dtype)
    first = GroupCost(lambda entries: both(entries)[0], word, network, compression)
    return first, GroupCost(lambda entries: both(entries)[1], word, network, lambda entries: 0.0)


def _on_average(method: Method, workers: int, layout: Layout) -> Callable[[int], Cost]:
    """Words of a group as if it had its share of all matrices of the model; the rounds are those of any group."""
    model = method.published_cost(Context(Worker(0, workers), layout, ORDINARY_STEP))

    def formula(entries: int) -> Cost:
        low, high = (round(words * entries / layout.length) for words in model.words)
        return Cost(model.rounds, Bounds(low, high))

    return cache(formula)


def _word_bytes(method: Method, workers: int, dtype: torch.dtype) -> Callable[[int], float]:
    return cache(lambda entries: method.word_bytes(_context(workers, entries), dtype))


def _context(workers: int, entries: int) -> Context:
    return Context(Worker(0, workers), Layout.flat(entries), ORDINARY_STEP)


def _mean(bounds: Bounds) -> float:
    return (bounds.low + bounds.high) / 2
