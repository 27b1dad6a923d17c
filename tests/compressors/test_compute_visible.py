"""Changes of weights that a forward pass in bfloat16 would see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spardl
from spardl.compressors.compute_visible import ComputeVisible
from spardl.protocol.programs import Context
from tests.support.harness import Bench, context, same_bits, selected, to_dense

# Between 1 and 2, neighboring bfloat16 values are 1/128 apart.
STEP = 2**-7


def chosen(weights: list[float], changes: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    at = Context(*context(len(changes))[:3], torch.tensor(weights, dtype=dtype))
    return selected(ComputeVisible(), torch.tensor(changes, dtype=dtype), 0, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selects_changes_beyond_half_a_step(dtype: torch.dtype) -> None:
    changes = [STEP / 2 * factor for factor in (0, 0.99, 1.01, -0.99, -1.01)]
    assert chosen([1 + STEP] * 5, changes, dtype) == [2, 4]
    assert chosen([256 * (1 + STEP)] * 5, changes, dtype) == []
    assert chosen([(1 + STEP) / 256] * 5, changes, dtype) == [1, 2, 3, 4]


def test_a_weight_near_the_border_of_two_values_needs_less() -> None:
    near = 1 + 1.49 * STEP
    assert chosen([near, near], [0.02 * STEP, -0.02 * STEP]) == [1]


def test_every_change_of_a_zero_is_visible_and_an_unchanged_weight_is_not() -> None:
    assert chosen([0.0, -0.0, 0.0, 1.0], [1e-30, -1e-30, 0.0, -0.0]) == [0, 1]
    assert selected(ComputeVisible(), torch.tensor([0.0, 1e-30, -1.0]), 0) == [1, 2]


def changed(workers: int) -> tuple[Bench, Tensor, list[Tensor]]:
    """A bench whose workers share weights, the weights, and a small change for each worker."""
    source = torch.Generator().manual_seed(3)
    weights = torch.randn(60, generator=source)
    changes = [torch.randn(60, generator=source) * 2e-3 for _ in range(workers)]
    bench = Bench.build(spardl.make_method("compute_visible"), workers, 60, torch.float32)
    for state in bench.states:
        # As tensors of the layout's shapes, which differ.
        state.weights = [weights[:28].view(7, 4), weights[28:31], weights[31:31], weights[31:]]
    return bench, weights, changes


def seen(weights: Tensor, change: Tensor) -> Tensor:
    """Where a change is visible, written in another way than in the compressor."""
    return (weights.bfloat16().view(torch.int16) != (weights - change).bfloat16().view(torch.int16)) & (change != 0)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_weights_in_bfloat16_equal_those_of_a_dense_exchange_of_visible_entries(workers: int) -> None:
    bench, weights, changes = changed(workers)
    averages = bench.step(changes)
    assert all(same_bits(each, averages[0]) for each in averages)
    masked = [torch.where(seen(weights, change), change, 0) for change in changes]
    assert 0 < sum(each.count_nonzero() for each in masked) < 60 * workers
    dense = masked[0].clone()
    for other in masked[1:]:
        dense += other
    dense /= workers
    assert torch.equal((weights - to_dense(averages[0])).bfloat16(), (weights - dense).bfloat16())
    assert torch.equal(to_dense(averages[0]), dense)
    for state, change, sent in zip(bench.states, changes, masked, strict=True):
        assert torch.equal(state.memory + sent, change), "an entry is either sent or kept, as it is"
        assert not (state.memory * sent).any()


def test_small_changes_are_sent_once_their_sum_is_visible() -> None:
    bench, weights, _ = changed(2)
    small = weights.abs() / 2000
    totals = torch.zeros(60)
    for _ in range(20):
        (average, _) = bench.step([small, small])
        totals += to_dense(average)
    torch.testing.assert_close(totals + bench.states[0].memory, 20 * small)
    assert (totals > 0).all()
    assert (bench.states[0].memory.abs() <= weights.abs() / 128).all()
