from __future__ import annotations

from typing import Any

import pytest
import torch

from spardl.clusters.profile import StepCosts, break_even_gbit, gather_costs
from spardl.protocol.programs import Phase
from tests.trainer.toy import simulated


def costs(**changes: Any) -> StepCosts:
    seconds = dict.fromkeys((phase.value for phase in Phase), 0.0)
    beside = seconds | {Phase.MERGE.value: 0.003, Phase.COMMUNICATE.value: 1.0}
    seconds |= {Phase.SELECT.value: 0.001, Phase.PACK.value: 0.002, Phase.MERGE.value: 0.002}
    values = {"rounds": 1.0, "words": 1.0, "bytes_sent": 1e6, "dense_bytes": 9e6, "peak_memory": 0.0}
    return StepCosts(seconds=seconds, overlapped=beside, **{**values, **changes})


def test_the_break_even_bandwidth_by_hand() -> None:
    """8 MB saved in 8 ms: a gigabyte per second, 8 Gbit/s."""
    assert break_even_gbit(costs()) == pytest.approx(8.0)


def test_nothing_saved() -> None:
    assert break_even_gbit(costs(bytes_sent=9e6)) is None
    assert break_even_gbit(costs(dense_bytes=0.0, bytes_sent=0.0)) is None


def test_costs_are_means_over_steps_and_workers() -> None:
    cluster = simulated(4)
    for rank, ledger in enumerate(cluster.ledgers):
        ledger.rounds, ledger.words, ledger.bytes_sent = 6, 100 * rank, 800 * rank
        ledger.seconds[Phase.COMPUTE] = 2.0 * rank
        ledger.spend(Phase.COMMUNICATE, 4.0 * rank, overlapped=True)
    found = gather_costs(cluster, 3, torch.zeros(10))
    assert (found.rounds, found.words, found.bytes_sent) == (2, 50, 400)
    assert found.seconds["compute"] == 1.0
    assert (found.seconds["communicate"], found.overlapped["communicate"]) == (0.0, 2.0)
    assert found.dense_bytes == 2 * 40 * 3 / 4
    assert found.peak_memory > 1e6
