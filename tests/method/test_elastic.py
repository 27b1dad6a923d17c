"""Redistribution of residuals: each entry goes to exactly one worker."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.method.elastic import owners, redistribute, sources
from spardl.protocol.programs import Worker

NUMBERS = st.integers(1, 12)


def redistributed(vectors: list[Tensor], now: int) -> list[Tensor]:
    """Residuals of all new workers."""
    found = []
    for rank in range(now):
        worker, into = Worker(rank, now), torch.full_like(vectors[0], 7)
        redistribute([vectors[old] for old in sources(worker, len(vectors))], worker, len(vectors), into)
        found.append(into)
    return found


@given(before=NUMBERS, now=NUMBERS)
def test_owners_and_sources_cover_all_workers(before: int, now: int) -> None:
    assert all(owners(old, before, now) for old in range(before))
    for rank in range(now):
        found = sources(Worker(rank, now), before)
        assert rank % before in found
        assert all(rank in owners(old, before, now) for old in found)


@given(before=NUMBERS, now=NUMBERS, length=st.integers(0, 30))
def test_sum_is_conserved(before: int, now: int, length: int) -> None:
    """Exactly, for integers: no entry is lost, doubled or moved."""
    generator = torch.Generator().manual_seed(before * 100 + now)
    vectors = list(torch.randint(-1000, 1000, (before, length), generator=generator).float())
    assert torch.equal(torch.stack(redistributed(vectors, now)).sum(0), torch.stack(vectors).sum(0))


@given(before=NUMBERS, more=st.integers(0, 8))
def test_joining_workers_round_no_entry(before: int, more: int) -> None:
    generator = torch.Generator().manual_seed(before)
    vectors = list(torch.randn(before, 23, generator=generator))
    entries = sorted(x for vector in redistributed(vectors, before + more) for x in vector[vector != 0].tolist())
    assert entries == sorted(x for vector in vectors for x in vector.tolist())


def test_same_world_size_changes_nothing() -> None:
    vectors = list(torch.randn(5, 7))
    assert all(torch.equal(new, old) for new, old in zip(redistributed(vectors, 5), vectors, strict=True))


def test_joining_workers_get_equal_parts() -> None:
    found = redistributed([torch.ones(12), torch.full((12,), 2.0)], 6)
    assert [vector.sum().item() for vector in found] == [4, 8, 4, 8, 4, 8]


def test_other_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a saved residual or moment must have 4 entries, got 3"):
        redistribute([torch.zeros(3)], Worker(0, 1), 1, torch.zeros(4))
