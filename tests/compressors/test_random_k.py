"""Random entries: every choice equally likely, the same on all workers."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.communicators import Dense
from spardl.compressors import RandomK
from spardl.compressors.random_k import draw_distinct
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, RescaledResidual
from spardl.protocol.programs import Context, Worker, seeded_generator
from spardl.vector.layout import Layout
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, to_dense

CPU = torch.device("cpu")


def positions(compressor: RandomK, layout: Layout, step: int, worker: Worker = Worker(0, 1)) -> list[int]:  # noqa: B008
    found: list[int] = compressor.positions(Context(worker, layout, step), CPU).tolist()
    return found


@pytest.mark.parametrize(("field", "value"), [("density", 0), ("scope", "all"), ("seed", 1.5), ("seed", None)])
def test_values_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{field} must be"):
        RandomK(**{field: value})


@given(length=st.integers(0, 400), share=st.floats(0, 1), seed=st.integers(0, 10**9))
def test_draws_differ_and_are_sorted(length: int, share: float, seed: int) -> None:
    k = round(share * length)
    drawn = draw_distinct(length, k, torch.Generator().manual_seed(seed)).tolist()
    assert len(drawn) == k
    assert drawn == sorted(set(drawn))
    assert all(0 <= position < length for position in drawn)


def chi_squared(counts: torch.Tensor) -> float:
    expected = float(counts.sum()) / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


# Chi-squared with f degrees of freedom exceeds these once in 1000 times.
LIMITS = {19: 43.8, 35: 66.6, 189: 252.5}


@pytest.mark.parametrize(("length", "k"), [(9, 2), (20, 2), (20, 19), (20, 1)])
def test_every_choice_is_equally_likely(length: int, k: int) -> None:
    """Few of many are drawn until they differ, many of few are shuffled; positions and pairs are uniform in both."""
    numbers = {choice: number for number, choice in enumerate(combinations(range(length), k))}
    generators = [seeded_generator(0, step, 0) for step in range(40 * len(numbers))]
    draws = [tuple(draw_distinct(length, k, generator).tolist()) for generator in generators]
    counts = torch.tensor([numbers[draw] for draw in draws]).bincount(minlength=len(numbers)).double()
    assert chi_squared(counts) < LIMITS[len(numbers) - 1]


def test_workers_agree_steps_and_seeds_and_parts_differ() -> None:
    layout = Layout.of([(100,), (100,), (0,), (100,)])
    compressor = RandomK(0.1, scope="layer", seed=3)
    first = positions(compressor, layout, 0)
    assert positions(compressor, layout, 0, Worker(5, 8)) == first
    assert positions(compressor, layout, 1) != first
    assert positions(RandomK(0.1, scope="layer", seed=4), layout, 0) != first
    by_layer = [[position % 100 for position in first if position // 100 == layer] for layer in range(3)]
    assert [len(layer) for layer in by_layer] == [10, 10, 10]
    assert by_layer[0] != by_layer[1] != by_layer[2]


def test_nothing_of_nothing() -> None:
    assert positions(RandomK(), Layout.flat(0), 0) == []


def test_sends_values_only() -> None:
    """One ring over k values, and every worker's residual keeps the rest."""
    workers, length = 4, 200
    method = Method(RandomK(0.2), Dense(), LocalResidual())
    bench = Bench.build(method, workers, length)
    gradients = [torch.randn(length, dtype=torch.float64) for _ in range(workers)]
    average = bench.step(gradients)[0]
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == positions(method.compressor, bench.states[0].layout, 0)
    torch.testing.assert_close(average.values, torch.stack(gradients).mean(0)[average.indices])
    for gradient, state in zip(gradients, bench.states, strict=True):
        gradient[average.indices] = 0
        assert torch.equal(state.memory, gradient)
    for ledger in bench.cluster.ledgers:
        assert (ledger.rounds, ledger.words) == (6, 2 * 40 * 3 // 4)


def test_rescaled_is_right_on_average() -> None:
    """The mean over many steps is as close to the dense average as chance allows."""
    workers, length, steps, density = 2, 30, 2000, 0.2
    bench = Bench.build(Method(RandomK(density), Dense(), RescaledResidual()), workers, length)
    gradients = [torch.randn(length, dtype=torch.float64) for _ in range(workers)]
    mean = sum(to_dense(bench.step(gradients)[0]) for _ in range(steps)) / steps
    expected = torch.stack(gradients).mean(0)
    # Each entry is x / density with a probability of density: the mean's standard deviation in units of x.
    deviation = ((1 - density) / density / steps) ** 0.5
    assert ((mean - expected).abs() < 4 * deviation * expected.abs()).all()
