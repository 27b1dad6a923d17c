"""Dense ring."""

from __future__ import annotations

import pytest
import torch

from tests.support.harness import Bench, dense


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 4, 17])
def test_sums_every_chunk(workers: int, length: int) -> None:
    source = torch.Generator().manual_seed(workers)
    gradients = [torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]
    for average in Bench.build(dense(), workers, length).step(gradients):
        torch.testing.assert_close(average, torch.stack(gradients).mean(0))


def test_every_worker_sends_its_share_of_each_round() -> None:
    bench = Bench.build(dense(), 4, 8)
    bench.step([torch.ones(8, dtype=torch.float64)] * 4)
    for ledger in bench.cluster.ledgers:
        assert (ledger.rounds, ledger.messages, ledger.words, ledger.bytes_sent) == (6, 6, 12, 96)
