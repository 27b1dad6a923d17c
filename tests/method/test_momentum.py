"""Momentum rules, on worked examples and against torch."""

from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, Dense, SparDL
from spardl.compressors import NoCompression, TopK
from spardl.method.method import Method
from spardl.method.momentum import CorrectedMomentum, LocalMomentum, SgdMomentum
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual
from spardl.method.warmup import Warmup
from tests.support.harness import Bench, to_dense


@pytest.mark.parametrize(("field", "value"), [("factor", 1), ("factor", "a"), ("weight_decay", -1), ("nesterov", 1)])
def test_invalid_values(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"momentum.{field} must be"):
        LocalMomentum(**{field: value})


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_the_optimizer_without_compression(nesterov: bool) -> None:
    """SGD over averaged local momenta = SGD with momentum over averaged gradients."""
    mine, theirs = (torch.nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))
    method = Method(NoCompression(), Dense(), NoResidual(), LocalMomentum(0.9, nesterov=nesterov))
    bench = Bench.build(method, 3, 6)
    plain = torch.optim.SGD([mine], lr=0.1)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        gradients = [torch.randn(6, dtype=torch.float64) for _ in range(3)]
        mine.grad = to_dense(bench.step(gradients)[0])
        theirs.grad = torch.stack(gradients).mean(0)
        plain.step()
        reference.step()
        torch.testing.assert_close(mine, theirs)


def test_masking_resets_sent_entries() -> None:
    method = Method(TopK(0.5), AllGather(), LocalResidual(), CorrectedMomentum(0.5))
    bench = Bench.build(method, 1, 2)
    assert to_dense(bench.step([torch.tensor([4.0, 1.0]).double()])[0]).tolist() == [4, 0]
    (state,) = bench.states
    assert state.moments.velocity.tolist() == [0, 1]
    # Second step: velocity [1, 0.5 + 1], residual [0, 1] + velocity.
    assert to_dense(bench.step([torch.tensor([1.0, 1.0]).double()])[0]).tolist() == [0, 2.5]
    assert state.moments.velocity.tolist() == [1, 0]
    assert state.memory.tolist() == [1, 0]


def test_nonfinite_gradient_does_not_change_velocity() -> None:
    for method in (
        Method(TopK(0.5), AllGather(), LocalResidual(), CorrectedMomentum()),
        Method(NoCompression(), Dense(), NoResidual(), LocalMomentum()),
    ):
        bench = Bench.build(method, 2, 2)
        bench.step([torch.tensor([float("nan"), 1.0]).double(), torch.tensor([2.0, 4.0]).double()])
        assert bench.states[0].refused == 1
        assert bench.states[0].moments.velocity.tolist() == [0, 0]
        assert bench.states[0].memory.isfinite().all()


def test_masking_needs_a_sparse_compressor() -> None:
    with pytest.raises(ConfigError, match="momentum=local or momentum=optimizer"):
        Method(NoCompression(), Dense(), NoResidual(), CorrectedMomentum())


def test_first_steps_are_dense() -> None:
    method = Method(TopK(0.5), AllGather(), LocalResidual(), warmup=Warmup(2))
    bench = Bench.build(method, 2, 2)
    gradients = [torch.tensor([4.0, 1.0]).double(), torch.tensor([2.0, 1.0]).double()]
    for _ in range(2):
        assert to_dense(bench.step(gradients)[0]).tolist() == [3, 1]
        assert bench.residuals().tolist() == [0, 0]
    assert to_dense(bench.step(gradients)[0]).tolist() == [3, 0]
    with pytest.raises(ConfigError, match=r"warmup\.steps must be"):
        Warmup(-1)


def test_gain_conserves_mass() -> None:
    """Residuals and averages together are the gradients times the gain."""
    bench = Bench.build(Method(TopK(0.1), SparDL(), GlobalResidual(), SgdMomentum(0.0, gain=5.0)), 3, 40)
    given, sent = (torch.zeros(40, dtype=torch.float64) for _ in range(2))
    for _ in range(5):
        gradients = [torch.randn(40, dtype=torch.float64) for _ in range(3)]
        given += 5 * torch.stack(gradients).sum(0)
        sent += 3 * to_dense(bench.step(gradients)[0])
    torch.testing.assert_close(sent + sum(state.memory for state in bench.states), given)


def test_gain_that_overflows_is_clipped_and_counted() -> None:
    bench = Bench.build(Method(TopK(0.5), AllGather(), LocalResidual(), SgdMomentum(0.5, gain=4.0)), 1, 2)
    most = torch.finfo(torch.float64).max
    bench.step([torch.tensor([most / 2, 1.0]).double()])
    (state,) = bench.states
    assert state.refused == 1
    assert state.memory.isfinite().all()
    assert to_dense(bench.step([torch.tensor([0.0, 1.0]).double()])[0]).isfinite().all()
