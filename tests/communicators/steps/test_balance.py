"""Balancing of blocks: equal sizes, unchanged order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.clusters import SimulatedCluster
from spardl.communicators.steps.split import balance
from spardl.communicators.steps.transfer import BlockExchange
from spardl.protocol.programs import Worker, whole_team
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Typed
from tests.support.harness import NETWORK


def balanced(blocks: list[SparseVector]) -> tuple[list[SparseVector], SimulatedCluster]:
    size = len(blocks)
    cluster = SimulatedCluster(size, NETWORK, count_local=False)
    counts = [len(block) for block in blocks]
    transport = BlockExchange(Typed(blocks[0].values.dtype, blocks[0].values.dtype))
    programs = [balance(whole_team(Worker(rank, size)), block, counts, transport) for rank, block in enumerate(blocks)]
    return cluster.run(programs), cluster


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.sampled_from([torch.float32, torch.float64]))
def test_block_sizes_differ_by_at_most_one(counts: list[int], dtype: torch.dtype) -> None:
    length = 3 * sum(counts) + 1
    indices = torch.arange(1, length, 3)
    values = torch.randn(sum(counts), dtype=dtype)
    blocks = [SparseVector(*pair, length) for pair in zip(indices.split(counts), values.split(counts), strict=True)]
    found, cluster = balanced(blocks)
    sizes = [len(block) for block in found]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([block.indices for block in found]), indices)
    assert torch.equal(torch.cat([block.values for block in found]), values)
    for before, after, ledger in zip(blocks, found, cluster.ledgers, strict=True):
        stayed = int(torch.isin(before.indices, after.indices).sum())
        assert ledger.rounds == 1
        assert ledger.words == 2 * (len(before) - stayed)
        assert ledger.words <= 2 * (sum(counts) - len(after))


def test_worked_example() -> None:
    """Worker 0 has six of eight entries, worker 2 has two; each of four workers gets two."""
    indices = torch.tensor([0, 3, 4, 5, 8, 9, 20, 21])
    starts = [0, 6, 6, 8, 8]
    blocks = [SparseVector(indices[low:high], indices[low:high].double(), 30) for low, high in pairwise(starts)]
    found, cluster = balanced(blocks)
    assert [block.indices.tolist() for block in found] == [[0, 3], [4, 5], [8, 9], [20, 21]]
    assert [block.values.tolist() for block in found] == [[0, 3], [4, 5], [8, 9], [20, 21]]
    assert [ledger.words for ledger in cluster.ledgers] == [8, 0, 4, 0]
    assert [ledger.messages for ledger in cluster.ledgers] == [2, 0, 1, 0]


@pytest.mark.parametrize("length", [2**31 - 2, 2**31 - 1, 2**40])
def test_large_indices_are_exact(length: int) -> None:
    indices = torch.tensor([0, 1, length - 2, length - 1])
    empty = SparseVector(indices[:0], torch.zeros(0), length)
    found, _ = balanced([SparseVector(indices, torch.ones(4), length), empty])
    assert torch.cat([block.indices for block in found]).tolist() == indices.tolist()
