"""Exact top-k and its rule for ties, compiled and portable; of a whole vector, and of ranges with lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector import selection
from spardl.vector.layout import Range
from spardl.vector.selection import CompiledFinder, Finder, ListingRanges, PortableFinder, finder_for, reaching, top_k
from tests.support.harness import same_bits

VALUES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0]), max_size=30)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PATHS = ["compiled", "portable"]
INFINITY = float("inf")


@pytest.mark.parametrize("name", PATHS)
@given(VALUES, st.integers(-2, 40))
def test_largest_first_then_lowest_index(name: str, values: list[float], k: int) -> None:
    wanted = sorted(range(len(values)), key=lambda position: (-abs(values[position]), position))[: max(k, 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARDL_KERNELS", name)
        assert top_k(torch.tensor(values), k).tolist() == sorted(wanted)


@pytest.mark.parametrize("k", [0, 1, 2, 19, 39, 40])
def test_on_cuda_the_least_of_the_largest_is_found_otherwise(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-6, 7, (40,), generator=torch.Generator().manual_seed(k)) / 2

    def chosen() -> Tensor:
        return PortableFinder().largest(values, [Range(0, 40, k)], []).positions

    wanted = chosen()
    monkeypatch.setattr(selection, "_kth_largest", selection._least_of_top)
    assert torch.equal(chosen(), wanted)


@given(st.integers(1, 500), st.integers(0, 2**31))
def test_agrees_with_torch(length: int, seed: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = values.clone()
    k = 1 + seed % length
    assert top_k(values, k).tolist() == values.abs().topk(k).indices.sort().values.tolist()
    assert torch.equal(values, before)


def test_infinities_do_not_break_it() -> None:
    assert top_k(torch.tensor([1.0, INFINITY, 2.0, -INFINITY]), 2).tolist() == [1, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_environment_chooses_the_finder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    values = torch.zeros(1, dtype=dtype)
    assert type(finder_for(values)) is CompiledFinder
    monkeypatch.setenv("SPARDL_KERNELS", "portable")
    assert type(finder_for(values)) is PortableFinder


def test_float16_is_added_up_compiled_where_the_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("spardl.vector.kernels.words.adds_halves", lambda: False)
    assert type(finder_for(torch.zeros(1, dtype=torch.float16))) is PortableFinder
    assert type(finder_for(torch.zeros(1, dtype=torch.bfloat16))) is CompiledFinder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_types_are_added_up_as_torch_does(dtype: torch.dtype) -> None:
    """Every number up to the largest finite one, plus some of all magnitudes; includes infinite sums."""
    pytest.importorskip("numba")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    nothing = ListingRanges(*(np.empty(0, np.int64),) * 2, torch.empty(0, dtype=dtype), np.empty(0, np.int64))
    for other in every[::997]:
        values, gradient = every.clone(), other.expand_as(every).clone()
        CompiledFinder(dtype).add(values, gradient, nothing)
        assert same_bits(values, every + other)


@pytest.mark.parametrize("block", [1 << 17, 1])
def test_what_reaches_a_bound(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.vector.rows._BLOCK", block)
    values = torch.tensor([9.0, 1.0, -2.0, 2.0, -0.0, -INFINITY, 9.0])
    assert reaching(values, 1, 6, 2.0).tolist() == [2, 3, 5]
    assert reaching(values, 1, 6, 0.0).tolist() == [1, 2, 3, 4, 5]
    assert reaching(values, 3, 3, 0.0).tolist() == []
    assert reaching(values, 1, 6, 2.0).dtype is reaching(values, 3, 3, 0.0).dtype is torch.int64


@dataclass
class Case:
    """A vector to select from, and the operations of one step.

    Attributes:
        memory: shape (n,).
        gradient: shape (n,), or none.
        clear: whether it is to become zero.
        ranges: to list.
        touched: Increasing positions, and their new entries.
        parts: to select from.
    """

    memory: Tensor
    gradient: Tensor | None
    clear: bool
    ranges: ListingRanges
    touched: list[tuple[Tensor, Tensor]]
    parts: list[Range]


NUMBERS = {
    torch.float32: [1e-45, -3e-42, 1.1754943508222875e-38, 3.4e38],
    torch.float64: [5e-324, -1e-310, 2.2250738585072014e-308, 1.7e308],
    torch.bfloat16: [9.2e-41, -1e-39, 1.1754943508222875e-38, 3.3e38],
    torch.float16: [6e-8, -1e-6, 6.103515625e-5, 6.5e4],
}
COMMON = [0.0, -0.0, 1.0, -1.0, 1.0078125, -2.0, 0.25, 1e-6]


@st.composite
def vectors(draw: st.DrawFn, dtype: torch.dtype, length: int, infinite: bool = False) -> Tensor:
    """Chosen ties, zeros and subnormals; or many entries of any magnitude; or equal entries."""
    if not length:
        return torch.empty(0, dtype=dtype)
    numbers = [*COMMON, *NUMBERS[dtype], *([INFINITY, -INFINITY] if infinite else [])]
    source = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["few", "many", "equal"]))
    if kind == "equal":
        return torch.full((length,), draw(st.sampled_from(numbers)), dtype=dtype)
    if kind == "few":
        some = draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=8))
        return torch.tensor(some, dtype=dtype)[source.integers(len(some), size=length)]
    spread = source.normal(size=length) * 10.0 ** draw(st.integers(-42, 30))
    most = torch.finfo(dtype).max
    return torch.tensor(spread).clamp(-most, most).to(dtype)


@st.composite
def cut(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Ranges that do not overlap, in order; there may be gaps, but no empty ones."""
    borders = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    return [pair for pair in pairwise(borders) if draw(st.integers(0, 4))]


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    length = draw(st.integers(0, 40) | st.integers(41, 400))
    memory = draw(vectors(dtype, length, infinite=True))
    # Infinities of both signs do not meet.
    gradient = draw(st.none() | vectors(dtype, length))
    pairs = draw(cut(length))
    total = memory if gradient is None else memory + gradient
    levels = [level for level in total.abs().double().tolist() if 0 < level < INFINITY] or [1.0]
    factor = draw(st.sampled_from([0.1, 0.9, 1.0, 1.5]))
    bounds = torch.tensor([factor * draw(st.sampled_from(levels)) for _ in pairs], dtype=torch.float64).to(dtype)
    bounds = bounds.clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    capacities = [draw(st.sampled_from([0, 3, 40, 500])) for _ in pairs]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    ranges = ListingRanges(table[:, 0].copy(), table[:, 1].copy(), bounds, np.array(capacities, np.int64))
    touched = []
    if length:
        for positions in draw(st.lists(st.sets(st.integers(0, length - 1), max_size=30), max_size=3)):
            new = draw(vectors(dtype, len(positions), infinite=True))
            touched.append((torch.tensor(sorted(positions), dtype=torch.int64), new))
    others = pairs if draw(st.booleans()) else draw(cut(length))
    parts = [Range(*pair, draw(st.integers(0, pair[1] - pair[0]))) for pair in others]
    return Case(memory, gradient, draw(st.booleans()), ranges, touched, parts[::-1] if draw(st.booleans()) else parts)


def exact(values: Tensor, parts: Sequence[Range]) -> list[int]:
    """By a stable sort of each range."""
    found = []
    for start, stop, k in parts:
        magnitude = -np.abs(values[start:stop].double().numpy())
        found += sorted((np.argsort(magnitude, kind="stable")[:k] + start).tolist())
    return found


def run(finder: Finder, case: Case) -> tuple[Tensor, dict[tuple[int, int], int]]:
    """A step of one finder, from adding to selecting: the vector that it selects from, and how many it listed."""
    values = case.memory.clone()
    gradient = None if case.gradient is None else case.gradient.clone()
    counts = finder.add(values, gradient, case.ranges, clear=case.clear).tolist()
    if gradient is not None and case.gradient is not None:
        assert same_bits(gradient, torch.zeros_like(gradient) if case.clear else case.gradient)
    check_counts(values, case.ranges, counts)
    for positions, new in case.touched:
        values[positions] = new
    pairs = zip(case.ranges.starts.tolist(), case.ranges.stops.tolist(), strict=True)
    return values, dict(zip(pairs, counts, strict=True))


def check_counts(values: Tensor, ranges: ListingRanges, counts: list[int]) -> None:
    """Either all entries that reach the bound are listed, or the list is dropped."""
    for start, stop, bound, capacity, count in zip(*ranges, counts, strict=True):
        reached = int((values[start:stop].abs() >= bound).sum())
        assert count in (-1, reached)
        assert count >= 0 or reached > capacity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis_settings(max_examples=120)
@given(data=st.data())
def test_both_finders_are_exact_and_alike(dtype: torch.dtype, data: st.DataObject) -> None:
    pytest.importorskip("numba")
    case = data.draw(cases(dtype))
    touched = [positions for positions, _ in case.touched]
    compiled, portable = CompiledFinder(dtype), PortableFinder()
    # A finder has a past: capacities of lists, and lists, that must not matter.
    compiled.add(case.memory.clone(), None, case.ranges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spardl.vector.rows._BLOCK", data.draw(st.sampled_from([7, 1 << 17])))
        (values, listed), (reference, _) = run(compiled, case), run(portable, case)
    assert same_bits(values, reference)
    if not case.parts:
        return
    found, other = (finder.largest(values, case.parts, touched) for finder in (compiled, portable))
    assert found.positions.dtype is other.positions.dtype is torch.int64
    assert found.positions.tolist() == other.positions.tolist() == exact(values, case.parts)
    assert same_bits(values, reference)
    check_cuts(values, case.parts, found.positions, found.cuts)
    check_cuts(values, case.parts, other.positions, other.cuts)
    # They may look at less or more: k of 0 or all needs no search, and only the compiled one may exceed a capacity.
    for part, looked, others in zip(case.parts, found.looked, other.looked, strict=True):
        if listed.get(part[:2], -1) >= 0 and 0 < part.k < part.stop - part.start:
            assert looked == others
        else:
            assert looked == -1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis_settings(max_examples=120)
@given(data=st.data())
def test_entries_above_bound_from_list_or_vector(dtype: torch.dtype, data: st.DataObject) -> None:
    """The same from both finders: below the list's bound and above, with entries that changed, and with too many."""
    pytest.importorskip("numba")
    case = data.draw(cases(dtype))
    touched = [positions for positions, _ in case.touched]
    compiled, portable = CompiledFinder(dtype), PortableFinder()
    (values, _), (reference, _) = run(compiled, case), run(portable, case)
    levels = [
        level for level in [*values.abs().double().tolist(), *case.ranges.bounds.tolist()] if 0 < level < INFINITY
    ]
    for part in [*case.parts, *(Range(*pair, 0) for pair in zip(*case.ranges[:2], strict=True))]:
        bound = data.draw(st.sampled_from(levels or [1.0])) * data.draw(st.sampled_from([0.5, 1.0, 1.0001]))
        expected = (values[part.start : part.stop].abs() >= bound).nonzero().squeeze(1) + part.start
        most = data.draw(st.sampled_from([0, 3, len(expected), 500]))
        for finder, vector in ((compiled, values), (portable, reference)):
            found = finder.reaching(vector, part, bound, most, touched)
            assert (found is None) == (len(expected) > most)
            assert found is None or (found.dtype, found.tolist()) == (torch.int64, expected.tolist())


@pytest.mark.parametrize("name", PATHS)
def test_a_list_is_asked_before_the_vector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_KERNELS", name)
    values, one = torch.tensor([5.0, 1.0, -4.0, 2.0, 3.0]), np.ones(1, np.int64)
    finder = finder_for(values)
    finder.add(values, None, ListingRanges(0 * one, 5 * one, torch.tensor([3.0]), 500 * one))
    monkeypatch.setattr(selection, "reaching", None)
    whole = Range(0, 5, 0)
    found = finder.reaching(values, whole, 4.0, 5, [])
    assert found is not None
    assert found.tolist() == [0, 2]
    # More than two are listed, so more than two reach less.
    assert finder.reaching(values, whole, 1.0, 2, []) is None
    with pytest.raises(TypeError):
        finder.reaching(values, whole, 1.0, 3, [])
    with pytest.raises(TypeError):
        finder.reaching(values, whole, 4.0, 5, [torch.tensor([1])])


def check_cuts(values: Tensor, parts: Sequence[Range], positions: Tensor, cuts: Tensor) -> None:
    assert cuts.dtype is values.dtype
    begin = 0
    for (start, stop, k), level in zip(parts, cuts, strict=True):
        chosen = torch.zeros(stop - start, dtype=torch.bool)
        chosen[positions[begin : begin + k] - start] = True
        begin += k
        magnitude = values[start:stop].abs()
        if 0 < k < stop - start:
            assert bool((magnitude[chosen] >= level).all())
            assert bool((magnitude[~chosen] <= level).all())
        else:
            assert level == 0


def listing(starts: list[int], stops: list[int], bounds: list[float], capacities: list[int]) -> ListingRanges:
    return ListingRanges(
        np.array(starts, np.int64), np.array(stops, np.int64), torch.tensor(bounds), np.array(capacities, np.int64)
    )


@pytest.mark.parametrize("name", PATHS)
def test_looks_at_what_is_listed_or_touched_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries changed behind its back are not seen, and one range's list is not another's."""
    monkeypatch.setenv("SPARDL_KERNELS", name)
    values = torch.zeros(400)
    values[[10, 20, 30, 150, 399]] = torch.tensor([5.0, -4.0, 3.0, 9.0, -9.0])
    gradient = torch.zeros(400)
    gradient[40] = 6.0
    finder = finder_for(values)
    parts = [Range(0, 100, 2), Range(100, 400, 2), Range(0, 400, 1)]
    counts = finder.add(values, gradient, listing([0, 100], [100, 400], [2.0, 8.0], [72, 72]))
    assert counts.tolist() == [4, 2]
    values[50] = 100.0
    found = finder.largest(values, parts, [])
    assert found.positions.tolist() == [10, 40, 150, 399, 50]
    assert found.looked.tolist() == [4, 2, -1]
    # Changed positions come in two sequences, one of which crosses ranges; entry 20 fell below the bound.
    values[20] = 1.0
    found = finder.largest(values, parts, [torch.tensor([50]), torch.tensor([20, 50, 200])])
    assert found.positions.tolist() == [40, 50, 150, 399, 50]
    assert found.looked.tolist() == [4, 2, -1]
    # With too few left it looks at all.
    values[[10, 40]] = 0
    found = finder.largest(values, [Range(0, 100, 3)], [torch.tensor([10, 20, 40, 50])])
    assert (found.positions.tolist(), found.looked.tolist()) == ([20, 30, 50], [-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PATHS)
def test_the_cut_is_close_where_all_that_is_listed_is_chosen(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the next bounds are made of."""
    monkeypatch.setenv("SPARDL_KERNELS", name)
    values = torch.linspace(1, 2, 1001, dtype=dtype)
    finder = finder_for(values)
    finder.add(values, None, listing([0], [1001], [1.9], [300])._replace(bounds=torch.tensor([1.8999], dtype=dtype)))
    found = finder.largest(values, [Range(0, 1001, 101)], [])
    assert found.looked.tolist() == [101]
    assert 1.8995 <= found.cuts.item() <= 1.9001


def test_a_list_that_exceeds_its_capacity_is_given_up_alone() -> None:
    pytest.importorskip("numba")
    finder, values = CompiledFinder(torch.float32), torch.arange(1.0, 301.0)
    counts = finder.add(values, None, listing([0, 100, 200], [100, 200, 300], [1.0, 190.0, 250.0], [99, 64, 64]))
    assert counts.tolist() == [-1, 11, 51]
    found = finder.largest(values, [Range(0, 100, 1), Range(100, 200, 1), Range(200, 300, 1)], [])
    assert (found.positions.tolist(), found.looked.tolist()) == ([99, 199, 299], [-1, 11, 51])
    # The next lists are not longer for it.
    finder.add(values, None, listing([0, 100], [100, 300], [90.0, 290.0], [64, 64]))
    assert finder.largest(values, [Range(0, 100, 1), Range(100, 300, 1)], []).looked.tolist() == [11, 11]


@pytest.mark.parametrize("lowest", [0, 120])
def test_sums_of_bfloat16_are_rounded_as_by_torch(lowest: int) -> None:
    """To the nearest, ties to even: numbers of all sizes, and of sizes so near that there are many ties."""
    pytest.importorskip("numba")
    source, size = np.random.default_rng(1), 100_000
    exponents = source.integers(lowest, 255 - lowest, size=(2, size))
    bits = source.integers(2, size=(2, size)) << 15 | exponents << 7 | source.integers(128, size=(2, size))
    memory, gradient = torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)
    expected = memory + gradient
    CompiledFinder(torch.bfloat16).add(memory, gradient, listing([], [], [], [])._replace(bounds=memory[:0]))
    assert same_bits(memory, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_ranges(dtype: torch.dtype) -> None:
    """More than a block of the portable finder, and all digits of the compiled one's keys."""
    pytest.importorskip("numba")
    length = 300_000
    source = torch.Generator().manual_seed(1)
    gradient = torch.randn(length, generator=source).to(dtype)
    parts = [Range(7, 200_000, 2000), Range(200_000, length, 1)]
    ranges = listing([7, 200_000], [200_000, length], [2.5, 2.5], [8000, 8000])
    ranges = ranges._replace(bounds=ranges.bounds.to(dtype))
    for finder in (CompiledFinder(dtype), PortableFinder()):
        values = torch.zeros(length, dtype=dtype)
        finder.add(values, gradient, ranges)
        assert same_bits(values, gradient + 0)
        found = finder.largest(values, parts, [])
        assert found.positions.tolist() == exact(values, parts)
        assert all(2000 <= looked < 4000 for looked in found.looked[:1])
        unlisted = finder.largest(values, [Range(0, length, 3000)], [])
        assert unlisted.positions.tolist() == exact(values, [Range(0, length, 3000)])
        assert unlisted.looked.tolist() == [-1]
