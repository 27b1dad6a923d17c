"""Bruck's all-gather for any number of workers and uneven items."""

from __future__ import annotations

import math

import pytest
import torch

from spardl.clusters import SimulatedCluster
from spardl.communicators.steps.transfer import all_gather, all_gather_around
from spardl.protocol.programs import Exchange, Program, Team, Worker, whole_team
from tests.support.harness import NETWORK


@pytest.mark.parametrize("workers", [*range(1, 18), 33])
def test_all_members_get_all_items_in_order(workers: int) -> None:
    cluster = SimulatedCluster(workers, NETWORK)
    sizes = [rank % 3 for rank in range(workers)]
    items = [torch.full((size,), float(rank)) for rank, size in enumerate(sizes)]
    programs = [all_gather(whole_team(worker), items[worker.rank], sizes, sizes) for worker in cluster.local_workers]
    for gathered in cluster.run(programs):
        assert all(torch.equal(found, item) for found, item in zip(gathered, items, strict=True))
    for rank, ledger in enumerate(cluster.ledgers):
        assert ledger.rounds == math.ceil(math.log2(workers))
        assert ledger.bytes_received == 4 * (sum(sizes) - sizes[rank])
    assert sum(ledger.words for ledger in cluster.ledgers) == (workers - 1) * sum(sizes)


def test_teams_do_not_mix() -> None:
    cluster = SimulatedCluster(6, NETWORK)
    teams = [Team(range(rank % 2, 6, 2), rank // 2) for rank in range(6)]
    programs = [all_gather(team, torch.tensor([float(rank)]), [1] * 3, [1] * 3) for rank, team in enumerate(teams)]
    for rank, gathered in enumerate(cluster.run(programs)):
        assert torch.cat(gathered).tolist() == [rank % 2, rank % 2 + 2, rank % 2 + 4]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8])
def test_callback_gets_each_item_once_own_first(workers: int) -> None:
    cluster, sizes = SimulatedCluster(workers, NETWORK), [1] * workers

    def program(worker: Worker) -> Program[list[tuple[int, float]]]:
        received: list[tuple[int, float]] = []
        item = torch.tensor([float(worker.rank)])
        use = lambda position, found: received.append((position, found.item()))  # noqa: E731
        yield from all_gather_around(whole_team(worker), item, sizes, sizes, use)
        return received

    for rank, received in enumerate(cluster.run([program(worker) for worker in cluster.local_workers])):
        assert received == [(each % workers, float(each % workers)) for each in range(rank, rank + workers)]


def test_callback_runs_while_items_are_in_flight() -> None:
    received: list[int] = []
    team, item = Team(range(4), 1), torch.zeros(1)
    steps = all_gather_around(team, item, [1] * 4, [1] * 4, lambda position, found: received.append(position))
    for known in ([1], [1, 2]):
        exchange = next(steps)
        assert isinstance(exchange, Exchange)
        assert exchange.meanwhile is not None
        exchange.meanwhile()
        assert received == known
    with pytest.raises(StopIteration):
        next(steps)
    assert received == [1, 2, 3, 0]
