"""Selection by a sampled threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.compressors import SampledTopK
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.layout import Layout
from spardl.vector.selection import top_k


def choose(compressor: SampledTopK, values: Tensor, k: int, step: int = 0, rank: int = 0) -> Tensor:
    context = Context(Worker(rank, 4), Layout.flat(values.numel()), step)
    return compressor.choose(values, k, 0, context, State())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("density", 2),
        ("sample_ratio", 0),
        ("sample_ratio", 1.1),
        ("sample_ratio", "a"),
        ("least_sample", 0),
        ("least_sample", 1.5),
        ("lowerings", -1),
        ("low", -0.1),
        ("low", 1.1),
        ("factor", 0),
        ("factor", 1),
    ],
)
def test_values_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{field} must be"):
        SampledTopK(**{field: value})


@given(
    length=st.integers(1, 300),
    share=st.floats(0, 1),
    step=st.integers(0, 5),
    least=st.integers(1, 400),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
)
def test_at_most_k_of_the_largest(length: int, share: float, step: int, least: int, seed: int, ties: bool) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if ties:
        values = values.round()
    k = max(1, round(share * length))
    positions = choose(SampledTopK(least_sample=least), values, k, step)
    assert 1 <= len(positions) <= k
    assert positions.tolist() == sorted(set(positions.tolist()))
    exact = top_k(values, len(positions))
    assert torch.equal(positions, exact)
    if k == length or length < 2 * least:
        assert len(positions) == k


def test_a_sample_is_as_good_as_it_is_large() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    k = 2000
    for step in range(20):
        assert 0.8 * k <= len(choose(SampledTopK(), values, k, step)) <= k


def test_too_high_a_threshold_is_lowered() -> None:
    """Every fourth entry is large; a sample that starts there sees nothing else."""
    values = torch.ones(64)
    values[::4] = 2 + torch.rand(16, generator=torch.Generator().manual_seed(0))
    unlucky = SampledTopK(least_sample=16, lowerings=0)
    counts = [len(choose(unlucky, values, 24, step)) for step in range(20)]
    assert min(counts) < 0.8 * 24
    assert max(counts) == 24
    for step in range(20):
        assert len(choose(SampledTopK(least_sample=16, lowerings=20), values, 24, step)) == 24


def test_the_sample_moves_from_step_to_step() -> None:
    """Equally on all workers, and evenly."""
    compressor = SampledTopK(least_sample=10)
    values = torch.zeros(40)
    values[2::4] = 1.0
    values[::4] = 2.0
    found = [tuple(choose(compressor, values, 12, step, rank).tolist()) for step in range(400) for rank in (0, 3)]
    assert found[::2] == found[1::2]
    contexts = [Context(Worker(0, 1), Layout.flat(40), step) for step in range(400)]
    starts = torch.tensor([compressor._start(4, 0, context) for context in contexts])
    counts = starts.bincount(minlength=4)
    # Chi-squared with 3 degrees of freedom: 16.3 is exceeded once in 1000 times.
    assert float(((counts - 100.0) ** 2 / 100).sum()) < 16.3


def test_zeros() -> None:
    assert choose(SampledTopK(least_sample=4), torch.zeros(50), 5).tolist() == [0, 1, 2, 3, 4]
    sparse = torch.zeros(50)
    sparse[[7, 30]] = 1.0
    assert {7, 30} <= set(choose(SampledTopK(least_sample=4), sparse, 5).tolist())


def test_density_one_is_everything() -> None:
    assert choose(SampledTopK(1.0, least_sample=2), torch.randn(20), 20).tolist() == list(range(20))
