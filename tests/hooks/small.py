"""Small models: in DDP, with methods that send everything and train like plain DDP; and without DDP."""

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

WHOLE = spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), AutoMomentum())
DENSE = spardl.make_method("none")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Loop:
    """A small model in DDP, and an optimizer of all or some of its parameters."""

    def __init__(self, method: spardl.Method | None, schedule: str = "wfbp", *, without: int = 0, **ddp: Any) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.ddp = DistributedDataParallel(self.model, **ddp)
        self.optimizer = sgd(list(self.model.parameters())[without:])
        self.handle: Any = None
        if method is not None:
            self.handle = spardl.attach(self.ddp, method, schedule=schedule, optimizer=self.optimizer)

    def backward(self, step: int) -> None:
        source = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        self.ddp(torch.randn(5, 4, dtype=torch.float64, generator=source)).square().mean().backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def end(self) -> Tensor:
        if self.handle is not None:
            self.handle.flush()
        return weights(self.model)


class Parts(nn.Module):
    """A model that can skip one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, inputs: Tensor, whole: bool) -> Tensor:
        return self.second(self.first(inputs)) if whole else self.first(inputs)


def apart(trained: Callable[[spardl.Method | None], Tensor]) -> list[float]:
    """Returns how far each method that sends everything ends from plain DDP."""
    plain = trained(None)
    return [float((trained(method) - plain).abs().max()) for method in (DENSE, WHOLE)]


# Methods and their options.
OPTIONS: dict[str, dict[str, Any]] = {
    "spardl": {"density": 0.2},
    "oktopk": {"density": 0.2},
    "powersgd": {"rank": 1},
    "none": {},
}


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    return (
        torch.randn(8, 6, generator=source, dtype=torch.float64),
        torch.randn(8, 1, generator=source, dtype=torch.float64),
    )


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    inputs, targets = batch(rank, step)
    (model(inputs) - targets).square().mean().backward()


def rule(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)
