"""ARC-Top-K with EF21M: whole matrices as a reference, what its proof rests on, and hard cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import Dense
from spardl.compressors import ARCTopKEF21
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual
from spardl.protocol.programs import Worker
from tests.compressors.test_arc_topk import LAYOUT, drawn, kept
from tests.support.harness import NETWORK, Bench, same_bits, to_dense

METHOD = Method(ARCTopKEF21(density=0.2, sketch=2, seed=3), Dense(), NoResidual())


def bench(workers: int, dtype: torch.dtype = torch.float64, method: Method = METHOD) -> Bench:
    states = [method.init_state(LAYOUT, dtype) for _ in range(workers)]
    return Bench(method, spardl.clusters.SimulatedCluster(workers, NETWORK, count_local=False), states)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_equals_the_reference(workers: int, share: float) -> None:
    compressor = ARCTopKEF21(density=0.2, sketch=2, seed=3, share=share)
    found = bench(workers, method=Method(compressor, Dense(), NoResidual()))
    means, sent = (np.zeros((workers, LAYOUT.length)) for _ in range(2))
    for step in range(5):
        gradients = drawn(workers, 10 * workers + step)
        weight = share if step else 1.0
        means = (1 - weight) * means + weight * np.stack([gradient.numpy() for gradient in gradients])
        moved = means - sent
        sent = sent + np.where(kept(moved.sum(0), compressor, step), moved, 0)
        averages = found.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        np.testing.assert_allclose(to_dense(averages[0]), sent.mean(0), rtol=1e-10, atol=1e-14)


def test_at_density_1_it_is_the_running_mean() -> None:
    found = bench(3, method=Method(ARCTopKEF21(density=1.0, share=0.25), Dense(), NoResidual()))
    expected = torch.zeros(LAYOUT.length, dtype=torch.float64)
    for step in range(4):
        gradients = drawn(3, step)
        expected = torch.lerp(expected, torch.stack(gradients).mean(0), 0.25 if step else 1.0)
        torch.testing.assert_close(to_dense(found.step(gradients)[0]), expected)


def test_what_does_not_change_arrives() -> None:
    """Of gradients that stay, nothing is left behind, and nothing comes twice, however few rows a step sends."""
    found, gradients = bench(4), drawn(4, 7)
    wanted, left = torch.stack(gradients).mean(0), []
    for _ in range(40):
        average = to_dense(found.step(gradients)[0])
        left.append(float((average - wanted).norm() / wanted.norm()))
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(left))
    assert left[0] > 0.5
    assert left[-1] < 1e-10


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    found, gradients = bench(2), drawn(2, 1)
    found.step(gradients)
    average = to_dense(found.step([gradients[0] * float("nan"), gradients[1]])[0])
    assert average.isfinite().all()
    assert found.states[0].refused == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_numbers_do_not_stay_forever(dtype: torch.dtype) -> None:
    """Sums that overflow are cut, and what follows is finite."""
    found, most = bench(3, dtype), torch.finfo(dtype).max
    for sign in (1, -1, 1):
        found.step([torch.full((LAYOUT.length,), sign * most, dtype=dtype) for _ in range(3)])
    for _ in range(3):
        averages = found.step([torch.ones(LAYOUT.length, dtype=dtype) for _ in range(3)])
        assert all(same_bits(average, averages[0]) for average in averages)
        assert to_dense(averages[0]).isfinite().all()


def test_it_resumes_but_restarts_with_another_world_size() -> None:
    one, other = bench(2), bench(2)
    for step in range(2):
        one.step(drawn(2, step))
    for mine, theirs in zip(other.states, one.states, strict=True):
        mine.load_state_dict(theirs.state_dict())
    assert same_bits(one.step(drawn(2, 5))[0], other.step(drawn(2, 5))[0])
    more, saved = bench(3), [state.state_dict() for state in one.states]
    for rank, state in enumerate(more.states):
        state.adopt([saved[rank % 2]], Worker(rank, 3), 2)
    assert not to_dense(more.step([torch.zeros(LAYOUT.length, dtype=torch.float64)] * 3)[0]).any()


@pytest.mark.parametrize("share", [0, 1.5, "much"])
def test_bad_shares(share: object) -> None:
    with pytest.raises(ConfigError, match=r"compressor.share must be above 0 and at most 1, got .*; 0.1 is a momentum"):
        spardl.make_method("arc_topk_ef21", share=share)


def test_a_residual_would_count_twice() -> None:
    with pytest.raises(ConfigError, match=r"residual=local does not fit compressor=arc_topk_ef21 .*use residual=none"):
        Method(ARCTopKEF21(), Dense(), LocalResidual())
