"""Candidates: positions of large entries, among which the k largest entries of a vector are searched.

With error feedback, the smallest magnitude sent changes slowly. A worker stores it for each range, and lists the
entries near this magnitude in the next step, while it adds the gradient. The k largest entries are then found among
little more than k candidates. The result is exact for any stored threshold, so thresholds are not part of saved states.
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

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.vector.layout import Range
from spardl.vector.selection import Chosen, Finder, Integers, ListingRanges, finder_for

__all__ = ["Candidates", "Reuse", "check_number", "smallest_magnitude"]


# A magnitude threshold that is reused for many steps and corrected after each.
#
# Source: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022, section 3
# (threshold reuse), and its official code (bands and factors). Early re-evaluation, when the count is far off, is an
# addition of this library.


@dataclass(frozen=True)
class Reuse:
    """Rule that corrects a reused threshold from step to step, so that it keeps selecting about k entries.

    Args:
        low: Multiple of k; a selection of fewer entries lowers the threshold.
        lower_factor: Factor that the threshold is divided by to lower it.
        high: Multiple of k; a selection of more entries raises the threshold.
        raise_factor: Factor that the threshold is multiplied by to raise it.
        reevaluate_beyond: Factor f; if more than f * k or fewer than k / f entries are selected, the threshold is
            recomputed at once (not part of the published method). ``None`` waits for the end of the period, as
            published.
    """

    low: float = 0.6667
    lower_factor: float = 1.012
    high: float = 1.25
    raise_factor: float = 1.012
    reevaluate_beyond: float | None = 2.0

    def corrected(self, threshold: float, count: int, k: int) -> float:
        """Returns the corrected threshold for the next step.

        Args:
            threshold: Magnitude threshold of this step.
            count: Number of entries that it selected.
            k: Number of entries to select.

        Returns:
            The corrected magnitude threshold.
        """
        if count < self.low * k:
            return threshold / self.lower_factor
        return threshold * self.raise_factor if count > self.high * k else threshold

    def is_astray(self, count: int, k: int) -> bool:
        """Returns whether to recompute a threshold at once, because it selected ``count`` instead of ``k`` entries."""
        beyond = self.reevaluate_beyond
        return beyond is not None and not k / beyond <= count <= beyond * k

    def check_reuse(self, group: str) -> None:
        """Checks that the values of these fields are valid settings of the configuration group ``group``.

        Raises:
            ConfigError: If a value is out of range.
        """
        check_number(group, "low", self.low, 0, 1)
        check_number(group, "high", self.high, 1)
        for name in ("lower_factor", "raise_factor"):
            check_number(group, name, getattr(self, name), 1)
        if self.reevaluate_beyond is not None:
            check_number(group, "reevaluate_beyond", self.reevaluate_beyond, 1)


def check_number(group: str, name: str, value: object, low: float, high: float = math.inf) -> None:
    """Checks that a setting is a finite number within limits.

    Raises:
        ConfigError: If the setting is anything else.
    """
    # NaN fails the comparison; infinity is rejected even without an upper limit.
    if not is_number(float, value) or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ConfigError(f"{group}.{name} must be a number, {limits}, got {value!r}")


def smallest_magnitude(values: Tensor) -> float:
    """Returns the smallest magnitude in ``values``, shape (m,), at most the largest finite number; 0 if m is 0."""
    if not values.numel():
        return 0.0
    return min(float(values.abs().min()), torch.finfo(values.dtype).max)


# Relative distance of the listing bound below the expected magnitude: initial, least and largest value.
_SLACK, _LEAST, _MOST = 0.05, 1e-4, 0.2
# Share of the last relative change of the magnitude that is expected to recur.
_TREND = 0.6
# Number of candidates relative to k above which the slack shrinks and below which it grows, and the two factors.
_MANY, _FEW, _SHRINK, _GROW = 1.5, 1.2, 0.8, 1.15
# Factors for the slack if a list overflowed, or held fewer than k candidates; both cost extra passes over the range.
_OVERFLOW, _MISS = 0.4, 3.0
# List capacity: a multiple of k, plus a constant for small ranges.
_CAPACITY, _EXTRA = 4, 64


class Candidates:
    """Finds the largest entries of one vector among candidates, which are listed while a gradient is added."""

    def __init__(self) -> None:
        self._finder: Finder | None = None
        self._found: list[Chosen] = []
        self._statistics: _Statistics | None = None
        self._listed: Integers = np.empty(0, np.int64)

    def add(self, values: Tensor, gradient: Tensor | None, *, clear: bool = False) -> None:
        """Adds a gradient to the vector, and lists candidates for its largest entries.

        Args:
            values: Vector of shape (n,), modified in place.
            gradient: Gradient of shape (n,); ``None`` only lists candidates.
            clear: Whether to set the gradient to zero.
        """
        before, statistics = self._statistics, _Statistics.of(self._found, values)
        bounds = statistics.cuts
        if before is not None and np.array_equal(before.ranges, statistics.ranges):
            statistics.slack = before.adapted(statistics, self._listed)
            # Until error feedback reaches a steady state, magnitudes grow by less in each step.
            bounds = bounds * (1 + _TREND * (statistics.cuts / before.cuts - 1).clamp(-1, 1))
        bounds = bounds * (1 - torch.from_numpy(statistics.slack)).to(bounds.dtype)
        # Copied because kernels need contiguous arrays.
        starts, stops = statistics.ranges.T.copy()
        ranges = ListingRanges(starts, stops, bounds, _CAPACITY * statistics.wanted + _EXTRA)
        self._listed = self._of(values).add(values, gradient, ranges, clear=clear)
        self._statistics = statistics
        self._found.clear()

    def check_next(self, values: Tensor, gradient: Tensor) -> Tensor | None:
        """Checks a gradient on the GPU, so that the next ``add`` can skip it or clip sums without waiting for the host.

        Args:
            values: Vector of shape (n,).
            gradient: Gradient of shape (n,), which is passed to ``add`` next.

        Returns:
            Bool tensor of shape (2,) on the device. The first value is whether the gradient is finite; if not, ``add``
            will add nothing. The second value becomes false if ``add`` clips a sum that overflows. ``None`` if ``add``
            will check nothing, as on a CPU.
        """
        return self._of(values).check_next(gradient)

    def flag(self, values: Tensor) -> Tensor:
        """Creates a flag on the device of ``values``, shape (n,), which a kernel sets to false if a sum overflows.

        Returns:
            Bool tensor of shape (), true.
        """
        return self._of(values).flag(values.device)

    @property
    def marks(self) -> Tensor | None:
        """Bitmap of the candidates, int32, shape (m,), in which to mark changed entries; ``None`` if not needed."""
        return self._finder.marks if self._finder else None

    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor], spare: float = 1.0) -> Tensor:
        """Finds the k largest entries of each range; ties go to the lowest positions.

        Args:
            values: Vector of shape (n,), unchanged since ``add`` except for the touched entries.
            parts: Disjoint ranges, with k from 0 to the range's length.
            touched: int64 positions of entries that may have changed since ``add``, shape (m,) each, increasing.
            spare: Factor, at least 1; the next step lists about ``spare`` times k candidates.

        Returns:
            int64 positions of shape (sum of k,): range by range, increasing within each.
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

    def reaching(
        self, values: Tensor, part: Range, bound: float, most: int, touched: Sequence[Tensor]
    ) -> Tensor | None:
        """Finds the entries of a range whose magnitude is at least a bound, up to a limit.

        Args:
            values: Vector of shape (n,), as for ``largest``.
            part: Range to search; its k is ignored.
            bound: Smallest magnitude of the entries to find.
            most: Maximum number of entries to return.
            touched: Changed positions as for ``largest``: int64, shape (m,) each.

        Returns:
            int64 positions of shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        return self._of(values).reaching(values, part, bound, most, touched)

    def _of(self, values: Tensor) -> Finder:
        self._finder = self._finder or finder_for(values)
        return self._finder


@dataclass
class _Statistics:
    """Statistics of the selections in one step, used to list candidates in the next.

    Attributes:
        ranges: int64 array of shape (r, 2): disjoint ranges, in order.
        wanted: int64 array of shape (r,): number of entries selected from each range.
        cuts: Tensor of shape (r,): smallest selected magnitudes, above 0.
        looked: int64 array of shape (r,): number of candidates; -1 if all entries were compared.
        slack: Array of shape (r,): relative distance of the listing bound below the expected magnitude.
    """

    ranges: Integers
    wanted: Integers
    cuts: Tensor
    looked: Integers
    slack: NDArray[Any]

    @classmethod
    def of(cls, found: Sequence[Chosen], values: Tensor) -> _Statistics:
        """Collects the statistics of all selections from one vector in one step."""
        parts = np.concatenate([np.empty((0, 3), np.int64), *(chosen.parts for chosen in found)])
        cuts = torch.cat([values.new_empty(0, device="cpu"), *(chosen.cuts for chosen in found)])
        looked = np.concatenate([np.empty(0, np.int64), *(chosen.looked for chosen in found)])
        # A threshold of 0 or infinity does not separate entries.
        useful = np.flatnonzero(((cuts > torch.finfo(cuts.dtype).tiny) & cuts.isfinite()).numpy())
        order = useful[np.argsort(parts[useful, 0])]
        # If ranges overlap, which does not happen so far, the first one counts.
        ends = np.maximum.accumulate(np.append(0, parts[order, 1]))[:-1]
        order = order[parts[order, 0] >= ends]
        slack = np.full(order.size, _SLACK)
        return cls(parts[order, :2], parts[order, 2], cuts[torch.from_numpy(order)], looked[order], slack)

    def adapted(self, after: _Statistics, listed: Integers) -> NDArray[Any]:
        """Returns the slack for the next step, adapted to the outcome of this one.

        Args:
            after: Statistics of the selections that used this slack.
            listed: Number of entries listed per range, shape (r,); -1 if the list overflowed.
        """
        missed = after.looked < 0
        factor = np.where(after.looked > _MANY * after.wanted, _SHRINK, 1.0)
        factor = np.where(after.looked < _FEW * after.wanted, _GROW, factor)
        factor = np.where(missed, np.where(listed < 0, _OVERFLOW, _MISS), factor)
        slack: NDArray[Any] = np.clip(self.slack * factor, _LEAST, _MOST)
        return slack
