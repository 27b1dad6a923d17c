"""Split and reduce, and the exchange of counts before it."""

from __future__ import annotations

import math

import pytest
import torch

from spardl.clusters import Ledger, SimulatedCluster
from spardl.communicators.steps.split import equal_regions, split_and_reduce, swap_counts
from spardl.communicators.steps.transfer import BlockExchange
from spardl.protocol.programs import Program, Worker, whole_team
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Typed
from tests.support.harness import NETWORK

SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16]


@pytest.mark.parametrize("size", SIZES)
def test_counts_reach_their_member(size: int) -> None:
    cluster = SimulatedCluster(size, NETWORK, count_local=False)
    device = torch.device("cpu")
    programs = [
        swap_counts(whole_team(Worker(rank, size)), [100 * rank + to for to in range(size)], device)
        for rank in range(size)
    ]
    found = cluster.run(programs)
    assert found == [[100 * source + rank for source in range(size)] for rank in range(size)]
    ledgers: list[Ledger] = list(cluster.ledgers)
    assert all(ledger.rounds == math.ceil(math.log2(size)) for ledger in ledgers)
    assert all(ledger.words <= ledger.rounds * math.ceil(size / 2) for ledger in ledgers)


@pytest.mark.parametrize("bucket", [1, 4, 100])
@pytest.mark.parametrize("size", SIZES)
def test_each_owner_gets_the_sum_of_its_region(size: int, bucket: int) -> None:
    length = 50
    source = torch.Generator().manual_seed(size)
    dense = torch.randn(size, length, generator=source, dtype=torch.float64)
    dense[torch.rand(size, length, generator=source) < 0.7] = 0
    borders = sorted([0, *torch.randint(0, length + 1, (size - 1,), generator=source).tolist(), length])

    def program(rank: int) -> Program[SparseVector]:
        indices = dense[rank].nonzero().squeeze(1)
        own = SparseVector(indices, dense[rank, indices], length)
        transport = BlockExchange(Typed(torch.float64, torch.float64))
        return split_and_reduce(whole_team(Worker(rank, size)), own, borders, bucket, transport)

    cluster = SimulatedCluster(size, NETWORK, count_local=False)
    for rank, region in enumerate(cluster.run([program(rank) for rank in range(size)])):
        expected = dense[:, borders[rank] : borders[rank + 1]].sum(0)
        torch.testing.assert_close(region.dense(), expected)
        assert region.length == borders[rank + 1] - borders[rank]
    counts = math.ceil(math.log2(size))
    for rank, ledger in enumerate(cluster.ledgers):
        own_region = slice(borders[rank], borders[rank + 1])
        sent = int((dense[rank] != 0).sum() - (dense[rank, own_region] != 0).sum())
        assert ledger.rounds == counts + math.ceil((size - 1) / bucket)
        assert 2 * sent <= ledger.words <= 2 * sent + counts * math.ceil(size / 2)


def test_equal_regions() -> None:
    assert equal_regions(10, 4) == [0, 2, 5, 7, 10]
    assert equal_regions(2, 4) == [0, 0, 1, 1, 2]
