"""The norm that does not depend on the cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.norms import _exponent, clip_factor, divide, largest_magnitude, norm_of, sum_of_squares

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
