"""Real processes over gloo run the same programs to the same bits as the simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.clusters import ProcessGroupCluster
from spardl.communicators import Backend
from spardl.compressors import Mass
from spardl.method.method import Method
from tests.laws.test_laws import DTYPES, random_gradients
from tests.support.harness import (
    Bench,
    all_methods,
    layout_of,
    representatives,
    run_method,
    run_workers,
    same_bits,
    spardl,
    to_dense,
)

LENGTH, STEPS, DENSITY = 83, 3, 0.1


def _gradients(workers: int, dtype: torch.dtype, step: int) -> list[Tensor]:
    return random_gradients(workers, LENGTH, dtype, seed=step)


def _methods(workers: int) -> list[Method]:
    """Every legal method; with many workers, each communicator in every form and each compressor."""
    return (all_methods if workers <= 4 else representatives)(workers, DENSITY)


def _cases(workers: int) -> list[tuple[Method, torch.dtype]]:
    """Methods of the same parts are next to each other, so that all parts have both types."""
    return [(method, DTYPES[place % 2]) for place, method in enumerate(_methods(workers))]


def _work(cluster: ProcessGroupCluster) -> list[Any]:
    """All cases: averages of all steps, the final residual, and the counts."""
    (worker,) = cluster.local_workers
    found = []
    for method, dtype in _cases(cluster.size):
        state = method.init_state(layout_of(LENGTH), dtype)
        averages = []
        before = cluster.ledgers[0].state_dict()
        for step in range(STEPS):
            method.accumulate(_gradients(cluster.size, dtype, step)[worker.rank], state)
            averages += run_method(method, cluster, [state])
        after = cluster.ledgers[0].state_dict()
        counts = {key: after[key] - before[key] for key in ("rounds", "messages", "words", "bytes_sent")}
        found.append((averages, state.memory.clone(), counts))
    return found


@pytest.mark.parametrize("workers", [1, 2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4, 6))])
def test_gloo_and_simulation_agree_to_the_last_bit(workers: int) -> None:
    per_rank = run_workers(workers, _work)
    for number, (method, dtype) in enumerate(_cases(workers)):
        bench = Bench.build(method, workers, LENGTH, dtype)
        expected = [bench.step(_gradients(workers, dtype, step)) for step in range(STEPS)]
        for rank in range(workers):
            averages, memory, counts = per_rank[rank][number]
            ledger = bench.cluster.ledgers[rank].state_dict()
            assert counts == {key: ledger[key] for key in counts}, method
            if isinstance(method.communicator, Backend):
                # The backend adds up in an order of its own.
                rounded = method.compressor.mass is Mass.ROUNDED
                tolerance = {"rtol": 0.1, "atol": 0.05} if rounded else {"rtol": 1e-4, "atol": 1e-5}
                for step in range(STEPS):
                    found, wanted = to_dense(averages[step]), to_dense(expected[step][rank])
                    torch.testing.assert_close(found, wanted, **tolerance)
                continue
            assert all(same_bits(averages[step], expected[step][rank]) for step in range(STEPS)), method
            if method.residual.remembers:
                assert same_bits(memory, bench.states[rank].memory), method


def _conserve(cluster: ProcessGroupCluster) -> Tensor:
    (worker,) = cluster.local_workers
    method = spardl(DENSITY, teams=2)
    state = method.init_state(layout_of(LENGTH), torch.float64)
    method.accumulate(_gradients(cluster.size, torch.float64, 0)[worker.rank], state)
    average = run_method(method, cluster, [state])[0]
    return state.memory + to_dense(average)


def test_mass_is_conserved_over_gloo() -> None:
    found = torch.stack(run_workers(4, _conserve)).sum(0)
    torch.testing.assert_close(found, torch.stack(_gradients(4, torch.float64, 0)).sum(0))
