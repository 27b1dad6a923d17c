"""Sorted sparse vectors: cut, merged, put end to end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.sparse import SparseVector, concatenate, merge
from tests.support.harness import same_bits


@st.composite
def sparse_vectors(draw: st.DrawFn, length: int) -> SparseVector:
    indices = sorted(draw(st.sets(st.integers(0, max(0, length - 1)), max_size=length))) if length else []
    values = draw(st.lists(st.integers(-8, 8), min_size=len(indices), max_size=len(indices)))
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float64), length)


def is_sorted(vector: SparseVector) -> bool:
    return bool((vector.indices[1:] > vector.indices[:-1]).all())


@given(st.data(), st.integers(0, 20), st.integers(1, 5))
def test_merge_adds_up(data: st.DataObject, length: int, count: int) -> None:
    vectors = [data.draw(sparse_vectors(length)) for _ in range(count)]
    merged = merge(vectors)
    assert is_sorted(merged)
    assert set(merged.indices.tolist()) == {index for vector in vectors for index in vector.indices.tolist()}
    assert torch.equal(merged.dense(), torch.stack([vector.dense() for vector in vectors]).sum(0))


def test_merge_adds_in_the_order_given() -> None:
    """Float additions do not commute over three terms: the order is part of the contract."""
    parts = [SparseVector(torch.tensor([0]), torch.tensor([value]), 1) for value in (1e8, -1e8, 1.0)]
    assert merge(parts).values.item() == 1.0
    assert merge([parts[2], parts[0], parts[1]]).values.item() == 0.0


@given(st.data(), st.integers(0, 20), st.integers(0, 25))
def test_top_splits_without_loss(data: st.DataObject, length: int, k: int) -> None:
    vector = data.draw(sparse_vectors(length))
    kept, dropped = vector.top(k)
    assert len(kept) == min(k, len(vector))
    assert same_bits(vector.largest(k), kept)
    assert is_sorted(kept)
    assert is_sorted(dropped)
    assert torch.equal(kept.dense() + dropped.dense(), vector.dense())
    if len(kept) and len(dropped):
        assert kept.values.abs().min() >= dropped.values.abs().max()


@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_concatenate_puts_blocks_end_to_end(data: st.DataObject, lengths: list[int]) -> None:
    blocks = [data.draw(sparse_vectors(length)) for length in lengths]
    whole = concatenate(blocks)
    assert is_sorted(whole)
    assert torch.equal(whole.dense(), torch.cat([block.dense() for block in blocks]))


def test_divided() -> None:
    vector = SparseVector(torch.tensor([1, 3]), torch.tensor([2.0, -6.0]), 5)
    assert same_bits(vector.divided(2), SparseVector(vector.indices, torch.tensor([1.0, -3.0]), 5))
