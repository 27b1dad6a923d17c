"""Partitions of layers, linear costs, and end times of synchronizations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.schedules.fusion import Linear, Range, by_count, by_share, by_size, ends, finish

SIZES = st.lists(st.integers(0, 50), max_size=12)


def covered(groups: list[Range]) -> list[int]:
    return [layer for start, stop in groups for layer in range(start, stop)]


@given(SIZES, st.one_of(st.integers(0, 120), st.floats(0, 120), st.just(math.inf)))
def test_groups_by_size_are_as_large_as_allowed(entries: list[int], limit: float) -> None:
    groups = by_size(entries, limit)
    assert covered(groups) == list(range(len(entries)))
    totals = [sum(entries[start:stop]) for start, stop in groups]
    for (start, stop), total in zip(groups, totals, strict=True):
        assert start < stop
        assert total <= limit or stop == start + 1
    for (_, border), total in zip(groups, totals[1:], strict=False):
        assert total >= limit or total + entries[border - 1] > limit


def test_groups_by_size_are_filled_from_the_last_layer() -> None:
    entries = [4, 3, 9, 2, 2, 1]
    assert by_size(entries, 5) == [(0, 1), (1, 2), (2, 3), (3, 6)]
    assert by_size(entries, 4) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]
    assert by_size([2, 3, 2], 5) == [(0, 1), (1, 3)]


def test_limits_of_a_size() -> None:
    assert by_size([0, 0, 3, 0], 0) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert by_size([0, 0, 3, 0], math.inf) == [(0, 4)]
    assert by_size([5], 1) == [(0, 1)]
    assert by_size([], 1) == []
    for limit in (-1, math.nan):
        with pytest.raises(ConfigError, match="at least 0"):
            by_size([1], limit)


def test_groups_by_count() -> None:
    assert by_count(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert by_count(2, 5) == [(0, 2)]
    assert by_count(0, 1) == []
    with pytest.raises(ConfigError, match="at least 1"):
        by_count(3, 0)


def test_a_line_is_found_again() -> None:
    sizes = [10, 1000, 5000, 10**9]
    found = Linear.fit(sizes, [Linear(3e-4, 2e-9)(size) for size in sizes])
    assert (found.fixed, found.per_entry) == pytest.approx((3e-4, 2e-9))
    assert Linear(2.0, 0.5)(0) == 2.0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-5, 40)), min_size=2, max_size=8))
@example([(0, 0), (1, -1), (10, 20)])  # no free optimum: the start-up would be negative
@example([(0, 20), (10, 10), (20, 1)])  # nor here: larger groups took less time
@example([(1, -1), (2, -2)])
def test_no_line_without_negative_coefficients_is_nearer(points: list[tuple[int, int]]) -> None:
    sizes, seconds = [size for size, _ in points], [float(value) for _, value in points]
    if len(set(sizes)) < 2:
        with pytest.raises(ConfigError, match="at least two different sizes"):
            Linear.fit(sizes, seconds)
        return
    found = Linear.fit(sizes, seconds)
    assert min(found.fixed, found.per_entry) >= 0
    least = found.error(sizes, seconds)
    fixed, slopes = np.meshgrid(np.linspace(0, 45, 91), np.linspace(0, 45, 181))
    errors = sum((fixed + slopes * size - value) ** 2 for size, value in zip(sizes, seconds, strict=True))
    assert least <= errors.min() + 1e-6
    for step in (1e-3, 1e-6):
        for other in (Linear(found.fixed + step, found.per_entry), Linear(found.fixed, found.per_entry + step)):
            assert least <= other.error(sizes, seconds) + 1e-9


@pytest.mark.parametrize("seconds", [[1.0], [1.0, math.nan], [1.0, math.inf]])
def test_times_that_make_no_line(seconds: list[float]) -> None:
    with pytest.raises(ConfigError, match="one finite time for each of 2 sizes"):
        Linear.fit([1, 2], seconds)
    with pytest.raises(ConfigError, match="at least two different sizes"):
        Linear.fit([], [])


def test_groups_end_one_after_the_other() -> None:
    """Layer 2 is ready at 1 and takes 3; layers 0 and 1 are ready at 5, in either order."""
    entries, cost = [1, 1, 2], Linear(1.0, 1.0)
    assert ends([(0, 2), (2, 3)], entries, [5.0, 2.0, 1.0], cost) == [8.0, 4.0]
    assert ends([(0, 2), (2, 3)], entries, [2.0, 5.0, 1.0], cost) == [8.0, 4.0]
    assert ends([(0, 1), (1, 3)], entries, [2.0, 1.5, 1.0], cost) == [7.5, 5.5]
    assert finish([(0, 1), (1, 3)], entries, [2.0, 1.5, 1.0], cost) == 7.5


def test_ends_of_little() -> None:
    cost = Linear(1.0, 1.0)
    assert ends([], [], [], cost) == []
    assert finish([], [], [], cost) == 0.0
    assert finish([(0, 1)], [0], [2.0], cost) == 3.0
    assert finish([(0, 1)], [0], [-2.0], cost) == 1.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_groups_by_share(entries: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(entries)))
    groups = by_share(entries, count)
    assert len(groups) == count
    assert all(start < stop for start, stop in groups)
    assert covered(groups) == list(range(len(entries)))


def test_shares_by_hand() -> None:
    assert by_share([5, 5, 5, 5], 2) == [(0, 2), (2, 4)]
    assert by_share([1, 1, 8, 1, 1], 3) == [(0, 3), (3, 4), (4, 5)]
    assert by_share([9, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ConfigError, match="fragments=3 exceeds the 2 layers of the model"):
        by_share([1, 1], 3)
