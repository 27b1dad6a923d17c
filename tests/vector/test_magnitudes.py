"""Magnitudes compared as integers, without compiled kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.rows import kth_largest, positions_reaching

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = st.sampled_from([0.0, -0.0, 6e-8, -6e-8, 1.0, -1.0, 1.0078125, -2.0, 6.5e4, float("inf"), -float("inf")])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(numbers=st.lists(NUMBERS, max_size=40), bound=NUMBERS.map(abs))
def test_what_reaches_a_bound_is_what_torch_finds(dtype: torch.dtype, numbers: list[float], bound: float) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    before = values.clone()
    found = positions_reaching(values, bound)
    assert found.dtype is torch.int64
    assert found.tolist() == (values.abs() >= values.new_tensor(bound)).nonzero().squeeze(1).tolist()
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
def test_the_kth_largest(dtype: torch.dtype, numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    before = values.clone()
    k = data.draw(st.integers(1, len(numbers)))
    found = kth_largest(values, k)
    assert (found.dtype, found.shape) == (dtype, ())
    assert float(found) == sorted(values.abs().double().tolist(), reverse=True)[k - 1]
    assert torch.equal(values, before)
