"""Exact top-k and its rule for ties."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.selection import top_k

VALUES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0]), max_size=30)


@given(VALUES, st.integers(-2, 40))
def test_largest_first_then_lowest_index(values: list[float], k: int) -> None:
    wanted = sorted(range(len(values)), key=lambda position: (-abs(values[position]), position))[: max(k, 0)]
    assert top_k(torch.tensor(values), k).tolist() == sorted(wanted)


@given(st.integers(1, 500), st.integers(0, 2**31))
def test_agrees_with_torch(length: int, seed: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = values.clone()
    k = 1 + seed % length
    assert top_k(values, k).tolist() == values.abs().topk(k).indices.sort().values.tolist()
    assert torch.equal(values, before)


def test_infinities_do_not_break_it() -> None:
    assert top_k(torch.tensor([1.0, float("inf"), 2.0, float("-inf")]), 2).tolist() == [1, 3]
