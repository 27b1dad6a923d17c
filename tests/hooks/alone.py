"""A small model for local training between exchanges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OPTIONS", "backward", "batch", "made", "rule", "weights"]

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


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def rule(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)
