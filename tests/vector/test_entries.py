"""Single entries of a long vector: compiled and in torch, the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector import sparse
from tests.support.harness import same_bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
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
    """To the last bit, but for which NaN it is."""
    nan = one.isnan()
    assert one.dtype is other.dtype
    return torch.equal(nan, other.isnan()) and same_bits(one[~nan], other[~nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
