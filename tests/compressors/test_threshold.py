"""A fixed threshold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather
from spardl.compressors import Threshold
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, context, selected, to_dense


@pytest.mark.parametrize("threshold", [-1, -1e-9, math.inf, math.nan, "abc", True, None])
def test_thresholds_that_make_no_sense(threshold: object) -> None:
    with pytest.raises(ConfigError, match="threshold must be a number, at least 0"):
        Threshold(threshold)


def chosen(threshold: float, values: list[float], k: int = 0, dtype: torch.dtype = torch.float32) -> list[int]:
    return selected(Threshold(threshold), torch.tensor(values, dtype=dtype), k)


def test_selects_what_is_large_enough() -> None:
    values = [1.0, -3.0, 2.0, 0.0, -1.9375, -0.0]
    assert chosen(2, values) == [1, 2]
    assert chosen(1.9375, values) == [1, 2, 4]
    assert chosen(4, values) == []
    assert chosen(1e-30, values) == [0, 1, 2, 4]
    assert chosen(0, values) == [0, 1, 2, 3, 4, 5]
    assert chosen(2, []) == []


def test_a_threshold_beyond_the_type_selects_nothing() -> None:
    assert chosen(1e300, [1.0, torch.finfo(torch.float32).max]) == []


@given(st.floats(0, 10), st.lists(st.floats(-10, 10), max_size=20), st.integers(0, 20))
def test_the_budget_does_not_matter(threshold: float, values: list[float], k: int) -> None:
    expected = [position for position, value in enumerate(values) if abs(value) >= threshold]
    assert chosen(threshold, values, k, torch.float64) == expected


def test_counts_nothing_beforehand() -> None:
    assert Threshold().count(context(70)) == 70
    assert Threshold().capacity(context(70)) is None


def test_a_threshold_of_zero_is_the_dense_average() -> None:
    gradients = [torch.randn(50, dtype=torch.float64) for _ in range(3)]
    bench = Bench.build(Method(Threshold(0), AllGather(), LocalResidual()), 3, 50)
    torch.testing.assert_close(to_dense(bench.step(gradients)[0]), torch.stack(gradients).mean(0))
    assert not bench.residuals().any()


def test_cost() -> None:
    """ceil(log2 P) rounds each for the counts and the entries; a word per count, two per entry."""
    bench = Bench.build(Method(Threshold(1), AllGather(), LocalResidual()), 4, 6)
    gradients = [torch.zeros(6, dtype=torch.float64) for _ in range(4)]
    for rank, gradient in enumerate(gradients):
        gradient[:rank] = 2.0
    (average, *_) = bench.step(gradients)
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == [0, 1, 2]
    assert average.values.tolist() == [1.5, 1.0, 0.5]
    # In Bruck's all-gather worker r hands on its own entries, and then those of r and r + 1.
    counts = [0, 1, 2, 3]
    for rank, ledger in enumerate(bench.cluster.ledgers):
        assert ledger.rounds == 4
        assert ledger.words == 3 + 2 * (2 * counts[rank] + counts[(rank + 1) % 4])


def test_what_is_too_small_gathers() -> None:
    bench = Bench.build(Method(Threshold(1), AllGather(), LocalResidual()), 1, 2)
    gradient = torch.tensor([0.375, 1.5], dtype=torch.float64)
    averages = [to_dense(bench.step([gradient])[0]).tolist() for _ in range(4)]
    assert averages == [[0, 1.5], [0, 1.5], [1.125, 1.5], [0, 1.5]]
