"""All-reduce of the backend."""

from __future__ import annotations

import pytest
import torch

from spardl.clusters import ProcessGroupCluster
from spardl.communicators import Backend
from spardl.compressors import NoCompression
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from tests.support.harness import Bench, run_workers


def test_one_collective_at_optimal_cost() -> None:
    bench = Bench.build(Method(NoCompression(), Backend(), NoResidual()), 4, 8)
    averages = bench.step([torch.full((8,), float(rank), dtype=torch.float64) for rank in range(4)])
    assert all(torch.equal(average, torch.full((8,), 1.5, dtype=torch.float64)) for average in averages)
    assert [ledger.bytes_sent for ledger in bench.cluster.ledgers] == [96] * 4


@pytest.mark.parametrize(
    "workers", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_gloo_is_bit_identical_on_all_workers(workers: int) -> None:
    """One worker sums each entry, so the order of additions is the same for all of them."""
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    lengths = (1, 2, 7, 1000, 70_001)

    def work(cluster: ProcessGroupCluster) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(cluster.local_ranks[0])
        found = []
        for dtype in kinds:
            for length in lengths:
                own = torch.randn(length, generator=random, dtype=torch.float64)
                tensor = (own * 10.0 ** torch.randint(-3, 4, (length,), generator=random)).to(dtype)
                found += cluster.run([Backend().total(cluster.local_workers[0], tensor)])
        return found

    first, *others = run_workers(workers, work)
    assert len(first) == len(kinds) * len(lengths) and all(each.isfinite().all() for each in first)
    for other in others:
        assert all(torch.equal(one, another) for one, another in zip(first, other, strict=True))
