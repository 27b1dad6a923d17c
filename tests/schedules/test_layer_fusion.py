"""The optimal partition, compared with all partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.schedules.fusion import Linear, Range, by_count, by_size, finish
from spardl.schedules.measured import merge, optimal


class Case(NamedTuple):
    entries: list[int]
    ready: list[float]
    cost: Callable[[int], float]
    startup: float

    def ends(self, groups: list[Range]) -> float:
        return finish(groups, self.entries, self.ready, self.cost)


def partitions(layers: int) -> Iterator[list[Range]]:
    """All 2^(layers - 1), the fewest groups first."""
    for cuts in range(layers):
        for inner in itertools.combinations(range(1, layers), cuts):
            yield list(itertools.pairwise((0, *inner, layers)))


@st.composite
def cases(draw: st.DrawFn, most: int, least: int = 1) -> Case:
    """Ready times in any order, with and without ties; linear, root and step costs."""
    layers = draw(st.integers(least, most))
    times = draw(st.sampled_from([st.floats(0, 10), st.integers(0, 6).map(float)]))
    ready = draw(st.lists(times, min_size=layers, max_size=layers))
    if draw(st.booleans()):
        ready.sort(reverse=True)
    entries = draw(st.lists(st.integers(0, 12), min_size=layers, max_size=layers))
    fixed = draw(st.one_of(st.just(0.0), st.floats(0, 3), st.integers(0, 3).map(float)))
    slope = draw(st.one_of(st.just(0.0), st.floats(0, 1)))
    line = Linear(fixed, slope)
    shapes: list[Callable[[int], float]] = [
        line,
        lambda entries: fixed + slope * math.sqrt(entries),
        lambda entries: line(entries) + entries // 7,
        lambda entries: fixed + slope * entries**2 / 8,
    ]
    return Case(entries, ready, draw(st.sampled_from(shapes)), fixed)


@given(cases(9))
def test_no_partition_ends_earlier_or_has_fewer_groups(case: Case) -> None:
    found = optimal(case.entries, case.ready, case.cost)
    assert found in list(partitions(len(case.entries)))
    best = min(partitions(len(case.entries)), key=case.ends)  # of several, the first, so one of the fewest groups
    assert (case.ends(found), len(found)) == (case.ends(best), len(best))


@settings(max_examples=25)
@given(cases(12, least=10))
def test_up_to_twelve_layers(case: Case) -> None:
    found = optimal(case.entries, case.ready, case.cost)
    assert case.ends(found) == min(map(case.ends, partitions(len(case.entries))))


@given(cases(40), st.integers(0, 200), st.integers(1, 10))
def test_is_never_worse_than_any_rule(case: Case, limit: int, count: int) -> None:
    layers = len(case.entries)
    rules = [
        by_count(layers, 1),
        by_count(layers, layers),
        by_count(layers, count),
        by_size(case.entries, limit),
        merge(case.entries, case.ready, case.cost, case.startup),
    ]
    assert case.ends(optimal(case.entries, case.ready, case.cost)) <= min(map(case.ends, rules))


def test_is_better_than_both_extremes_and_than_merging() -> None:
    """Each wait is shorter than the start-up, so merging makes the large last layer wait for all of them."""
    entries, ready, cost = [1, 1, 1, 1, 9], [3.5, 2.5, 1.5, 0.75, 0.0], Linear(1.25, 1.0)
    best = optimal(entries, ready, cost)
    assert best == [(0, 4), (4, 5)]
    others = [by_count(5, 1), by_count(5, 5), merge(entries, ready, cost, cost.fixed)]
    assert others[2] == others[1]
    assert finish(best, entries, ready, cost) < min(finish(groups, entries, ready, cost) for groups in others)


def test_a_group_that_ends_in_time_anyway_is_not_cut() -> None:
    """Layers 1 to 3 could end earlier in three groups, but then they would wait for layer 0."""
    assert optimal([1, 1, 1, 1], [90.0, 3.0, 2.0, 1.0], Linear(0.25, 0.25)) == [(0, 1), (1, 4)]


def test_little() -> None:
    cost = Linear(1.0, 1.0)
    assert optimal([], [], cost) == []
    assert optimal([0], [0.0], cost) == [(0, 1)]
    assert optimal([0, 0, 0], [0.0, 0.0, 0.0], Linear(0.0, 0.0)) == [(0, 3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_times_that_are_none(bad: float) -> None:
    with pytest.raises(ConfigError, match="not finite"):
        optimal([1, 2], [1.0, bad], Linear(1.0, 1.0))
    with pytest.raises(ConfigError, match="not finite"):
        optimal([1, 2], [1.0, 2.0], lambda entries: bad)


def test_many_layers() -> None:
    """The number of tensors in DenseNet-201; the cost is one table row per layer and group."""
    layers = 604
    entries = [1 + (37 * layer) % 101 for layer in range(layers)]
    ready = [float(layers - layer) for layer in range(layers)]
    cost = Linear(5.0, 0.005)
    found = optimal(entries, ready, cost)
    assert found[0][0] == 0
    assert found[-1][1] == layers
    assert finish(found, entries, ready, cost) < finish(by_count(layers, 8), entries, ready, cost)
