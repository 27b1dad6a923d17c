"""Random blocks: their places, and a slow, obvious model of the whole cluster to compare with."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.clusters import SimulatedCluster
from spardl.communicators import Dense
from spardl.compressors import RandomBlock
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, RescaledResidual
from spardl.protocol.programs import Context, Worker
from spardl.vector.layout import Layout
from tests.support.harness import NETWORK, Bench, run_method, to_dense

CPU = torch.device("cpu")


def at(step: int, layout: Layout, worker: Worker = Worker(0, 1)) -> Context:  # noqa: B008 - immutable
    return Context(worker, layout, step)


@pytest.mark.parametrize(("field", "value"), [("density", 0), ("scope", "all"), ("seed", 1.5), ("seed", True)])
def test_values_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{field} must be"):
        RandomBlock(**{field: value})


def reference(
    gradients: np.ndarray, memory: list[np.ndarray], shapes: list[int], starts: list[int], density: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One synchronization of all workers, layer by layer and entry by entry, as published.

    Returns:
        The average, and every worker's new memory.
    """
    inputs = [gradient + rest for gradient, rest in zip(gradients, memory, strict=True)]
    average, left = np.zeros(sum(shapes)), [vector.copy() for vector in inputs]
    borders = [0, *accumulate(shapes)]
    layers = [(begin, size) for begin, size in zip(borders[:-1], shapes, strict=True) if size]
    for (begin, size), start in zip(layers, starts, strict=True):
        for offset in range(max(1, round(density * size))):
            entry = begin + (start + offset) % size
            average[entry] = sum(vector[entry] for vector in inputs) / len(inputs)
            for vector in left:
                vector[entry] = 0
    return average, left


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_equals_the_reference(workers: int, scope: str) -> None:
    shapes, density = [40, 7, 0, 1, 90], 0.3
    layout = Layout.of([(size,) for size in shapes])
    compressor = RandomBlock(density, scope, seed=5)
    method = Method(compressor, Dense(), LocalResidual())
    states = [method.init_state(layout, torch.float64) for _ in range(workers)]
    cluster = SimulatedCluster(workers, NETWORK, count_local=False)
    source = np.random.default_rng(workers)
    memory = [np.zeros(layout.length) for _ in range(workers)]
    wrapped = 0
    for step in range(12):
        gradients = source.normal(size=(workers, layout.length))
        starts = compressor.starts(at(step, layout))
        parts = shapes if scope == "layer" else [sum(shapes)]
        wrapped += any(
            start + round(density * size) > size
            for start, size in zip(starts, [size for size in parts if size], strict=True)
        )
        expected, memory = reference(gradients, memory, parts, starts, density)
        for gradient, state in zip(gradients, states, strict=True):
            method.accumulate(torch.from_numpy(gradient), state)
        for average in run_method(method, cluster, states):
            np.testing.assert_allclose(to_dense(average).numpy(), expected, rtol=1e-12, atol=1e-12)
        for state, rest in zip(states, memory, strict=True):
            np.testing.assert_array_equal(state.memory.numpy(), rest)
    assert wrapped


def test_wraps_around() -> None:
    layout, compressor = Layout.flat(5), RandomBlock(0.6)
    for step in range(30):
        (start,) = compressor.starts(at(step, layout))
        expected = sorted((start + offset) % 5 for offset in range(3))
        assert compressor.positions(at(step, layout), CPU).tolist() == expected


def test_starts_are_uniform() -> None:
    """In each layer, and in all pairs of places in two layers."""
    layout = Layout.of([(20,), (0,), (20,)])
    compressor = RandomBlock(0.1, scope="layer", seed=1)
    first, second = torch.tensor([compressor.starts(at(step, layout)) for step in range(8000)]).unbind(1)
    # Chi-squared with 19 or 399 degrees of freedom exceeds the limit once in 1000 times.
    for drawn, places, limit in ((first, 20, 43.8), (second, 20, 43.8), (20 * first + second, 400, 491.4)):
        expected = 8000 / places
        assert float(((drawn.bincount(minlength=places) - expected) ** 2 / expected).sum()) < limit


def test_workers_agree_steps_and_seeds_differ() -> None:
    layout, compressor = Layout.flat(10**9), RandomBlock(1e-8)
    first = compressor.starts(at(0, layout))
    assert compressor.starts(at(0, layout, Worker(5, 8))) == first
    assert compressor.starts(at(1, layout)) != first
    assert RandomBlock(1e-8, seed=1).starts(at(0, layout)) != first


def test_nothing_of_nothing() -> None:
    assert RandomBlock().positions(at(0, Layout.flat(0)), CPU).tolist() == []


def test_cost() -> None:
    """One ring over the blocks of all layers: 2(P-1) rounds and 2k(P-1)/P words."""
    bench = Bench.build(Method(RandomBlock(0.2), Dense(), LocalResidual()), 4, 200)
    bench.step([torch.randn(200, dtype=torch.float64) for _ in range(4)])
    for ledger in bench.cluster.ledgers:
        assert (ledger.rounds, ledger.words) == (6, 2 * 40 * 3 // 4)


@pytest.mark.slow
def test_rescaled_is_right_on_average() -> None:
    """The mean over many steps is as close to the dense average as chance allows."""
    workers, length, steps, density = 2, 30, 2000, 0.2
    bench = Bench.build(Method(RandomBlock(density), Dense(), RescaledResidual()), workers, length)
    gradients = [torch.randn(length, dtype=torch.float64) for _ in range(workers)]
    mean = sum(to_dense(bench.step(gradients)[0]) for _ in range(steps)) / steps
    expected = torch.stack(gradients).mean(0)
    # Each entry is x / density with a probability of density: the mean's standard deviation in units of x.
    deviation = ((1 - density) / density / steps) ** 0.5
    assert ((mean - expected).abs() < 4 * deviation * expected.abs()).all()
