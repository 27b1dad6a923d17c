"""Detaching a method and attaching another: torch's hook stays, and no residual is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import Ddp, batches, loss_of, made, train, weights
from tests.support.harness import run_workers

WORKERS = 3
FIRST: dict[str, Any] = {"method": "spardl", "density": 0.1}
SECOND: dict[str, Any] = {"method": "topka", "density": 0.3, "bucket_mb": 0.001}  # also other groups


class Counted:
    """Steps of a DDP model, with the sums of all gradients and of all averages."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(40, 20).double()
        self.ddp = DistributedDataParallel(self.model)
        self.given, self.taken = torch.zeros(820).double(), torch.zeros(820).double()

    def step(self, number: int, scale: float = 1.0) -> None:
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())).double()
        alone = torch.autograd.grad(self.model(inputs).square().sum(), list(self.model.parameters()))
        self.given += torch.cat([gradient.flatten() for gradient in alone])
        self.ddp.zero_grad()
        (self.ddp(inputs).square().sum() * scale).backward()
        average = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]) / scale  # type: ignore[union-attr]
        self.taken += average
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01 / scale)  # type: ignore[arg-type]

    def lost(self, handle: Any) -> float:
        """Returns the largest difference between the sums of gradients and of averages plus residuals."""
        carried = torch.cat([group["memory"] for group in handle.state_dict()["groups"]])  # the bias comes first
        assert carried.any()
        lost = self.given - self.taken - torch.cat([carried[20:], carried[:20]])
        dist.all_reduce(lost)
        return float(lost.abs().max())


def equal_everywhere(mine: Tensor) -> bool:
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return all(torch.equal(row, mine) for row in rows)


@pytest.mark.parametrize("between", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_another_method_inherits_the_residual(between: int) -> None:
    def work(cluster: ProcessGroupCluster) -> list[float]:
        job = Counted()
        first = spardl.attach(job.ddp, **FIRST)
        for number in range(5):
            job.step(number)
        found = [job.lost(first)]
        first.detach()
        spardl.attach(job.ddp, **SECOND).detach()  # makes no step and loses nothing
        for number in range(5, 5 + between):  # dense averages, while the residual is kept
            job.step(number)
            exact = torch.cat([parameter.grad.flatten() for parameter in job.model.parameters()])  # type: ignore[union-attr]
            assert exact.count_nonzero() == 820
        second = spardl.attach(job.ddp, **SECOND)
        for number in range(10, 15):
            job.step(number)
            assert job.model.weight.grad.count_nonzero() < 800  # type: ignore[union-attr]
        found.append(job.lost(second))
        assert first.state_dict() == {}
        assert [first.stats().steps, second.stats().steps] == [5, 5]
        assert equal_everywhere(weights(job.model))
        return found

    for rank in run_workers(WORKERS, work):
        assert rank == pytest.approx([0, 0], abs=1e-12)


def test_a_method_without_a_residual_drops_it() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        plain, model = made("cnn"), made("cnn")
        path = Ddp(model, FIRST)
        path.backward(batches(model, [0]))
        path.handle.detach()
        path.handle = spardl.attach(path.called, "none")
        return bool(torch.allclose(train(path, model, range(3)), train(Ddp(plain, None), plain, range(3)), rtol=1e-12))

    assert all(run_workers(2, work))


def test_the_residual_follows_the_scale_of_a_scaler() -> None:
    def work(cluster: ProcessGroupCluster) -> float:
        job = Counted()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        first = spardl.attach(job.ddp, scaler=scaler, **FIRST)
        for number in range(3):
            job.step(number, scaler.get_scale())
        first.detach()
        second = spardl.attach(job.ddp, **SECOND)
        job.step(3)
        return job.lost(second)

    assert run_workers(2, work) == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.slow
def test_loaded_unused_state_is_saved_again() -> None:
    def work(cluster: ProcessGroupCluster) -> float:
        job = Counted()
        first = spardl.attach(job.ddp, **FIRST)
        job.step(0)
        state = first.state_dict()
        first.load_state_dict({})
        first.detach()
        second = spardl.attach(job.ddp, **FIRST)
        second.load_state_dict(state)
        second.detach()
        third = spardl.attach(job.ddp, **SECOND)
        job.step(1)
        return job.lost(third)

    assert run_workers(2, work) == pytest.approx([0, 0], abs=1e-12)


def test_hooks_that_torch_never_removes() -> None:
    """A handle in use, and another library's hook."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        ours, theirs = Ddp(made("cnn"), FIRST), Ddp(made("cnn"), None)
        theirs.called.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[operator]
        said = []
        for path in (ours, theirs):
            with pytest.raises(ConfigError) as error:
                spardl.attach(path.called)
            said.append(str(error.value))
        (batch,) = batches(made("cnn"), [0])
        loss_of(ours.called, batch).backward()
        return said

    assert run_workers(1, work) == [
        [
            "this model already has a handle; call its detach() before attach()",
            "this model already has another communication hook, which torch cannot unregister; wrap the module "
            "in a new DistributedDataParallel",
        ]
    ]


@pytest.mark.slow
def test_detach_before_connections_exist() -> None:
    """One worker detaches before another has connected to it."""

    def work(cluster: ProcessGroupCluster) -> int:
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        for _ in range(20):
            spardl.attach(ddp).detach()
        return 1

    assert run_workers(WORKERS, work) == [1] * WORKERS
