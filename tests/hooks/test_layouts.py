"""Parameters that are not row-major: DDP lays out their gradients in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method import AutoMomentum, GlobalResidual
from tests.hooks.loops import weights
from tests.support.harness import run_workers

STEPS = 6


class Odd(nn.Module):
    """A convolution in channels_last, a transposed matrix, and one with gaps."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 3).double()
        self.turned = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.gaps = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        if not plain:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.turned = nn.Parameter(self.turned.detach().t().contiguous().t())
            wide = torch.zeros(5, 8, dtype=torch.float64)
            wide[:, ::2] = self.gaps.detach()
            self.gaps = nn.Parameter(wide[:, ::2])

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv(images).mean((2, 3))
        return features @ (self.turned + self.gaps).t()


def trained(
    plain: bool, attached: Callable[[nn.Module, torch.optim.Optimizer], Any] | None, *, views: bool = False
) -> Tensor:
    model = Odd(plain=plain)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    handle = attached(ddp, optimizer) if attached else None
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        source = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=source)).square().mean().backward()
        optimizer.step()
    if handle is not None:
        handle.flush()
    return weights(model)


def whole(**more: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    method = spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), AutoMomentum())
    return lambda ddp, optimizer: spardl.attach(ddp, method, optimizer=optimizer, **more)


HANDLES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "none": lambda ddp, optimizer: spardl.attach(ddp, "none"),
    "moved": whole(),
    "dear": whole(schedule="dear"),
    "dense dear": lambda ddp, optimizer: spardl.attach(ddp, "none", schedule="dear", optimizer=optimizer),
}


def test_methods_that_send_everything_equal_ddp() -> None:
    def work(cluster: object) -> dict[str, float]:
        found = {}
        for views in (False, True):
            plain = trained(False, None, views=views)
            for name, attached in HANDLES.items():
                found[f"{name}, {views}"] = float((trained(False, attached, views=views) - plain).abs().max())
        return found

    for found in run_workers(2, work):
        assert max(found.values()) < 1e-12, found


def test_a_layout_changes_nothing() -> None:
    """Rows and columns are those of the parameter, not of its memory layout."""

    def difference(method: str, **options: Any) -> float:
        odd, plain = (trained(each, lambda ddp, _: spardl.attach(ddp, method, **options)) for each in (False, True))
        return float((odd - plain).abs().max())

    def work(cluster: object) -> dict[str, float]:
        sparse = ("arc_topk", "spardl", "random_block")
        return {"powersgd": difference("powersgd", rank=1)} | {each: difference(each, density=0.2) for each in sparse}

    for found in run_workers(2, work):
        assert max(found.values()) < 1e-12, found
