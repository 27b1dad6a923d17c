"""Dense all-gather."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spardl.communicators import AllGatherDense
from spardl.compressors import NoCompression
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from tests.support.harness import Bench

METHOD = Method(NoCompression(), AllGatherDense(), NoResidual())


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_adds_in_the_order_of_ranks(workers: int, length: int) -> None:
    """Bit-identical to a loop over the ranks, for summands whose sum depends on the order."""
    source = np.random.default_rng(workers)
    gradients = (source.standard_normal((workers, length)) * 10.0 ** source.integers(-6, 7, (workers, length))).astype(
        np.float32
    )
    expected = gradients[0].copy()
    for gradient in gradients[1:]:
        expected += gradient
    bench = Bench.build(METHOD, workers, length, torch.float32)
    for average in bench.step([torch.from_numpy(gradient) for gradient in gradients]):
        assert isinstance(average, torch.Tensor)
        assert np.array_equal(average.numpy(), expected / np.float32(workers))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 16])
def test_cost(workers: int) -> None:
    length = 11
    bench = Bench.build(METHOD, workers, length)
    bench.step([torch.ones(length, dtype=torch.float64)] * workers)
    for ledger in bench.cluster.ledgers:
        assert ledger.rounds == ledger.messages == math.ceil(math.log2(workers))
        assert ledger.words == length * (workers - 1)
        assert ledger.bytes_sent == ledger.bytes_received == 8 * ledger.words


def test_sum_does_not_keep_messages_alive() -> None:
    """Vectors arrive in messages of up to P n entries."""
    length, workers = 10, 8
    bench = Bench.build(METHOD, workers, length)
    for state in bench.states:
        METHOD.accumulate(torch.ones(length, dtype=torch.float64), state)
    members = zip(bench.cluster.local_workers, bench.states, strict=True)
    programs = [METHOD.average(worker, state) for worker, state in members]
    for average in bench.cluster.run(programs):
        assert isinstance(average, torch.Tensor)
        assert average.untyped_storage().nbytes() == 8 * length
