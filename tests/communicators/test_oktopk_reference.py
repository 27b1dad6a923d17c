"""Ok-Topk against a reference implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spardl.communicators import OkTopk
from spardl.compressors import ReusedThreshold
from spardl.vector.sparse import SparseVector
from tests.communicators.oktopk_cluster import PUBLISHED, WORKERS, alike, cluster, published
from tests.communicators.oktopk_reference import Reference
from tests.support.harness import context, same_bits

SHORT = {
    "every period": (ReusedThreshold(0.1, period=5), OkTopk(repartition_period=9, threshold_period=7)),
    "ahead of time": (ReusedThreshold(0.1, period=50), OkTopk(repartition_period=20, threshold_period=50)),
    "density falls": (
        ReusedThreshold(0.1, period=6, warmup_steps=40, warmup_density=1.0),
        OkTopk(repartition_period=8, threshold_period=9),
    ),
}


def compare(workers: int, parts: tuple[ReusedThreshold, OkTopk], length: int, steps: int, seed: int) -> Reference:
    """Compares the cluster with the reference, on gradients with ties, zeros, changes of scale and moving weight."""
    bench, reference = cluster(workers, length, *parts), Reference(workers, length, *parts)
    source = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 3, length, dtype=torch.float64)
    for step in range(steps):
        gradients = [vector * torch.exp(place * math.sin(step / 9)) for vector in alike(workers, length, source)]
        if step % 5 == 0:
            gradients = [(2 * vector).round() / 2 for vector in gradients]
        if step % 17 == 3:
            gradients[0] = torch.zeros_like(gradients[0])
        if 30 <= step < 34:
            gradients = [50 * vector for vector in gradients]
        k = parts[0].count(context(length, step=step))
        expected = reference.step([vector.tolist() for vector in gradients], k)
        averages = bench.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        assert isinstance(averages[0], SparseVector)
        assert torch.equal(averages[0].dense(), torch.tensor(expected, dtype=torch.float64)), step
        for state, residual in zip(bench.states, reference.residuals, strict=True):
            assert torch.equal(state.memory, torch.tensor(residual, dtype=torch.float64)), step
        state = bench.states[0].communication.state_dict()
        assert (state["borders"].tolist(), state["threshold"]) == (reference.borders, reference.threshold)
    return reference


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        (1, "ahead of time"),
        *((workers, "every period") for workers in WORKERS),
        (5, "ahead of time"),
        (3, "density falls"),
    ],
)
def test_equals_the_reference(workers: int, name: str) -> None:
    reference = compare(workers, SHORT[name], 50, 75, seed=workers)
    compressor, communicator = SHORT[name]
    assert reference.repartitions == -(-75 // communicator.repartition_period)
    if name == "ahead of time":
        assert reference.found["global"] > 2
        assert reference.found["local"] > 2 * workers
    else:
        assert reference.found["local"] >= workers * (75 // compressor.period)


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_the_reference_as_published(name: str) -> None:
    """With the published options, over all periods and without early evaluation."""
    workers = 4
    parts = published(f"oktopk_{name}")
    compressor = replace(parts["compressor"], density=0.15)
    reference = compare(workers, (compressor, parts["communicator"]), 40, 130, seed=workers)
    assert reference.repartitions == 3
    assert reference.found["local"] >= workers * (130 // compressor.period)
    assert min(reference.cut.values()) > 0


@given(st.integers(1, 9), st.integers(0, 25), st.floats(0.01, 1), st.sampled_from([None, 0, 4]), st.integers(0, 10**6))
@hypothesis_settings(max_examples=25)
def test_small_shapes(workers: int, length: int, density: float, factor: float | None, seed: int) -> None:
    """Fewer entries than workers, no entries, and all entries; balanced or not."""
    communicator = OkTopk(repartition_period=4, threshold_period=3, balance_factor=factor)
    compare(workers, (ReusedThreshold(density, period=3), communicator), length, 8, seed)
