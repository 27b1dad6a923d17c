"""A threshold that is used again: its evaluation, its corrections, and what it never selects."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.compressors import ReusedThreshold, TopK
from spardl.compressors.reused_threshold import ReusedThresholdState
from spardl.protocol.programs import Context, Worker
from spardl.vector.layout import Layout
from tests.support.harness import selected

ALONE = Worker(0, 1)


class Line:
    """A compressor at work on one vector after the other."""

    def __init__(self, compressor: ReusedThreshold, layout: Layout) -> None:
        self.compressor, self.layout = compressor, layout
        self.state = compressor.init_state(layout, torch.float64, "cpu")
        self.step = 0

    def select(self, values: Tensor) -> list[int]:
        context = Context(ALONE, self.layout, self.step)
        self.step += 1
        k = self.compressor.count(context)
        return selected(self.compressor, values, k, context, self.state)

    @property
    def thresholds(self) -> list[float]:
        return self.state.thresholds.tolist()


def published(**values: object) -> ReusedThreshold:
    """Without evaluation ahead of time."""
    return ReusedThreshold(**{"density": 0.5, "period": 4, "reevaluate_beyond": None, **values})


def test_an_evaluation_keeps_exactly_k_and_gives_the_threshold() -> None:
    line = Line(published(), Layout.flat(6))
    assert line.select(torch.tensor([1.0, -3.0, 2.0, 0.5, -2.0, 2.0])) == [1, 2, 4]
    assert line.thresholds == [2.0]
    assert line.select(torch.tensor([2.0, 0.0, -2.5, 1.9, -1.9, 7.0])) == [0, 2, 5]
    assert line.thresholds == [2.0]
    line.step = 4
    assert line.select(torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 2.0])) == [0, 1, 2]
    assert line.thresholds == [4.0]


def test_too_large_a_selection_raises_the_threshold() -> None:
    line = Line(published(pre_corrections=5, pre_limit=4 / 3, pre_factor=1.5), Layout.flat(6))
    line.select(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    # 1 selects six, 1.5 five, 2.25 four, which is not more than 4/3 of three.
    assert line.select(torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0, 6.0])) == [2, 3, 4, 5]
    assert line.thresholds == [pytest.approx(2.25 * 1.012)]


def test_the_number_of_corrections_before_use_is_limited() -> None:
    line = Line(published(pre_corrections=2, pre_factor=1.5), Layout.flat(6))
    line.select(torch.ones(6))
    assert line.select(torch.full((6,), 100.0)) == [0, 1, 2, 3, 4, 5]
    assert line.thresholds == [pytest.approx(2.25 * 1.012)]


def test_too_few_lower_the_threshold() -> None:
    line = Line(published(low=0.7, lower_factor=1.25), Layout.flat(6))
    line.select(torch.full((6,), 5.0))
    assert line.select(torch.tensor([5.0, -5.0, 4.0, 4.0, 4.0, 4.0])) == [0, 1]
    assert line.thresholds == [4.0]
    assert line.select(torch.tensor([5.0, -5.0, 4.0, 3.0, 3.0, 3.0])) == [0, 1, 2]
    assert line.thresholds == [4.0]


@pytest.mark.parametrize("scale", [100.0, 0.01])
def test_far_astray_it_is_evaluated_at_once(scale: float) -> None:
    source = torch.Generator().manual_seed(1)
    steps = [torch.randn(4000, generator=source) * (scale if step >= 5 else 1) for step in range(30)]
    counts = {}
    for beyond in (2.0, None):
        line = Line(ReusedThreshold(0.05, period=1000, reevaluate_beyond=beyond), Layout.flat(4000))
        counts[beyond] = [len(line.select(values)) for values in steps]
    assert all(100 <= count <= 400 for count in counts[2.0])
    assert counts[2.0][5] == 200
    # As published, it takes many more steps.
    assert not any(100 <= count <= 400 for count in counts[None][5:])


def test_zeros_are_never_selected_unless_all_is() -> None:
    line = Line(published(), Layout.flat(6))
    sparse = torch.tensor([0.0, -0.0, 3.0, 0.0, 0.0, 0.0])
    assert line.select(sparse) == [2]
    assert line.thresholds == [0.0]
    assert line.select(torch.zeros(6)) == []
    # A threshold of 0 would select everything; it is evaluated instead.
    assert line.select(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) == [3, 4, 5]
    assert line.thresholds == [4.0]
    whole = Line(published(density=1.0), Layout.flat(6))
    assert [whole.select(sparse), whole.select(sparse)] == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_threshold_too_small_for_the_type_selects_no_zeros() -> None:
    line = Line(published(), Layout.flat(6))
    line.state = ReusedThresholdState(torch.tensor([1e-60], dtype=torch.float64))
    line.step = 1
    assert line.select(torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])) == [1, 4]


@pytest.mark.parametrize("overflow", [math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 1])
def test_an_overflow_is_sent_and_seen(overflow: float, step: int) -> None:
    line = Line(published(), Layout.flat(6))
    line.select(torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0, 0.0]))
    line.step = step
    assert 2 in line.select(torch.tensor([1.0, 4.0, overflow, 5.0, 2.0, 6.0]))
    assert all(map(math.isfinite, line.thresholds))


def test_nothing_to_select_from() -> None:
    line = Line(published(), Layout.flat(0))
    assert line.thresholds == []
    assert [line.select(torch.zeros(0)), line.select(torch.zeros(0))] == [[], []]


def test_layers_have_thresholds_of_their_own() -> None:
    """scope=layer is one compressor per layer, and an empty layer has none."""
    shapes = [(5, 4), (0,), (3,), (40,)]
    together = Line(published(density=0.2, scope="layer"), Layout.of(shapes))
    assert len(together.thresholds) == 3
    starts = [0, 20, 23, 63]
    alone = [Line(published(density=0.2), Layout.flat(end - start)) for start, end in pairwise(starts)]
    source = torch.Generator().manual_seed(2)
    for _ in range(11):
        values = torch.randn(63, generator=source) * torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(
            torch.tensor([20, 3, 40])
        )
        expected = [
            position + start
            for line, (start, end) in zip(alone, pairwise(starts), strict=True)
            for position in line.select(values[start:end])
        ]
        assert together.select(values) == expected
        assert together.thresholds == [line.thresholds[0] for line in alone]


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_with_a_period_of_one_it_is_top_k(length: int, density: float, seed: int) -> None:
    layout = Layout.flat(length)
    line = Line(ReusedThreshold(density, period=1), layout)
    exact = TopK(density)
    source = torch.Generator().manual_seed(seed)
    for step in range(3):
        values = (torch.randn(length, generator=source) * 4).round() + 0.5  # ties, but no zeros
        context = Context(ALONE, layout, step)
        expected = selected(exact, values, exact.count(context), context)
        assert line.select(values) == expected


def test_a_state_that_was_saved_does_not_move() -> None:
    line = Line(published(), Layout.flat(6))
    line.select(torch.full((6,), 5.0))
    saved = line.state.state_dict()
    line.select(torch.full((6,), 4.0))
    assert saved["thresholds"].tolist() == [5.0]
    assert line.thresholds == [5.0 / 1.012]


def test_the_count_stays_about_k() -> None:
    """The published corrections, on vectors whose scale drifts by 0.3% per step."""
    line = Line(ReusedThreshold(0.02, reevaluate_beyond=None), Layout.flat(10_000))
    source = torch.Generator().manual_seed(3)
    counts = [len(line.select(torch.randn(10_000, generator=source) * 1.003**step)) for step in range(96)]
    assert [counts[step] for step in (0, 32, 64)] == [200, 200, 200]
    assert all(0.5 * 200 <= count <= 1.5 * 200 for count in counts)
    assert any(count != 200 for count in counts)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("density", 0, "density must be above 0"),
        ("period", 0, "period must be an integer, at least 1, got 0"),
        ("period", 1.5, "period must be an integer"),
        ("pre_corrections", -1, "pre_corrections must be an integer, at least 0"),
        ("pre_limit", 0.9, "pre_limit must be a number, at least 1, got 0.9"),
        ("pre_factor", "x", "pre_factor must be a number, at least 1, got 'x'"),
        ("low", 1.1, "low must be a number, from 0 to 1, got 1.1"),
        ("low", math.nan, "low must be a number"),
        ("lower_factor", 0.5, "lower_factor must be a number, at least 1"),
        ("high", True, "high must be a number, at least 1, got True"),
        ("raise_factor", math.inf, "raise_factor must be a number, at least 1, got inf"),
        ("reevaluate_beyond", 0.5, "reevaluate_beyond must be a number, at least 1"),
    ],
)
def test_bad_values(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{message}"):
        ReusedThreshold(**{name: value})
