"""Small models and training loops shared by the tests of all handles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl

STEPS = 20
# A loss of a model on a batch.
Loss = Callable[[nn.Module, Tensor], Tensor]


class Cnn(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)


class Transformer(nn.Module):
    """One attention layer whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.embed(words)) @ self.embed.weight.T

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randint(20, (size, 6), generator=generator)


MODELS: dict[str, type[Any]] = {"cnn": Cnn, "transformer": Transformer}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns a loss that depends on all weights, as a mean over the examples."""
    out = model(batch)
    if out.dim() == 2:
        return F.cross_entropy(out, batch.abs().sum((1, 2, 3)).long() % out.shape[1])
    return F.cross_entropy(out.flatten(0, 1), batch.flatten())


def made(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(5)
    return MODELS[kind]().to(dtype)


def batches(model: Any, steps: Iterable[int], size: int = 4) -> list[Tensor]:
    """Returns this rank's batches of some steps."""
    rank = dist.get_rank()
    return [model.batch(size, torch.Generator().manual_seed(1000 * step + rank)) for step in steps]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@contextmanager
def reports_overflow(here: object) -> Iterator[None]:
    """Expects one warning about a non-finite gradient if it was ``here``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(each.message)[:7] for each in caught] == ["spardl:"] * bool(here)


class Path:
    """One way to average gradients of a model.

    Args:
        model: to be trained.
        options: of the method; ``None`` for DDP as it is.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        self.called: nn.Module = model
        self.handle: Any = None

    def backward(self, parts: list[Tensor], loss: Loss = loss_of) -> None:
        """Runs the backward passes of a step."""
        raise NotImplementedError


class Ddp(Path):
    """The hook of DDP."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None, **ddp: Any) -> None:
        self.called = DistributedDataParallel(model, **ddp)
        self.handle = None if options is None else spardl.attach(self.called, **options)

    def backward(self, parts: list[Tensor], loss: Loss = loss_of) -> None:
        with self.called.no_sync():
            for part in parts[:-1]:
                (loss(self.called, part) / len(parts)).backward()
        (loss(self.called, parts[-1]) / len(parts)).backward()


class Hooks(Path):
    """The synchronizer without DDP."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        self.called = model
        self.handle = spardl.Synchronizer(model.named_parameters(), **(options or {}))

    def backward(self, parts: list[Tensor], loss: Loss = loss_of) -> None:
        with self.handle.no_sync():
            for part in parts[:-1]:
                (loss(self.called, part) / len(parts)).backward()
        with self.handle:
            (loss(self.called, parts[-1]) / len(parts)).backward()


class Collective(Path):
    """One ``all_reduce`` call for each parameter, with residuals kept by the caller."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        self.called, self._options = model, options or {}
        self.residuals = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def backward(self, parts: list[Tensor], loss: Loss = loss_of) -> None:
        for part in parts:
            (loss(self.called, part) / len(parts)).backward()
        for number, parameter in enumerate(self.called.parameters()):
            reduced = spardl.all_reduce(parameter.grad + self.residuals[number], **self._options)
            parameter.grad, self.residuals[number] = reduced.average, reduced.residual


def train(
    path: Path,
    model: Any,
    steps: Iterable[int] = range(STEPS),
    passes: int = 1,
    loss: Loss = loss_of,
    **optimizer: Any,
) -> Tensor:
    """Trains, and returns all weights."""
    rule = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **optimizer})
    for batch in batches(model, steps):
        rule.zero_grad()
        path.backward(list(batch.split(len(batch) // passes)), loss)
        rule.step()
    return weights(model)
