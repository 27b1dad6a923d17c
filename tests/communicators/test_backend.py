"""The backend's own all-reduce."""

from __future__ import annotations

import torch

from spardl.communicators import Backend
from spardl.compressors import NoCompression
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from tests.harness import Bench


def test_one_collective_at_the_ideal_cost() -> None:
    bench = Bench.build(Method(NoCompression(), Backend(), NoResidual()), 4, 8)
    averages = bench.step([torch.full((8,), float(rank), dtype=torch.float64) for rank in range(4)])
    assert all(torch.equal(average, torch.full((8,), 1.5, dtype=torch.float64)) for average in averages)
    assert [ledger.bytes_sent for ledger in bench.cluster.ledgers] == [96] * 4
