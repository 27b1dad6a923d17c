"""Layouts, flat gradients, and entries, positions and rows in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.vector import rows, sparse
from spardl.vector.flat import FlatGradient, write
from spardl.vector.layout import Layout, Range, Ranges
from spardl.vector.rows import in_rows, largest_of_rows, runs_of
from spardl.vector.selection import ListingRanges, PortableFinder
from spardl.vector.sparse import SparseVector, increasing, split, within
from tests.support.harness import same_bits
from tests.vector.test_selection import DTYPES, exact, vectors

WHOLE = Layout.of([(3, 4), (5,), (), (0,), (2, 3, 1)])


@pytest.mark.parametrize(
    ("start", "stop", "shapes"),
    [
        (0, 24, ((3, 4), (5,), (), (2, 3, 1))),
        (0, 12, ((3, 4),)),
        (2, 14, ((10, 1), (2,))),
        (15, 20, ((2,), (), (2, 1))),
        (7, 7, ()),
    ],
)
def test_a_part_keeps_the_kind_of_each_tensor(start: int, stop: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    part = WHOLE.part(start, stop)
    assert part.shapes == shapes
    assert part.length == stop - start
    assert part.part(0, 1).wholes in ((), (12,), (5,))


def test_a_piece_knows_how_large_its_tensor_is() -> None:
    assert WHOLE.wholes == (12, 5, 1, 0, 6)
    assert WHOLE.part(10, 15).part(1, 4).wholes == (12, 5)


def test_ranges_as_columns_are_the_same_ranges() -> None:
    parts = [Range(4, 9, 2), Range(9, 9, 0), Range(9, 12, 7), Range(0, 3, 1)]
    found = Ranges.of(parts)
    assert list(found) == parts
    assert (len(found), found[2], list(found[1:3])) == (4, parts[2], parts[1:3])
    assert Ranges.of(found) is found
    assert (found.length, found.wanted) == (11, 10)
    assert found.spans == [(4, 12), (0, 3)]
    assert list(found.sending) == [parts[0], Range(9, 12, 3), parts[3]]
    assert found.sending.sending is found.sending
    nothing = Ranges.of([])
    assert (list(nothing), nothing.length, nothing.spans) == ([], 0, [])


def test_backward_and_optimizer_share_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain.load_state_dict(model.state_dict())
    flat = FlatGradient(model.named_parameters())
    inputs = torch.randn(5, 3)
    for net in (model, plain):
        net(inputs).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert torch.equal(flat.vector, expected)
    write(2 * expected, flat.vector)
    assert all(torch.equal(p.grad, 2 * q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    write(SparseVector(torch.tensor([1]), torch.tensor([7.0]), expected.numel()), flat.vector)
    assert flat.vector.nonzero().flatten().tolist() == [1]
    flat.zero()
    assert not model[0].weight.grad.any()


def test_shared_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    flat = FlatGradient(model.named_parameters())
    assert flat.vector.numel() == 4
    model(torch.ones(1, 2)).sum().backward()
    assert flat.vector.any()


def test_layers_are_neighbours_of_one_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.MultiheadAttention(2, 1), nn.Linear(2, 2))
    model[3].weight = model[0].weight
    flat = FlatGradient(model.named_parameters())
    assert [(layer.name, layer.tensors, layer.entries) for layer in flat.layers] == [
        ("0", (0, 2), 8),
        ("2", (2, 4), 18),
        ("2.out_proj", (4, 6), 6),
        ("3", (6, 7), 2),
    ]
    assert flat.layer_of()[model[3].weight] == 0


def test_hidden_gradients_come_back() -> None:
    model = nn.Linear(2, 1)
    flat = FlatGradient(model.named_parameters())
    views = [parameter.grad for parameter in model.parameters()]
    with flat.hidden([model.bias]):
        assert model.bias.grad is None
        assert model.weight.grad is views[0]
    assert model.bias.grad is views[1]


def test_mixed_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"must share one dtype.*torch.float32 on cpu, torch.float64 on cpu"):
        FlatGradient(model.named_parameters())
    with pytest.raises(ConfigError, match="found no parameters"):
        FlatGradient([])


TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan"), 6e4, 1e-7]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[float], list[int], list[float]]:
    """A vector's entries, positions in any order, no two equal, and as many other values."""
    values = draw(st.lists(st.sampled_from(SPECIAL), max_size=30))
    positions = draw(st.lists(st.integers(0, len(values) - 1), unique=True)) if values else []
    size = len(positions)
    return values, positions, draw(st.lists(st.sampled_from(SPECIAL), min_size=size, max_size=size))


def both(patch: pytest.MonkeyPatch, call: str, values: Tensor, *arguments: Tensor) -> tuple[Tensor, Any]:
    """What one function leaves and returns on both paths, if that is the same."""
    found = []
    for name in ("compiled", "portable"):
        patch.setenv("SPARDL_KERNELS", name)
        own = values.clone()
        found.append((own, getattr(sparse, call)(own, *arguments)))
    (one, result), (other, same) = found
    assert same_numbers(one, other)
    assert as_bits(result) == as_bits(same)
    return one, result


def as_bits(result: Any) -> list[bytes]:
    """What a function returned, to compare; a peak of -0.0 is one of 0.0."""
    parts = result if isinstance(result, tuple) else [result]
    tensors = [torch.tensor([part]).abs() if isinstance(part, float) else part for part in parts if part is not None]
    return [b"".join(map(bits_of, tensor)) for tensor in tensors]


def peak_of(values: Tensor) -> float:
    """The largest magnitude, NaN if there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def bits_of(entry: Tensor) -> bytes:
    """To compare entries one by one; a NaN is like any other."""
    return (entry if not entry.isnan() else entry.new_tensor(float("nan"))).view(1).view(torch.uint8).numpy().tobytes()


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """To the last bit, except for which NaN it is."""
    nan = one.isnan()
    assert one.dtype is other.dtype
    return torch.equal(nan, other.isnan()) and same_bits(one[~nan], other[~nan])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@hypothesis_settings(max_examples=30)
@given(case=drawn())
def test_as_by_hand(dtype: torch.dtype, case: tuple[list[float], list[int], list[float]]) -> None:
    values, where, others = case
    vector, new = torch.tensor(values, dtype=dtype), torch.tensor(others, dtype=dtype)
    positions = torch.tensor(where, dtype=torch.int64)
    expected = torch.tensor([vector[place] for place in where], dtype=dtype)
    without, replaced, raised = (vector.clone() for _ in range(3))
    for place, value in zip(where, new, strict=True):
        without[place] = 0
        replaced[place] = value
        raised[place] = vector[place] + value
    with pytest.MonkeyPatch.context() as patch:
        left, found = both(patch, "gather", vector, positions)
        assert found is not None
        assert same_numbers(left, vector)
        assert same_numbers(found, expected)
        left, found = both(patch, "cut", vector, positions)
        assert found is not None
        assert same_numbers(left, without)
        assert same_numbers(found, expected)
        left, found = both(patch, "put", vector, positions, new)
        assert found is None
        assert same_numbers(left, replaced)
        left, (found, peak) = both(patch, "add", vector, positions, new)
        assert same_numbers(left, raised)
        assert same_numbers(found, expected)
        assert same_numbers(torch.tensor([peak]).abs(), torch.tensor([peak_of(new)]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("path", ["compiled", "portable"])
@given(st.lists(drawn(), min_size=1, max_size=3), st.sets(st.integers(0, 29)).map(sorted))
def test_changes_are_undone_but_for_some_positions(
    dtype: torch.dtype, path: str, cases: list[tuple[list[float], list[int], list[float]]], kept: list[int]
) -> None:
    first = torch.tensor(cases[0][0], dtype=dtype)
    length = first.numel()
    vector, expected, kept = first.clone(), first.clone(), [place for place in kept if place < length]
    changes = []
    for _, places, others in cases:
        pairs = [(place, other) for place, other in zip(places, others, strict=True) if place < length]
        positions = torch.tensor([place for place, _ in pairs], dtype=torch.int64)
        changes.append((positions, vector[positions]))
        vector[positions] = torch.tensor([other for _, other in pairs], dtype=dtype)
    expected[kept] = vector[kept]
    changed = {int(place) for positions, _ in changes for place in positions}
    staying = peak_of(vector[kept])
    touched = peak_of(vector[[place for place in kept if place in changed]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARDL_KERNELS", path)
        stayed = sparse.undo(vector, changes, torch.tensor(kept).long())
    assert same_numbers(vector, expected)
    assert in_order(touched) <= in_order(stayed) <= in_order(staying)


def in_order(magnitude: float) -> tuple[bool, float]:
    """To compare magnitudes; a NaN is above all numbers."""
    return math.isnan(magnitude), 0.0 if math.isnan(magnitude) else magnitude


def test_a_view_is_changed_in_place() -> None:
    """A residual is part of a longer vector."""
    whole = torch.arange(6.0)
    part, positions = whole[2:5], torch.tensor([2, 0])
    assert sparse.cut(part, positions).tolist() == [4.0, 2.0]
    before, peak = sparse.add(part, positions, torch.tensor([7.0, 8.0]))
    assert (before.tolist(), peak) == ([0.0, 0.0], 8.0)
    sparse.put(part, positions[:1], torch.tensor([9.0]))
    assert whole.tolist() == [0.0, 1.0, 8.0, 3.0, 9.0, 5.0]
    assert sparse.gather(part, positions).tolist() == [9.0, 8.0]


PATHS = ("compiled", "portable")
SOME = st.sets(st.integers(0, 40), max_size=30).map(sorted)
T = TypeVar("T")


def on_both_paths(work: Callable[[], T]) -> list[T]:
    found = []
    for path in PATHS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARDL_KERNELS", path)
            found.append(work())
    return found


def positions(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@given(SOME, SOME, st.integers(0, 40))
def test_within_others_even_around_the_end(own: list[int], others: list[int], turn: int) -> None:
    """Of blocks that go on at the beginning, positions fall once."""
    turned = own[turn:] + own[:turn]
    expected = [place for place, position in enumerate(turned) if position in others]
    for found in on_both_paths(lambda: within(positions(turned), positions(others))):
        assert (found.dtype, found.tolist()) == (torch.int64, expected)


@pytest.mark.parametrize("share", [1e-5, 0.01, 1.0])
def test_within_others_of_a_long_vector(share: float) -> None:
    """More than 255 windows, after which marks restart; the first run ends in the window where the second starts."""
    length, source = 300 << 15, torch.Generator().manual_seed(0)
    own, others = (torch.randint(length, (int(share * 1e6),), generator=source).unique() for _ in range(2))
    turned = torch.cat((own[own.numel() // 3 :], own[: own.numel() // 3]))
    expected = torch.isin(turned, others).nonzero().squeeze(1)
    for found in on_both_paths(lambda: within(turned, others)):
        assert torch.equal(found, expected)
    assert all(torch.equal(found, torch.arange(turned.numel())) for found in on_both_paths(lambda: within(turned, own)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@given(st.integers(0, 41), SOME)
def test_split_in_two(dtype: torch.dtype, length: int, places: list[int]) -> None:
    tensor, places = torch.arange(length).to(dtype), [place for place in places if place < length]
    others = [place for place in range(length) if place not in places]
    for chosen, rest in on_both_paths(lambda: split(tensor, positions(places))):
        assert chosen.dtype is rest.dtype is dtype
        assert (chosen.tolist(), rest.tolist()) == (places, others)


def test_increasing() -> None:
    assert all(increasing(positions(numbers)) for numbers in ([], [3], [0, 1, 7]))
    assert not any(increasing(positions(numbers)) for numbers in ([1, 1], [0, 7, 1], [7, 0, 1]))


def adjoining(start: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    borders = np.cumsum([start, *lengths])
    return borders[:-1], borders[1:]


def test_which_ranges_are_rows() -> None:
    starts, stops = adjoining(5, [3, *[4] * 8, 3, *[4] * 7, *[0] * 9])
    assert [slice_.stop - slice_.start for slice_ in runs_of(starts, stops)] == [1, 8, *[1] * 17]
    assert in_rows(starts, stops).tolist() == [False, *[True] * 8, *[False] * 17]
    assert runs_of(starts[:0], stops[:0]) == []
    # A gap parts them, and so does another length; long ones are no rows.
    starts, stops = np.arange(0, 200, 10), np.arange(0, 200, 10) + 9
    assert not in_rows(starts, stops).any()
    starts, stops = adjoining(0, [(1 << 14) + 1] * 8)
    assert not in_rows(starts, stops).any()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=6))
def test_runs_are_all_ranges_in_order(groups: list[tuple[int, int, bool]]) -> None:
    starts, stops, at = [], [], 0
    for length, count, gap in groups:
        at += gap
        for _ in range(count):
            starts.append(at)
            at += length
            stops.append(at)
    found = runs_of(np.array(starts, np.int64), np.array(stops, np.int64))
    assert [place for run in found for place in range(run.start, run.stop)] == list(range(len(starts)))
    for run in found:
        lengths = {stops[place] - starts[place] for place in range(run.start, run.stop)}
        if run.stop - run.start > 1:
            assert len(lengths) == 1
            assert all(stops[one] == starts[other] for one, other in pairwise(range(run.start, run.stop)))


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Tensor, list[Range]]:
    """Rows of a vector, which may begin before them and go on behind."""
    count, length = draw(st.integers(8, 20)), draw(st.integers(1, 12))
    before, behind = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    values = draw(vectors(dtype, before + count * length + behind, infinite=True))
    starts = [before + row * length for row in range(count)]
    return values, [Range(start, start + length, draw(st.integers(0, length))) for start in starts]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "as on cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_same_as_range_by_range(dtype: torch.dtype, elsewhere: bool, data: st.DataObject) -> None:
    values, parts = data.draw(matrices(dtype))
    before = values.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spardl.vector.rows._BLOCK", data.draw(st.sampled_from([7, 40, 1 << 17])))
        if elsewhere:
            patch.setattr(rows, "least_of_rows", rows._least_of_rows)
        positions, cuts = largest_of_rows(values, Ranges.of(parts))
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))
    assert positions.dtype is torch.int64
    assert positions.tolist() == exact(values, parts)
    assert cuts.dtype is dtype
    for (start, stop, k), cut in zip(parts, cuts.tolist(), strict=True):
        largest_first = sorted(values[start:stop].abs().tolist(), reverse=True)
        assert cut == (largest_first[k - 1] if 0 < k < stop - start else 0)


def test_a_finder_lists_nothing_of_rows_and_finds_their_largest() -> None:
    """Between ranges that it does list, with a gradient to add, and after entries were changed."""
    source = torch.Generator().manual_seed(1)
    values, gradient = torch.randn(200, generator=source), torch.randn(200, generator=source)
    total = values + gradient
    starts, stops = adjoining(0, [20, *[16] * 10, 20])
    finder = PortableFinder()
    bounds = torch.full((12,), 1.5)
    counts = finder.add(values, gradient, ListingRanges(starts, stops, bounds, np.full(12, 64)), clear=True)
    reached = [int((total[start:stop].abs() >= 1.5).sum()) for start, stop in zip(starts, stops, strict=True)]
    assert counts.tolist() == [reached[0], *[-1] * 10, reached[-1]]
    assert torch.equal(values, total)
    assert not gradient.any()
    values[100] = 9.0
    parts = [
        Range(int(start), int(stop), 1 + place % 2)
        for place, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]
    found = finder.largest(values, parts, [torch.tensor([100])])
    assert 100 in found.positions.tolist()
    assert found.positions.tolist() == exact(values, parts)
    assert found.looked.tolist() == [reached[0], *[-1] * 10, reached[-1]]
