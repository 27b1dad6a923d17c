"""Candidates of a selection, magnitudes and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Range
from spardl.vector.norms import _exponent, clip_factor, divide, largest_magnitude, norm_of, sum_of_squares
from spardl.vector.rows import kth_largest, positions_reaching
from spardl.vector.selection import Chosen, CompiledFinder, Finder, Integers, ListingRanges, PortableFinder, finder_for
from spardl.vector.sparse import SparseVector
from tests.support.quick import some_quick
from tests.vector.test_selection import DTYPES, PATHS, exact

LENGTH = 60_000


class Watched(Finder):
    """Keeps what a finder said."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self.said: list[Chosen] = []

    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        return self.finder.add(values, gradient, ranges, clear=clear)

    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        self.said.append(self.finder.largest(values, parts, touched))
        return self.said[-1]


class Line:
    """Error feedback on one vector: selected entries are removed, and others are added."""

    def __init__(self, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> None:
        self.memory = torch.zeros(length, dtype=dtype)
        self.watched = Watched(finder_for(self.memory))
        self.candidates = Candidates()
        self.source = torch.Generator().manual_seed(length)

    def gradient(self, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(self.memory.numel(), generator=self.source, dtype=torch.float64)
        return (scale * drawn).to(self.memory.dtype)

    def step(self, gradient: Tensor | None, selections: Sequence[Sequence[Range]]) -> list[int]:
        """Selects, and after each selection takes what it found and adds a block; how many each range looked at."""
        expected_memory = self.memory if gradient is None else self.memory + gradient
        expected_memory = expected_memory.clone()
        with patch("spardl.vector.candidates.finder_for", lambda values: self.watched):
            self.candidates.add(self.memory, gradient)
            assert torch.equal(self.memory, expected_memory)
            vector, before = Accumulator(self.memory, self.candidates), len(self.watched.said)
            for parts in selections:
                wanted = exact(self.memory, parts)
                positions = vector.largest(parts)
                assert positions.tolist() == wanted
                vector.take_at(positions[positions.argsort()])
                vector.add(0, self.block())
        looked = [count for chosen in self.watched.said[before:] for count in chosen.looked.tolist()]
        vector.restore()
        self.memory[vector.taken()] = 0
        return looked

    def block(self) -> SparseVector:
        """What arrives: some of it among the largest."""
        length = self.memory.numel()
        indices = torch.randint(length, (length // 100,), generator=self.source).unique()
        values = 2 * self.memory.abs().mean() * torch.randn(indices.numel(), generator=self.source)
        return SparseVector(indices, values.to(self.memory.dtype), length)


HALVES = [[Range(0, 25_000, 250)], [Range(40_000, LENGTH, 200), Range(25_000, 40_000, 150)]]
COUNTS = [250, 200, 150]


@pytest.fixture(params=PATHS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setenv("SPARDL_KERNELS", request.param)
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_the_long_run_it_looks_at_little_more_than_k(name: str, dtype: torch.dtype) -> None:
    line = Line(dtype=dtype)
    found = [line.step(line.gradient(), HALVES) for _ in range(30)]
    assert isinstance(line.watched.finder, CompiledFinder if name == "compiled" else PortableFinder)
    assert found[0] == [-1, -1, -1]
    late = found[10:]
    listed = [(count, k) for counts in late for count, k in zip(counts, COUNTS, strict=True) if count >= 0]
    assert len(listed) >= 0.95 * len(late) * len(COUNTS)
    assert sum(count for count, _ in listed) <= 2 * sum(k for _, k in listed)


def test_with_a_constant_gradient_all_is_listed_soon(name: str) -> None:
    line = Line()
    gradient = line.gradient()
    found = [line.step(gradient, HALVES) for _ in range(12)]
    assert all(count >= k for counts in found[5:] for count, k in zip(counts, COUNTS, strict=True))


def test_after_a_change_of_scale_it_finds_its_way_back(name: str) -> None:
    line = Line()
    for scale in (1.0, 0.01, 100.0):
        found = [line.step(line.gradient(scale), HALVES) for _ in range(15)]
        assert sum(count < 0 for counts in found[5:] for count in counts) <= 2


def test_spare_entries_are_listed_where_they_are_asked_for(name: str) -> None:
    looked = {}
    for spare in (1.0, 1.5):
        line, found = Line(), []
        with patch("spardl.vector.candidates.finder_for", lambda values, line=line: line.watched):
            for _ in range(40):
                line.candidates.add(line.memory, line.gradient())
                line.memory[line.candidates.largest(line.memory, [Range(0, LENGTH, 600)], [], spare)] = 0
                found.append(int(line.watched.said[-1].looked[0]))
        looked[spare] = found[20:]
    assert all(600 <= count < 1000 for count in looked[1.0])
    assert sum(looked[1.5]) > 1.25 * sum(looked[1.0])


SCALES = {
    "growing": [1.1**step for step in range(30)],
    "shrinking at once": [1.0 if step < 12 else 0.01 for step in range(30)],
    "growing at once": [1.0 if step < 12 else 100.0 for step in range(30)],
    "turned off and on": [float(step % 7 != 3) for step in range(30)],
    "nothing but zeros": [0.0] * 30,
}


@pytest.mark.parametrize("dtype", some_quick(DTYPES, 2), ids=str)
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_exact_whatever_the_gradients(name: str, scales: list[float], dtype: torch.dtype) -> None:
    line = Line(1500, dtype)
    for scale in scales:
        line.step(line.gradient(scale), [[Range(0, 700, 7), Range(900, 1500, 6)], [Range(700, 900, 2)]])


def test_steps_without_a_gradient_or_a_selection(name: str) -> None:
    """Skipped gradients and dense steps select nothing: statistics are dropped or kept."""
    line = Line()
    for step in range(30):
        found = line.step(None if step % 5 == 4 else line.gradient(), HALVES if step % 7 else [])
        assert len(found) == (3 if step % 7 else 0)


def test_parts_and_counts_that_change(name: str) -> None:
    line = Line(1000)
    turns = [
        [[Range(0, 500, 5)], [Range(500, 1000, 5)]],
        [[Range(0, 500, 50)], [Range(500, 1000, 1)]],
        [[Range(500, 1000, 0), Range(0, 500, 500)]],
        [[Range(0, 300, 3), Range(300, 999, 9)], [Range(999, 1000, 1)]],
        [[Range(0, 500, 5)], [Range(0, 500, 9)], [Range(250, 750, 5), Range(750, 1000, 2)]],
        [[Range(0, 1000, 10)]],
    ]
    for step in range(30):
        line.step(line.gradient(), turns[step * 5 // 3 % len(turns)])


@hypothesis_settings(max_examples=30)
@given(data=st.data(), name=st.sampled_from(PATHS), dtype=st.sampled_from(DTYPES))
def test_exact_over_any_steps(data: st.DataObject, name: str, dtype: torch.dtype) -> None:
    with patch.dict("os.environ", SPARDL_KERNELS=name):
        line = Line(data.draw(st.integers(2, 300)), dtype)
        for _ in range(6):
            borders = [0, *sorted(data.draw(st.sets(st.integers(1, len(line.memory) - 1), max_size=3)))]
            stops = [*borders[1:], len(line.memory)]
            ks = [data.draw(st.integers(0, stop - start)) for start, stop in zip(borders, stops, strict=True)]
            parts = [Range(*three) for three in zip(borders, stops, ks, strict=True)]
            gradient = data.draw(st.sampled_from([0.0, 1e-3, 1.0, 1e3, None]))
            turn = data.draw(st.integers(0, len(parts) - 1))
            line.step(None if gradient is None else line.gradient(gradient), [parts[turn:], parts[:turn]])


def test_nothing_to_select_from() -> None:
    candidates, nothing = Candidates(), torch.zeros(0)
    candidates.add(nothing, nothing)
    assert candidates.largest(nothing, [], []).tolist() == []
    found = candidates.largest(nothing, [Range(0, 0, 0)], [])
    assert (found.tolist(), found.dtype) == ([], torch.int64)
    candidates.add(nothing, None)


DTYPES_of_magnitudes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = st.sampled_from([0.0, -0.0, 6e-8, -6e-8, 1.0, -1.0, 1.0078125, -2.0, 6.5e4, float("inf"), -float("inf")])


@pytest.mark.parametrize("dtype", DTYPES_of_magnitudes, ids=str)
@given(numbers=st.lists(NUMBERS, max_size=40), bound=NUMBERS.map(abs))
def test_what_reaches_a_bound_is_what_torch_finds(dtype: torch.dtype, numbers: list[float], bound: float) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    before = values.clone()
    found = positions_reaching(values, bound)
    assert found.dtype is torch.int64
    assert found.tolist() == (values.abs() >= values.new_tensor(bound)).nonzero().squeeze(1).tolist()
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", DTYPES_of_magnitudes, ids=str)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
def test_the_kth_largest(dtype: torch.dtype, numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    before = values.clone()
    k = data.draw(st.integers(1, len(numbers)))
    found = kth_largest(values, k)
    assert (found.dtype, found.shape) == (dtype, ())
    assert float(found) == sorted(values.abs().double().tolist(), reverse=True)[k - 1]
    assert torch.equal(values, before)


numbers = st.lists(st.floats(-1e150, 1e150, allow_nan=False), min_size=1, max_size=40)


def norm(values: torch.Tensor, cut: int = 0) -> float:
    parts = [values[:cut], values[cut:]]
    peak = largest_magnitude(parts)
    return norm_of(sum(sum_of_squares([part], peak, len(values)) for part in parts), peak, len(values))


@given(numbers, st.integers(0, 40))
def test_any_cut_gives_the_same_bits(values: list[float], cut: int) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    assert norm(vector, cut) == norm(vector)
    assert norm(vector.flip(0)) == norm(vector)


@given(numbers)
def test_it_is_the_norm(values: list[float]) -> None:
    assert norm(torch.tensor(values, dtype=torch.float64)) == pytest.approx(math.hypot(*values), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_vectors(dtype: torch.dtype) -> None:
    vector = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert norm(vector, 1_234_567) == norm(vector)
    assert norm(vector) == pytest.approx(float(vector.double().norm()), rel=1e-12)


@pytest.mark.parametrize("size", [-1060, -1023, -700, -301, -2, 0, 1, 300, 511, 1000])
def test_squares_are_rounded_to_the_bit(size: int) -> None:
    """To multiples of one power of two; saved runs have factors that rest on it."""
    values = [math.ldexp(each, size) for each in torch.randn(99, generator=torch.Generator().manual_seed(7)).tolist()]
    peak = max(map(abs, values))
    scale = -_exponent(peak, 1000)
    rounded = [round(math.ldexp(math.ldexp(each, scale // 2) ** 2, scale % 2)) for each in values]
    vector = torch.tensor(values, dtype=torch.float64)
    assert sum_of_squares([vector], peak, 1000) == sum(rounded) > 2**40
    assert vector.tolist() == values


def test_what_is_not_finite() -> None:
    assert math.isnan(norm_of(0, largest_magnitude([torch.tensor([1.0, math.nan]), torch.tensor([math.inf])]), 3))
    assert norm_of(0, largest_magnitude([torch.tensor([-math.inf]), torch.empty(0)]), 1) == math.inf
    assert norm_of(0, largest_magnitude([torch.empty(0)]), 0) == 0


def test_the_factor_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for scale in (0.1, 1.0, 30.0, math.inf):
        parameter.grad = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64) * scale
        ours = parameter.grad * clip_factor(3.0 * scale, 2.0)
        torch.nn.utils.clip_grad_norm_([parameter], 2.0)
        torch.testing.assert_close(ours, parameter.grad, equal_nan=True)
    assert math.isnan(clip_factor(math.nan, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 5, 20_000])
@pytest.mark.parametrize("odd", [0.0, math.inf, math.nan])
def test_division_tells_what_was_largest(dtype: torch.dtype, length: int, odd: float) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
    if length and odd:
        values[-1] = odd
    quotients, peak = values / 3, largest_magnitude([values])
    assert divide(values, 3) == pytest.approx(peak, rel=0, nan_ok=True)
    assert torch.equal(values.nan_to_num(7), quotients.nan_to_num(7))
