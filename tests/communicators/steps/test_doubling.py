"""Recursive doubling of sparse blocks: dropped entries and costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spardl.clusters import SimulatedCluster
from spardl.communicators.steps.doubling import Target, recursive_doubling
from spardl.protocol.programs import Program, Team
from spardl.vector.accumulator import Accumulator
from spardl.vector.packing import Slot
from spardl.vector.selection import top_k
from spardl.vector.sparse import SparseVector
from tests.support.harness import NETWORK, same_bits


def sparse(entries: dict[int, float], length: int) -> SparseVector:
    values = torch.tensor([entries[i] for i in sorted(entries)], dtype=torch.float64)
    return SparseVector(torch.tensor(sorted(entries), dtype=torch.int64), values, length)


def test_dropped_entries_are_shared() -> None:
    target = Target(Accumulator(torch.ones(6, dtype=torch.float64)), 2, Slot(2, 4))
    kept = target.add_up([sparse({0: 3, 1: 5}, 4), sparse({1: 1, 3: -4}, 4)], holders=2)
    assert kept.indices.tolist() == [1, 3]
    assert kept.values.tolist() == [6, -4]
    assert target.accumulated.values.tolist() == [1, 1, 2.5, 1, 1, 1]
    target.accumulated.restore()
    assert target.accumulated.values.tolist() == [1] * 6


def test_worked_example_of_four_members() -> None:
    """One entry each. Round 1: {0, 1} keep 4 at 1 and drop 3, {2, 3} keep 5 at 0; round 2 keeps 5 and drops 4."""
    own = [{0: 3.0}, {1: 4.0}, {0: 5.0}, {2: 1.0}]
    left, sums = double([sparse(entries, 3) for entries in own], capacity=1)
    assert all(total.indices.tolist() == [0] and total.values.tolist() == [5] for total in sums)
    # What two members dropped is shared by two, what four members dropped by four.
    assert [vector.tolist() for vector in left] == [[1.5, 1, 0], [1.5, 1, 0], [0, 1, 0.5], [0, 1, 0.5]]


def double(blocks: list[SparseVector], capacity: int, members: list[int] | None = None) -> tuple[list[Tensor], list]:
    """Runs recursive doubling on zero vectors, with members in any order."""
    members = members or list(range(len(blocks)))
    accumulators = [Accumulator(torch.zeros(blocks[0].length, dtype=torch.float64)) for _ in blocks]

    def program(rank: int) -> Program[SparseVector]:
        target = Target(accumulators[rank], 0, Slot(capacity, blocks[0].length))
        return recursive_doubling(Team(members, members.index(rank)), blocks[rank], target)

    cluster = SimulatedCluster(len(blocks), NETWORK, count_local=False)
    sums = cluster.run([program(rank) for rank in range(len(blocks))])
    levels = (len(blocks) - 1).bit_length()
    for ledger in cluster.ledgers:
        assert ledger.rounds == ledger.messages == levels
        assert ledger.words == 2 * capacity * levels
    return [accumulated.values for accumulated in accumulators], sums


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_members_agree_and_no_mass_is_lost(size: int) -> None:
    length, capacity = 40, 6
    source = torch.Generator().manual_seed(size)
    dense = torch.randn(size, length, generator=source, dtype=torch.float64)
    # The last one sends fewer entries than its capacity.
    chosen = [top_k(vector, capacity - (rank == size - 1)) for rank, vector in enumerate(dense)]
    blocks = [SparseVector(indices, dense[rank, indices], length) for rank, indices in enumerate(chosen)]
    left, sums = double(blocks, capacity, members=torch.randperm(size, generator=source).tolist())
    assert all(same_bits(total, sums[0]) for total in sums)
    assert len(sums[0]) == min(capacity, len(torch.cat(chosen).unique()))
    sent = torch.stack([block.dense() for block in blocks]).sum(0)
    torch.testing.assert_close(torch.stack(left).sum(0) + sums[0].dense(), sent)
