"""Cost bounds and random generators of workers."""

from __future__ import annotations

import pytest
import torch

from spardl.protocol.programs import Bounds, Context, Cost, Worker, derive_seed, log2_ceil, seeded_generator
from tests.laws.test_laws import WORKERS, random_gradients
from tests.support.harness import Bench, layout_of, representatives


@pytest.mark.parametrize("workers", WORKERS)
def test_the_ledger_is_within_the_formula(workers: int) -> None:
    length, steps = 40 * workers + 3, 3 if workers <= 16 else 2
    for method in representatives(workers, 0.1):
        bench = Bench.build(method, workers, length)
        for step in range(steps):
            before = [(ledger.rounds, ledger.words) for ledger in bench.cluster.ledgers]
            bench.step(random_gradients(workers, length, torch.float64, seed=step))
            for rank, ledger in enumerate(bench.cluster.ledgers):
                cost = method.cost(Context(Worker(rank, workers), layout_of(length), step))
                assert ledger.rounds - before[rank][0] in cost.rounds, (method, cost)
                assert ledger.words - before[rank][1] in cost.words, (method, cost)


def test_costs_add_up() -> None:
    one = Cost(Bounds.exactly(2), Bounds(3, 5))
    assert Cost.total([one, one]) == Cost(Bounds(4, 4), Bounds(6, 10))
    assert 4 in one.words
    assert 6 not in one.words
    assert [log2_ceil(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_seeds_are_fixed_for_ever() -> None:
    """Other values would break every run that is to be continued."""
    assert derive_seed(1, "order", 0) == 433034383059858670
    assert derive_seed(1, "order", 0) == derive_seed("1/order/0")


def test_seeds_differ_and_fit() -> None:
    seeds = {derive_seed(seed, what, step) for seed in range(10) for what in "ab" for step in range(10)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    one, other = (torch.rand(3, generator=seeded_generator(1, "x")) for _ in range(2))
    assert torch.equal(one, other)
