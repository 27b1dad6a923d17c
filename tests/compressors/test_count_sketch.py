"""Count-sketch compression: a slow, obvious model of the whole cluster to compare with, its costs, its limits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.communicators import Dense
from spardl.compressors import CountSketch
from spardl.method.method import Method
from spardl.method.momentum import CorrectedMomentum, Momentum, OptimizerMomentum
from spardl.method.residuals import LocalResidual
from spardl.protocol.programs import Worker
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, context, layout_of, run_method, run_workers, same_bits, to_dense
from tests.support.quick import some_quick
from tests.vector.test_sketch import key, slow_estimates, slow_table

SMALL = CountSketch(density=0.02, rows=3, columns_per_entry=4, candidates=2.5, seed=11)


def method(compressor: CountSketch = SMALL, momentum: Momentum = OptimizerMomentum()) -> Method:  # noqa: B008
    return Method(compressor, Dense(), LocalResidual(), momentum)


def draw(workers: int, length: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gradients with a common part and some large entries."""
    source = torch.Generator().manual_seed(seed)
    common = torch.randn(length, generator=source, dtype=torch.float64) ** 3
    return [(common + torch.randn(length, generator=source, dtype=torch.float64)).to(dtype) for _ in range(workers)]


class Reference:
    """Sketched-SGD's workers as rows of plain arrays: u velocities, v what they accumulated."""

    def __init__(self, compressor: CountSketch, workers: int, length: int, factor: float) -> None:
        self.compressor, self.factor = compressor, factor
        self.step_number = 0
        self.u, self.v = np.zeros((workers, length)), np.zeros((workers, length))

    def step(self, gradients: np.ndarray, parts: list[tuple[int, int, int]]) -> np.ndarray:
        """The average; parts are (start, stop, k)."""
        self.u = self.factor * self.u + gradients
        self.v = self.v + self.u
        average, kept = np.zeros(self.v.shape[1]), []
        for start, stop, k in parts:
            sums = {i: float(sum(self.v[:, i])) for i in self._candidates(start, stop, k)}
            for i in sorted(sums, key=lambda i: (-abs(sums[i]), i))[:k]:
                average[i] = sums[i] / len(self.v)
                kept.append(i)
        self.u[:, kept] = 0
        self.v[:, kept] = 0
        self.step_number += 1
        return average

    def _candidates(self, start: int, stop: int, k: int) -> list[int]:
        rows, columns = self.compressor.rows, math.ceil(self.compressor.columns_per_entry * k)
        wanted = math.ceil(self.compressor.candidates * k)
        if rows * columns + wanted >= stop - start:
            return list(range(start, stop))
        seed = self.compressor.seed
        if self.compressor.fresh_hashes:
            seed = key(seed, self.step_number)
        table = sum(slow_table(row[start:stop].tolist(), rows, columns, seed, start) for row in self.v)
        estimates = slow_estimates(table, seed, start, stop)
        return sorted(range(start, stop), key=lambda i: (-abs(estimates[i - start]), i))[:wanted]


class Case(NamedTuple):
    compressor: CountSketch
    momentum: Momentum


CASES = [
    Case(SMALL, OptimizerMomentum()),
    Case(SMALL, CorrectedMomentum(factor=0.8)),
    Case(replace(SMALL, fresh_hashes=False), CorrectedMomentum()),
    Case(replace(SMALL, rows=5, columns_per_entry=1.5, candidates=1), CorrectedMomentum()),
    Case(replace(SMALL, rows=1, density=0.05, columns_per_entry=0.7, candidates=6), OptimizerMomentum()),
    Case(replace(SMALL, scope="layer"), CorrectedMomentum()),
    Case(replace(SMALL, scope="bucket", bucket_entries=90, warmup_steps=2, warmup_density=0.1), OptimizerMomentum()),
]


@pytest.mark.parametrize(("case", "workers"), some_quick(product(CASES, [1, 3, 8]), 2))
def test_equals_the_reference(case: Case, workers: int) -> None:
    length, sketched = 300, 0
    factor = case.momentum.factor if isinstance(case.momentum, CorrectedMomentum) else 0.0
    bench = Bench.build(method(*case), workers, length)
    reference = Reference(case.compressor, workers, length, factor)
    for step in range(5):
        here = context(length, step=step)
        gradients = draw(workers, length, seed=step)
        averages = bench.step(gradients)
        expected = reference.step(torch.stack(gradients).numpy(), [tuple(part) for part in case.compressor.parts(here)])
        assert all(same_bits(average, averages[0]) for average in averages)
        assert isinstance(averages[0], SparseVector)
        assert len(averages[0]) == case.compressor.count(here)
        np.testing.assert_allclose(averages[0].dense().numpy(), expected, atol=1e-10)
        for rank, state in enumerate(bench.states):
            np.testing.assert_allclose(state.memory.numpy(), reference.v[rank], atol=1e-10)
            if factor:
                np.testing.assert_allclose(state.moments.velocity.numpy(), reference.u[rank], atol=1e-10)
        sketched += any(each.columns for each in case.compressor.plan(here))
    assert sketched >= 3


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_costs_two_rings(workers: int) -> None:
    """2 (P-1)/P (r c + candidates k) words in 4 (P-1) rounds."""
    compressor = CountSketch(density=0.01, rows=3, columns_per_entry=2, candidates=6)
    bench = Bench.build(method(compressor), workers, 2400)
    bench.step(draw(workers, 2400, seed=0))
    for ledger in bench.cluster.ledgers:
        assert ledger.words == 2 * (workers - 1) * (3 * 2 * 24 + 6 * 24) // workers
        assert ledger.rounds == ledger.messages == 4 * (workers - 1)


@pytest.mark.parametrize("compressor", [SMALL, replace(SMALL, scope="layer"), replace(SMALL, density=1.0)])
@pytest.mark.parametrize("length", [0, 1, 50, 333])
def test_what_is_sent_is_what_was_announced(compressor: CountSketch, length: int) -> None:
    workers = 5
    bench = Bench.build(method(compressor), workers, length)
    bench.step(draw(workers, length, seed=1))
    cost = bench.method.cost(context(length, Worker(0, workers)))
    for ledger in bench.cluster.ledgers:
        assert ledger.rounds in cost.rounds
        assert ledger.words in cost.words


def test_all_tables_travel_in_one_message() -> None:
    compressor = replace(SMALL, scope="layer", density=0.05)
    plan = compressor.plan(context(1000))
    assert [(each.part.k, each.columns, each.candidates) for each in plan] == [(25, 100, 63), (1, 0, 3), (25, 100, 63)]
    assert compressor.sizes(context(1000)) == [3 * 200, 63 + 3 + 63]


@pytest.mark.parametrize("length", [1, 2, 20, 40])
def test_a_part_is_sent_whole_where_that_is_less(length: int) -> None:
    """A table and candidates would be 13 values or more: up to 15, the exact largest entry of the sum is sent."""
    compressor = replace(SMALL, density=0.01)
    gradients = draw(3, length, seed=2)
    average = Bench.build(method(compressor), 3, length).step(gradients)[0]
    assert isinstance(average, SparseVector)
    if length <= 15:
        assert compressor.sizes(context(length)) == [length]
        assert average.indices.tolist() == [int(torch.stack(gradients).sum(0).abs().argmax())]
    else:
        assert compressor.sizes(context(length)) == [12, 3]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("scope", ["model", "layer", "bucket"])
def test_density_one_is_the_dense_average(workers: int, scope: str) -> None:
    compressor = replace(SMALL, density=1.0, scope=scope, bucket_entries=16)
    gradients = draw(workers, 100, seed=3)
    bench = Bench.build(method(compressor), workers, 100)
    average = bench.step(gradients)[0]
    torch.testing.assert_close(to_dense(average), torch.stack(gradients).mean(0))
    assert not any(state.memory.any() for state in bench.states)


def test_without_entries_nothing_is_sent() -> None:
    average = Bench.build(method(), 3, 0).step([torch.empty(0, dtype=torch.float64)] * 3)[0]
    assert isinstance(average, SparseVector)
    assert (len(average), average.length) == (0, 0)


def test_zeros_tie_to_the_front() -> None:
    average = Bench.build(method(), 2, 300).step([torch.zeros(300, dtype=torch.float64)] * 2)[0]
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == list(range(6))
    assert not average.values.any()


@pytest.mark.parametrize(("fresh", "kinds"), [(True, 4), (False, 2)])
def test_hashes_follow_from_seed_and_step(fresh: bool, kinds: int) -> None:
    """The same vector in two steps, with two seeds: other collisions, unless the hashes are fixed."""
    chosen = set()
    for seed in (0, 1):
        bench = Bench.build(method(replace(SMALL, seed=seed, candidates=1, fresh_hashes=fresh)), 1, 3000)
        for _ in range(2):
            bench.states[0].memory.zero_()
            average = bench.step(draw(1, 3000, seed=4))[0]
            assert isinstance(average, SparseVector)
            chosen.add(tuple(average.indices.tolist()))
    assert len(chosen) == kinds


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_missed_is_found_later(fresh: bool) -> None:
    """Error feedback: all of a constant gradient arrives over time; with fixed hashes, some entries wait for ever."""
    length, steps = 600, 400
    gradient = draw(1, length, seed=5)[0].sign()
    bench = Bench.build(method(replace(SMALL, fresh_hashes=fresh)), 1, length)
    total = torch.zeros(length, dtype=torch.float64)
    for _ in range(steps):
        total += to_dense(bench.step([gradient])[0])
    torch.testing.assert_close(total + bench.residuals(), steps * gradient)
    assert (float((total / steps * gradient).min()) > 0.5) is fresh


def test_an_overflow_stays_out_of_the_residual() -> None:
    largest = torch.finfo(torch.float32).max
    source = torch.Generator().manual_seed(0)
    for _ in range(5):
        bench = Bench.build(method(), 4, 400, torch.float32)
        huge = torch.rand(4, 400, generator=source) < 0.4
        averages = bench.step(list(torch.where(huge, largest, torch.randn(4, 400, generator=source))))
        assert all(same_bits(average, averages[0]) for average in averages)
        assert all(bool(state.memory.isfinite().all()) for state in bench.states)


def test_resuming_continues_with_the_same_hashes() -> None:
    parts = method(momentum=CorrectedMomentum())
    undisturbed, resumed = (Bench.build(parts, 3, 300, torch.float32) for _ in range(2))
    for step in range(3):
        undisturbed.step(draw(3, 300, step, torch.float32))
    for state, saved in zip(resumed.states, undisturbed.states, strict=True):
        state.load_state_dict(saved.state_dict())
    for step in range(3, 5):
        gradients = draw(3, 300, step, torch.float32)
        assert same_bits(undisturbed.step(gradients)[0], resumed.step(gradients)[0])


def _work(cluster: ProcessGroupCluster) -> list[Any]:
    (worker,) = cluster.local_workers
    parts = method(momentum=CorrectedMomentum())
    state, found = parts.init_state(layout_of(300), torch.float32), []
    for step in range(3):
        parts.accumulate(draw(cluster.size, 300, step, torch.float32)[worker.rank], state)
        found += run_method(parts, cluster, [state])
    return found


def test_real_processes_agree_to_the_last_bit() -> None:
    bench = Bench.build(method(momentum=CorrectedMomentum()), 3, 300, torch.float32)
    expected = [bench.step(draw(3, 300, step, torch.float32)) for step in range(3)]
    for rank, found in enumerate(run_workers(3, _work)):
        assert all(same_bits(average, expected[step][rank]) for step, average in enumerate(found))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(["rows"], [0, -1, 2, 4, 1.0, True, None]),
        *itertools.product(["columns_per_entry"], [0, -1.5, math.inf, math.nan, "2", True]),
        *itertools.product(["candidates"], [0.99, 0, -1, math.inf, math.nan, "2", True]),
        *itertools.product(["seed"], [-1, 0.5, None, True]),
        *itertools.product(["fresh_hashes"], [1, "yes", None]),
        ("density", 0),
    ],
)
def test_bad_values(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"compressor\.{field} must be .*, got "):
        CountSketch(**{field: value})
