"""Stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector.levels import round_stochastically


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_draws_together_make_the_value(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every draw from {0, 1/64, ..., 63/64} once, the mean of the results is the value, exactly."""
    values = torch.arange(-7 * 64, 7 * 64 + 1, dtype=dtype) / 64
    results = []
    for number in range(64):
        monkeypatch.setattr(
            torch, "rand", lambda shape, number=number, **kind: torch.full(shape, number / 64, dtype=dtype)
        )
        results.append(round_stochastically(values.clone(), torch.Generator()))
    assert torch.equal(torch.stack(results).mean(0), values)


@given(st.lists(st.floats(-127, 127, width=32), max_size=20), st.integers(0, 1000))
def test_a_neighbouring_whole_number(numbers: list[float], seed: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = round_stochastically(values.clone(), torch.Generator().manual_seed(seed))
    assert bool(((found == values.floor()) | (found == values.ceil())).all())


def test_zeros_and_levels_stay() -> None:
    """Not even the largest draw lifts an integer, however large."""
    values = torch.cat((torch.tensor([0.0, -0.0, 1.0, -1.0, -127.0]).repeat(10_000), torch.full((3_000_000,), 127.0)))
    assert torch.equal(round_stochastically(values.clone(), torch.Generator().manual_seed(0)), values)


def test_small_chances_are_chances() -> None:
    """2^-20 of 2^22 entries, beside a whole part that has no room for it in float32 and a draw."""
    values = torch.full((1 << 22,), 2.0**-20)
    lifted = int(round_stochastically(values, torch.Generator().manual_seed(1)).sum())
    assert 0 < lifted < 20


def test_the_draws_are_the_generators() -> None:
    values = torch.rand(1000)

    def rounded(seed: int) -> Tensor:
        return round_stochastically(values.clone(), torch.Generator().manual_seed(seed))

    assert torch.equal(rounded(1), rounded(1))
    assert not torch.equal(rounded(1), rounded(2))
