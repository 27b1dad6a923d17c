"""Counts and reports of skipped and clipped gradients."""

from __future__ import annotations

import warnings

import torch

import spardl
from spardl.clusters import ProcessGroupCluster
from spardl.method.refusals import NonFiniteCounts, NonFiniteReports, is_due
from tests.support.harness import run_workers


def reports(found: list[tuple[int, int, int]], size: int = 4) -> list[str]:
    """Reports for (step, rank, count of the rank)."""
    refusals = NonFiniteReports(size)
    return [line for step, rank, number in found if (line := refusals.notice({rank: NonFiniteCounts(number, step)}))]


def test_report_names_rank_and_step() -> None:
    (line,) = reports([(7, 1, 1)])
    assert line.startswith("rank 1 skipped or clipped a gradient in step 7 because of ")
    refusals = NonFiniteReports(16)
    line = refusals.notice({rank: NonFiniteCounts(int(rank > 3), 5 * (rank > 3)) for rank in range(16)}) or ""
    assert line.startswith("ranks 4, 5, 6, 7, 8, 9, 10, 11 and 4 others skipped or clipped a gradient in step 5 ")
    assert "(12 so far" in line
    assert refusals.total == 12


def test_burst_is_reported_at_each_tenfold_growth() -> None:
    lines = reports([(step, 2, step) for step in range(1, 2001)])
    assert [line.split(" in step ")[1].split()[0] for line in lines] == ["1", "10", "100", "1000"]


def test_next_burst_is_reported() -> None:
    assert len(reports([(3, 0, 1), (4, 0, 2), (50, 0, 3)])) == 1
    assert len(reports([(3, 0, 1), (4, 0, 2), (150, 0, 3), (151, 1, 1)])) == 2


def test_loaded_counts_are_not_reported() -> None:
    refusals = NonFiniteReports(2)
    assert refusals.notice({0: NonFiniteCounts(5, 0), 1: NonFiniteCounts(1, 0)}) is None
    assert refusals.total == 6


def test_steps_of_the_exchange() -> None:
    assert [step for step in range(1, 200) if is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_all_workers_count_and_one_reports() -> None:
    """The exchange is not part of the cost of a method."""

    def work(cluster: ProcessGroupCluster) -> tuple[list[str], list[int], float]:
        parameter = torch.nn.Parameter(torch.zeros(10))
        synchronizer = spardl.Synchronizer([parameter], "spardl", density=0.5)
        known = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, 6):
                parameter.grad = None
                bad = step in (3, 5) and cluster.local_ranks[0] == 1
                parameter.backward(torch.full((10,), torch.nan if bad else 1.0))
                synchronizer.wait()
                known.append(synchronizer._averager.refused)
        rounds = synchronizer.stats().rounds
        synchronizer.detach()
        return [str(each.message).removeprefix("spardl: ").split(" because")[0] for each in caught], known, rounds

    first, second = run_workers(2, work)
    assert first == ([], [0, 0, 0, 1, 1], 2.0)
    assert second == (["rank 1 skipped or clipped a gradient in step 3"], [0, 0, 1, 1, 2], 2.0)
