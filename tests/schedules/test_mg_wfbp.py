"""The merging rule of MG-WFBP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.schedules.fusion import Linear, finish
from spardl.schedules.measured import merge

TIMES = st.integers(0, 40).map(lambda eighths: eighths / 8)  # exact in binary: ties are ties


def paper(entries: list[int], ready: list[float], startup: float, beta: float) -> set[int]:
    """Algorithm 1 as published, which recalculates all starts: returns the layers merged into the previous one."""
    sizes, merged = list(entries), set()
    for layer in range(len(entries) - 1, 0, -1):
        free, begin = 0.0, {}
        for other in range(len(entries) - 1, -1, -1):
            begin[other] = max(free, ready[other])
            free = begin[other] + (0.0 if other in merged else startup + beta * sizes[other])
        if ready[layer - 1] < begin[layer] + startup:
            merged.add(layer)
            sizes[layer - 1] += sizes[layer]
    return merged


@given(st.data(), st.integers(1, 12), TIMES.filter(bool), st.sampled_from([0.0, 0.125, 1.0]))
def test_is_the_algorithm_of_the_paper(data: st.DataObject, layers: int, startup: float, beta: float) -> None:
    entries = data.draw(st.lists(st.integers(0, 8), min_size=layers, max_size=layers))
    ready = sorted(data.draw(st.lists(TIMES, min_size=layers, max_size=layers)), reverse=True)
    groups = merge(entries, ready, Linear(startup, beta), startup)
    assert {layer for start, stop in groups for layer in range(start + 1, stop)} == paper(entries, ready, startup, beta)


@pytest.mark.parametrize(
    ("ready", "startup", "expected"),
    [
        ([3.0, 2.0, 1.0], 1.5, [(0, 3)]),  # each waits 1, which is less than the start-up
        ([3.0, 2.0, 1.0], 1.0, [(0, 1), (1, 2), (2, 3)]),  # as long as the start-up: no gain
        ([9.0, 1.0, 1.0], 1.0, [(0, 1), (1, 3)]),
        ([9.0, 1.0, 1.0], 0.0, [(0, 1), (1, 3)]),  # no start-up time to save, and no waiting
        ([2.0, 9.0, 1.0], 0.5, [(0, 2), (2, 3)]),  # layer 0 is there before layer 1
    ],
)
def test_who_waits_for_whom(ready: list[float], startup: float, expected: list[tuple[int, int]]) -> None:
    assert merge([0, 0, 0], ready, Linear(startup, 0.0), startup) == expected


def test_layers_that_arrive_while_others_are_sent_are_merged() -> None:
    """The last layer is sent from 1 to 7; layers 1 and 2 are ready before 7, layer 0 is not."""
    entries, ready, cost = [1, 1, 1, 5], [20.0, 6.0, 4.0, 1.0], Linear(1.0, 1.0)
    assert merge(entries, ready, cost, 1.0) == [(0, 1), (1, 3), (3, 4)]


def test_the_cost_may_be_any_function() -> None:
    """The same times, from a table."""
    entries, ready = [1, 1, 1, 5], [20.0, 6.0, 4.0, 1.0]
    assert merge(entries, ready, {1: 2.0, 2: 3.0, 5: 0.5}.__getitem__, 1.0) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 8))
def test_gradients_that_are_all_there_become_one_group(entries: list[int], startup: int) -> None:
    assert merge(entries, [2.0] * len(entries), Linear(startup, 1.0), startup) == [(0, len(entries))]


def test_little() -> None:
    cost = Linear(1.0, 1.0)
    assert merge([], [], cost, 1.0) == []
    assert merge([0], [0.5], cost, 1.0) == [(0, 1)]
    assert finish(merge([4], [0.5], cost, 1.0), [4], [0.5], cost) == 5.5
