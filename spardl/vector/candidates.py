"""Where the largest entries of a worker's vector may be: thresholds carried over from step to step.

With error feedback, the least magnitude that is sent changes slowly. So a worker remembers it for each range that it
selected from, and lists in the next step, in the same pass that adds the gradient, the entries of nearly this
magnitude. The k largest are then found among little more than k candidates. The result is exact whatever is
remembered, so this is no part of a saved state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.vector.layout import Part
from spardl.vector.selection import Chosen, Finder, Integers, Ranges, finder_for

__all__ = ["Candidates", "Reuse", "check_number", "smallest_magnitude"]


# A magnitude threshold that is used again for many steps, and corrected a little after each.
#
# Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
# (reuse of thresholds), and its official code (the bands and factors). To find the threshold ahead of its period when
# the count has gone far astray is an addition of this library.


@dataclass(frozen=True)
class Reuse:
    """How a threshold is kept near the one that selects k entries.

    Args:
        low: a count below this multiple of k lowers the threshold.
        lower_factor: factor that it is divided by then.
        high: a count above this multiple of k raises the threshold.
        raise_factor: factor that it is multiplied by then.
        reevaluate_beyond: a count above this multiple of k, or below k divided by it, has the threshold found at once,
            an addition to what is published; ``None``: only at the end of the period, as published.
    """

    low: float = 0.6667
    lower_factor: float = 1.012
    high: float = 1.25
    raise_factor: float = 1.012
    reevaluate_beyond: float | None = 2.0

    def corrected(self, threshold: float, count: int, k: int) -> float:
        """The threshold of the next step.

        Args:
            threshold: magnitude, of this step.
            count: entries that it selected.
            k: entries wanted.

        Returns:
            A magnitude.
        """
        if count < self.low * k:
            return threshold / self.lower_factor
        return threshold * self.raise_factor if count > self.high * k else threshold

    def is_astray(self, count: int, k: int) -> bool:
        """Whether the threshold that selected ``count`` entries, where ``k`` are wanted, must not be used."""
        beyond = self.reevaluate_beyond
        return beyond is not None and not k / beyond <= count <= beyond * k

    def check_reuse(self, group: str) -> None:
        """Checks these fields as those of a configuration group, ``group``.

        Raises:
            ConfigError: if a value is out of range.
        """
        check_number(group, "low", self.low, 0, 1)
        check_number(group, "high", self.high, 1)
        for name in ("lower_factor", "raise_factor"):
            check_number(group, name, getattr(self, name), 1)
        if self.reevaluate_beyond is not None:
            check_number(group, "reevaluate_beyond", self.reevaluate_beyond, 1)


def check_number(group: str, name: str, value: object, low: float, high: float = math.inf) -> None:
    """Checks that a configured value is a finite number within limits.

    Raises:
        ConfigError: if it is not.
    """
    if not is_a(float, value) or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ConfigError(f"{group}.{name} must be a number, {limits}, got {value!r}")


def smallest_magnitude(values: Tensor) -> float:
    """The threshold that all of these ``values``, shape (m,), reach; 0 if there are none.

    At most the largest number of their type.
    """
    if not values.numel():
        return 0.0
    return min(float(values.abs().min()), torch.finfo(values.dtype).max)


# How far below the expected magnitude entries are listed, as a share of it: at first, and at least and most.
_SLACK, _LEAST, _MOST = 0.05, 1e-4, 0.2
# Share of the last change of this magnitude that is expected to come again.
_TREND = 0.6
# Candidates, as a multiple of the wanted: the slack shrinks above and grows below, by these factors.
_MANY, _FEW, _SHRINK, _GROW = 1.5, 1.2, 0.8, 1.15
# What too many to be listed, or too few to be enough, do to it: either costs some passes over the range.
_OVERFLOW, _MISS = 0.4, 3.0
# Entries that may be listed: a multiple of the wanted, and some more for small ranges.
_ROOM, _SPARE = 4, 64


class Candidates:
    """The candidates of one vector."""

    def __init__(self) -> None:
        self._finder: Finder | None = None
        self._found: list[Chosen] = []
        self._lesson: _Lesson | None = None
        self._listed: Integers = np.empty(0, np.int64)

    def add(self, values: Tensor, gradient: Tensor | None, *, clear: bool = False) -> None:
        """Adds a gradient to the vector, and lists what may be among its largest entries then.

        Args:
            values: shape (n,), changed in place.
            gradient: shape (n,), or ``None`` to list only.
            clear: whether the gradient becomes zero, or stays as it is.
        """
        before, lesson = self._lesson, _Lesson.of(self._found, values)
        bounds = lesson.cuts
        if before is not None and np.array_equal(before.ranges, lesson.ranges):
            lesson.slack = before.adapted(lesson, self._listed)
            # Until error feedback has settled, magnitudes grow, each time by less.
            bounds = bounds * (1 + _TREND * (lesson.cuts / before.cuts - 1).clamp(-1, 1))
        bounds = bounds * (1 - torch.from_numpy(lesson.slack)).to(bounds.dtype)
        starts, stops = lesson.ranges.T.copy()
        ranges = Ranges(starts, stops, bounds, _ROOM * lesson.wanted + _SPARE)
        self._listed = self._of(values).add(values, gradient, ranges, clear=clear)
        self._lesson = lesson
        self._found.clear()

    def largest(self, values: Tensor, parts: Sequence[Part], touched: Sequence[Tensor], spare: float = 1.0) -> Tensor:
        """The k largest entries of each of some ranges; ties: the lowest positions.

        Args:
            values: shape (n,): the vector, as ``add`` left it but for the touched entries.
            parts: no two overlap, k from 0 to the range's length.
            touched: positions of entries that may have changed since: int64, shape (m,) each, increasing.
            spare: the next step's lists are made as if so many times k were wanted, at least 1.

        Returns:
            int64 positions, shape (sum of k,): range by range, increasing in each.
        """
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=values.device)
        chosen = self._of(values).largest(values, parts, touched)
        if spare != 1:
            starts, stops, wanted = chosen.parts.T
            wanted = np.minimum((spare * wanted).astype(np.int64), stops - starts)
            chosen = chosen._replace(parts=np.stack([starts, stops, wanted], axis=1))
        self._found.append(chosen)
        return chosen.positions

    def reaching(self, values: Tensor, part: Part, bound: float, most: int, touched: Sequence[Tensor]) -> Tensor | None:
        """The entries of a range that reach a bound, unless they are too many.

        Args:
            values: shape (n,), as for ``largest``.
            part: the range; its k does not matter.
            bound: least magnitude.
            most: so many entries are not too many.
            touched: as for ``largest``: int64, shape (m,) each.

        Returns:
            int64 positions, shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        return self._of(values).reaching(values, part, bound, most, touched)

    def _of(self, values: Tensor) -> Finder:
        self._finder = self._finder or finder_for(values)
        return self._finder


@dataclass
class _Lesson:
    """What the selections of one step tell about the next step's.

    Attributes:
        ranges: int64, shape (r, 2), in order; no two overlap.
        wanted: int64, shape (r,): entries selected of each.
        cuts: shape (r,): magnitudes, above 0.
        looked: int64, shape (r,): candidates; -1 where all entries had to be looked at.
        slack: shape (r,).
    """

    ranges: Integers
    wanted: Integers
    cuts: Tensor
    looked: Integers
    slack: NDArray[Any]

    @classmethod
    def of(cls, found: Sequence[Chosen], values: Tensor) -> _Lesson:
        """From all selections in a vector."""
        parts = np.concatenate([np.empty((0, 3), np.int64), *(chosen.parts for chosen in found)])
        cuts = torch.cat([values.new_empty(0, device="cpu"), *(chosen.cuts for chosen in found)])
        looked = np.concatenate([np.empty(0, np.int64), *(chosen.looked for chosen in found)])
        # A bound that is 0 or infinite separates nothing.
        useful = np.flatnonzero(((cuts > torch.finfo(cuts.dtype).tiny) & cuts.isfinite()).numpy())
        order = useful[np.argsort(parts[useful, 0])]
        # Of ranges that overlap, which nobody has selected from so far, the first one counts.
        ends = np.maximum.accumulate(np.append(0, parts[order, 1]))[:-1]
        order = order[parts[order, 0] >= ends]
        slack = np.full(order.size, _SLACK)
        return cls(parts[order, :2], parts[order, 2], cuts[torch.from_numpy(order)], looked[order], slack)

    def adapted(self, after: _Lesson, listed: Integers) -> NDArray[Any]:
        """The slack to use next.

        Args:
            after: what came of this one.
            listed: shape (r,): how many entries were listed by it; -1 for too many.
        """
        missed = after.looked < 0
        factor = np.where(after.looked > _MANY * after.wanted, _SHRINK, 1.0)
        factor = np.where(after.looked < _FEW * after.wanted, _GROW, factor)
        factor = np.where(missed, np.where(listed < 0, _OVERFLOW, _MISS), factor)
        slack: NDArray[Any] = np.clip(self.slack * factor, _LEAST, _MOST)
        return slack
