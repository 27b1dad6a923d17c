"""Ok-Topk while residuals grow from zero, so that reused thresholds select too many entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from spardl.communicators import OkTopk
from spardl.compressors import GaussianK, ReusedThreshold, TopK
from spardl.protocol.programs import Context, Worker
from spardl.vector.sparse import SparseVector
from tests.communicators.oktopk_cluster import PUBLISHED, cluster, count, published
from tests.support.harness import Bench, layout_of, same_bits
from tests.support.quick import some_quick

Make = Callable[[torch.Generator, int, int], Tensor]


def normal(source: torch.Generator, length: int, step: int) -> Tensor:
    return torch.randn(length, generator=source, dtype=torch.float64)


def heavy(source: torch.Generator, length: int, step: int) -> Tensor:
    """Student's t with three degrees of freedom."""
    squares = sum(normal(source, length, step).square() for _ in range(3))
    assert isinstance(squares, Tensor)
    return normal(source, length, step) / (squares / 3).sqrt()


def grows(source: torch.Generator, length: int, step: int) -> Tensor:
    return 10 ** (step / 50) * normal(source, length, step)


def shrinks(source: torch.Generator, length: int, step: int) -> Tensor:
    return 10 ** (-step / 50) * normal(source, length, step)


def jumps(source: torch.Generator, length: int, step: int) -> Tensor:
    return (100 if 10 <= step < 20 else 1) * normal(source, length, step)


def layers(source: torch.Generator, length: int, step: int) -> Tensor:
    return torch.logspace(-1, 1, 10).repeat_interleave(length // 10) * normal(source, length, step)


def words_of(bench: Bench, gradients: list[Tensor]) -> tuple[SparseVector, list[int]]:
    """Average of a step, bit-identical on all workers, and every worker's words, which must be within bounds."""
    workers, step = len(gradients), bench.states[0].step
    before = [(ledger.words, ledger.rounds) for ledger in bench.cluster.ledgers]
    averages = bench.step(gradients)
    assert all(same_bits(average, averages[0]) for average in averages)
    pairs = list(zip(bench.cluster.ledgers, before, strict=True))
    words = [ledger.words - old for ledger, (old, _) in pairs]
    at = Context(Worker(0, workers), layout_of(gradients[0].numel()), step)
    cost = bench.method.cost(at)
    assert all(number in cost.words for number in words), (step, cost)
    assert all(ledger.rounds - old in cost.rounds for ledger, (_, old) in pairs), (step, cost)
    assert sum(words) / workers <= bench.method.published_cost(at).words.high, step
    assert isinstance(averages[0], SparseVector)
    return averages[0], words


@pytest.mark.parametrize(("workers", "beyond"), some_quick(product([2, 3, 5, 8, 14], [2.0, None]), 3))
def test_cold_start_stays_within_the_bound(workers: int, beyond: float | None) -> None:
    """6k(P-1)/P words on every worker, counts included, in all steps between two evaluations."""
    length, k = 3000 * workers, 30 * workers
    parts = ReusedThreshold(0.01, reevaluate_beyond=beyond), OkTopk(reevaluate_beyond=beyond)
    bench = cluster(workers, length, *parts)
    source = torch.Generator().manual_seed(workers)
    for step in range(12):
        gradients = [normal(source, length, step) for _ in range(workers)]
        before = bench.residuals() + torch.stack(gradients).sum(0)
        average, words = words_of(bench, gradients)
        if step:
            assert max(words) <= 6 * k * (workers - 1) / workers, step
            assert 0.6 * k <= len(average) <= 4 * k / 3, step
        torch.testing.assert_close(bench.residuals() + workers * average.dense(), before, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("workers", "make"),
    some_quick(product([3, 7], [normal, heavy, grows, shrinks, jumps, layers]), 5),
    ids=lambda one: str(getattr(one, "__name__", one)),
)
def test_the_mean_never_exceeds_the_published_formula(workers: int, make: Make) -> None:
    """For any gradients, as long as regions hold equal shares; over both kinds of evaluations."""
    length = 4000
    communicator = OkTopk(threshold_period=14, repartition_period=14)
    bench = cluster(workers, length, ReusedThreshold(0.03, period=14), communicator)
    source = torch.Generator().manual_seed(workers)
    for step in range(24):
        words_of(bench, [make(source, length, step) for _ in range(workers)])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_forms_stay_within_the_bound(name: str) -> None:
    workers, length, k = 4, 4000, 80
    parts = published(f"oktopk_{name}")
    bench = cluster(workers, length, replace(parts["compressor"], density=0.02), parts["communicator"])
    source = torch.Generator().manual_seed(1)
    for step in range(50):
        average, words = words_of(bench, [normal(source, length, step) for _ in range(workers)])
        if step % parts["compressor"].period:
            assert len(average) <= 4 * k / 3, step
            assert max(words) <= 6 * k * (workers - 1) / workers, step


def test_oversized_selections_are_cut() -> None:
    """Gaussian-k selects 3.5 k entries here; cut entries stay with the worker."""
    workers, length, k = 4, 20_000, 20
    compressor = GaussianK(0.001)
    bench = cluster(workers, length, compressor, OkTopk())
    source = torch.Generator().manual_seed(1)
    for step in range(3):
        gradients = [heavy(source, length, step) for _ in range(workers)]
        before = bench.residuals() + torch.stack(gradients).sum(0)
        average, _ = words_of(bench, gradients)
        assert len(average) <= 4 * k / 3
        torch.testing.assert_close(bench.residuals() + workers * average.dense(), before, rtol=1e-12, atol=1e-11)
    alone = cluster(1, length, compressor, OkTopk(threshold_period=1))
    values = heavy(source, length, 0)
    assert count(alone.step([values])[0]) == k
    expected = values.clone()
    expected[values.abs().topk(k).indices] = 0
    assert torch.equal(alone.states[0].memory, expected)


@pytest.mark.parametrize("scale", [5.0, 0.1])
def test_early_threshold_is_close_to_the_exact_one(scale: float) -> None:
    """The result has k sums: the largest ones, except for a few close to the threshold."""
    workers, length, k = 5, 20_000, 1000
    bench = cluster(workers, length, TopK(k / length), OkTopk(threshold_period=1000))
    source = torch.Generator().manual_seed(3)
    bench.step([normal(source, length, 0) for _ in range(workers)])
    for state in bench.states:
        state.memory.zero_()
    gradients = [scale * normal(source, length, 0) for _ in range(workers)]
    average, words = words_of(bench, gradients)
    sums = sum(gradient * (gradient.abs() >= gradient.abs().topk(k).values[-1]) for gradient in gradients)
    assert isinstance(sums, Tensor)
    exact = sums.abs().topk(k)
    assert len(average) == k
    assert len(set(average.indices.tolist()) & set(exact.indices.tolist())) >= 0.98 * k
    threshold = bench.states[0].communication.state_dict()["threshold"]
    assert math.isclose(threshold, float(exact.values[-1]), rel_tol=0.02)
    assert max(words) <= 6 * k * (workers - 1) / workers


def by_hand(scale: float, beyond: float | None = 2.0) -> tuple[Bench, list[Tensor]]:
    """Two workers, twelve entries, k = 3: after a step that found the threshold 2 in regions of six entries each."""
    bench = cluster(2, 12, TopK(0.25), OkTopk(balance_factor=None, reevaluate_beyond=beyond))
    first = torch.zeros(12, dtype=torch.float64)
    first[[0, 6, 11]] = torch.tensor([3.0, 1, 2], dtype=torch.float64)
    bench.step([first, first])
    state = bench.states[0].communication.state_dict()
    assert (state["borders"].tolist(), state["threshold"]) == ([0, 6, 12], 2.0)
    one, other = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    one[[0, 1, 2]] = scale * torch.tensor([9.0, -8, 4], dtype=torch.float64)
    other[[3, 6, 7]] = scale * torch.tensor([7.0, 5, 6], dtype=torch.float64)
    return bench, [one, other]


@pytest.mark.parametrize("beyond", [2.0, None])
def test_worked_example_of_too_many(beyond: float | None) -> None:
    """More than 4/3 k, at most 2 k: the selection is cut, and the threshold is corrected as published."""
    bench, gradients = by_hand(1, beyond)
    average, words = words_of(bench, gradients)
    # Six sums reach 2, four of them with worker 0. Of three each gives its share, rounded up: 3 x 4/6 and 3 x 2/6.
    assert (average.indices.tolist(), average.values.tolist()) == ([0, 1, 7], [4.5, -4.0, 3.0])
    assert [state.communication.state_dict()["threshold"] for state in bench.states] == [2 * 1.008] * 2
    # Worker 1 sends the 7, both a number each way: of what follows, and of what reaches 2; then their shares.
    assert words == [1 + 0 + 1 + 4, 1 + 2 + 1 + 2]
    assert [state.memory.nonzero().squeeze(1).tolist() for state in bench.states] == [[2], [3, 6]]


def test_worked_example_of_far_too_many() -> None:
    """A new threshold is found among 4/3 of k: 4 x 4/6 and 4 x 2/6, rounded up."""
    bench, gradients = by_hand(1, 1.9)
    average, words = words_of(bench, gradients)
    # 9, -8, 7 and 6, 5 arrive, and the three largest are kept.
    assert (average.indices.tolist(), average.values.tolist()) == ([0, 1, 3], [4.5, -4.0, 3.5])
    assert [state.communication.state_dict()["threshold"] for state in bench.states] == [7.0, 7.0]
    assert words == [1 + 0 + 1 + 6, 1 + 2 + 1 + 4]
    assert [state.memory.nonzero().squeeze(1).tolist() for state in bench.states] == [[2], [6, 7]]


@pytest.mark.parametrize("beyond", [2.0, None])
def test_worked_example_of_too_few(beyond: float | None) -> None:
    bench, gradients = by_hand(0.1, beyond)
    average, words = words_of(bench, gradients)
    if beyond is None:
        # None of them reaches 2: as published, nothing is sent, and the threshold is lowered a little.
        assert len(average) == 0
        assert bench.states[0].communication.state_dict()["threshold"] == 2 / 1.008
        return
    # None of them reaches 2: all six are shared out, after their numbers.
    assert average.indices.tolist() == [0, 1, 3]
    assert words == [1 + 0 + 1 + 1 + 6, 1 + 2 + 1 + 1 + 4]
    assert bench.states[1].communication.state_dict()["threshold"] == gradients[1][3]
