"""Statements of docs/choosing-a-method.md about torch's own hooks. If a newer torch does better, change the page."""

from __future__ import annotations

import faulthandler
import io
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import WorkerError
from spardl.clusters import ProcessGroupCluster
from tests.support.harness import run_workers


class Two(nn.Module):
    """Two matrices and their biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(30, 40), nn.Linear(40, 30)

    def forward(self, points: Tensor) -> Tensor:
        return self.second(self.first(points).relu())


def _ddp(state: Any, model: nn.Module, hook: Any = powersgd.powerSGD_hook, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 10, **options})
    ddp.register_comm_hook(state, hook)
    return ddp


def _powersgd(**options: Any) -> powersgd.PowerSGDState:
    return powersgd.PowerSGDState(None, start_powerSGD_iter=2, **options)


def _backward(ddp: nn.Module, step: int, rank: int, factor: float = 1.0) -> bool:
    """Runs a backward pass, and returns whether all gradients are finite."""
    points = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * step + rank))
    ddp.zero_grad()
    (factor * ddp(points.to(next(ddp.parameters()).dtype)).square().mean()).backward()
    return all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters())  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}], ids=str)
def test_torch_powersgd_needs_one_bucket_and_no_find_unused(options: dict[str, Any]) -> None:
    def work(cluster: ProcessGroupCluster) -> None:
        faulthandler.disable()
        # It may hang in torch for longer than gloo's timeout, where no Python signal handler runs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(12)
        ddp = _ddp(_powersgd(), Two(), **options)
        for step in range(300):  # about every third step mixes up messages
            _backward(ddp, step, cluster.local_ranks[0])

    with pytest.raises(WorkerError):
        run_workers(2, work, timeout=5)


@pytest.mark.slow
def test_torch_batched_powersgd_fails_on_gloo() -> None:
    def work(cluster: ProcessGroupCluster) -> None:
        ddp = _ddp(_powersgd(), Two(), powersgd.batched_powerSGD_hook)
        for step in range(3):
            _backward(ddp, step, cluster.local_ranks[0])

    with pytest.raises(WorkerError, match="AssertionError"):
        run_workers(2, work, timeout=30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:spardl. rank 0 skipped or clipped a gradient in step 5")
def test_infinite_gradient_stays_in_torch_powersgd() -> None:
    def work(cluster: ProcessGroupCluster) -> list[list[bool]]:
        rank, ours = cluster.local_ranks[0], DistributedDataParallel(Two())
        spardl.attach(ours, "powersgd", rank=1)
        models = [_ddp(_powersgd(), Two()), ours]
        return [
            [_backward(ddp, step, rank, torch.inf if (step, rank) == (4, 0) else 1.0) for step in range(8)]
            for ddp in models
        ]

    for torchs, ours in run_workers(2, work):
        assert torchs == [True] * 4 + [False] * 4
        assert all(ours)


@pytest.mark.slow
def test_torch_powersgd_gives_nans_for_matrix_without_gradient() -> None:
    def work(cluster: ProcessGroupCluster) -> list[list[bool]]:
        found, ours = [], DistributedDataParallel(Two())
        spardl.attach(ours, "powersgd", rank=1)
        for ddp in (_ddp(_powersgd(), Two()), _ddp(_powersgd(orthogonalization_epsilon=1e-8), Two()), ours):
            nn.init.constant_(ddp.module.first.bias, -100)  # no unit is ever active
            found.append([_backward(ddp, step, cluster.local_ranks[0]) for step in range(4)])
        return found

    for default, *others in run_workers(2, work):
        assert default == [True, True, False, False]
        assert others == [[True] * 4] * 2


def _continued(make: Callable[[nn.Module, Any], tuple[nn.Module, Callable[[], Any]]], rank: int) -> bool:
    """Returns whether a saved and loaded training resumes bit-exactly."""

    def trained(ddp: nn.Module, steps: range) -> None:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in steps:
            _backward(ddp, step, rank)
            optimizer.step()

    def dumped(*values: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(values, file)
        return io.BytesIO(file.getvalue())

    one, other = Two().double(), Two().double()
    ddp, carried = make(one, None)
    trained(ddp, range(6))
    weights, saved = torch.load(dumped(one.state_dict(), carried()), weights_only=False)
    trained(ddp, range(6, 10))
    other.load_state_dict(weights)
    trained(make(other, saved)[0], range(6, 10))
    return all(map(torch.equal, one.parameters(), other.parameters()))


def _with_torch(model: nn.Module, saved: powersgd.PowerSGDState | None) -> tuple[nn.Module, Callable[[], Any]]:
    state = saved or _powersgd()
    return _ddp(state, model), lambda: state


def _with_ours(model: nn.Module, saved: dict[str, Any] | None) -> tuple[nn.Module, Callable[[], Any]]:
    ddp = DistributedDataParallel(model)
    handle = spardl.attach(ddp, "powersgd", rank=1)
    handle.load_state_dict(saved or {})
    return ddp, handle.state_dict


@pytest.mark.slow
def test_torch_powersgd_does_not_resume_exactly() -> None:
    """DDP's first bucket has the parameters in another order than in later steps."""

    def work(cluster: ProcessGroupCluster) -> tuple[bool, bool]:
        return tuple(_continued(make, cluster.local_ranks[0]) for make in (_with_torch, _with_ours))  # type: ignore[return-value]

    assert run_workers(2, work) == [(False, True)] * 2


@pytest.mark.slow
def test_fp16_overflows_and_vanishes() -> None:
    def work(cluster: ProcessGroupCluster) -> list[tuple[bool, bool]]:
        found = []
        for factor in (1e9, 1e-9):
            ddp = _ddp(None, Two(), default_hooks.fp16_compress_hook)
            finite = _backward(ddp, 0, cluster.local_ranks[0], factor)
            found.append((finite, any(bool(each.grad.any()) for each in ddp.parameters())))  # type: ignore[union-attr]
        return found

    assert run_workers(2, work) == [[(False, True), (True, False)]] * 2
