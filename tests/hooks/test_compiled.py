"""Compiled models and autocast: every handle trains like DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import Ddp, Hooks, Path, batches, loss_of, made, train, weights
from tests.hooks.test_transparency import ALL, close
from tests.support.harness import run_workers

pytestmark = pytest.mark.slow

STEPS = range(6)
OPTIONS = {**ALL, "bucket_mb": 0.001}


def outside(kind: type[Path], model: nn.Module, options: dict[str, Any] | None) -> Path:
    """Compiles the wrapped model: torch splits the graph where DDP buckets end."""
    path = kind(model, options)
    path.called = torch.compile(path.called, backend="aot_eager")  # type: ignore[assignment]
    return path


def inside(kind: type[Path], model: nn.Module, options: dict[str, Any] | None) -> Path:
    """Compiles the model, then wraps it."""
    return kind(torch.compile(model, backend="aot_eager"), options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "way"), [("cnn", inside), ("transformer", outside)])
def test_compiled_models(kind: str, way: Callable[..., Path]) -> None:
    def work(cluster: ProcessGroupCluster) -> list[bool]:
        plain = made(kind)
        expected = train(Ddp(plain, None), plain, STEPS)
        found = []
        for path in (Ddp, Hooks):
            torch._dynamo.reset()
            model = made(kind)
            found.append(close(train(way(path, model, OPTIONS), model, STEPS, passes=2), expected))
            found.append(bool(counters["frames"]["ok"]))  # something was compiled
        return found

    assert run_workers(2, work, 120) == [[True] * 4] * 2


def autocast(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch if batch.dtype == torch.int64 else batch.float())


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_autocast(kind: str) -> None:
    """Gradients of bfloat16 passes are float32; a single group is summed as DDP sums its bucket."""

    def work(cluster: ProcessGroupCluster) -> tuple[bool, float]:
        models = [made(kind, torch.float32) for _ in range(3)]
        paths = [Ddp(models[0], None), Ddp(models[1], ALL), Hooks(models[2], ALL)]
        expected, *found = [train(path, model, STEPS, loss=autocast) for path, model in zip(paths, models, strict=True)]
        moved = (weights(made(kind, torch.float32)) - expected).norm()
        return all(torch.allclose(each, expected, rtol=1e-4, atol=1e-5) for each in found), float(moved)

    for same, moved in run_workers(2, work):
        assert same
        assert moved > 0.01


def frames(kind: str) -> int:
    """Trains a few steps, each compiled as a whole, and returns how many frames torch.compile traced."""
    torch._dynamo.reset()
    counters.clear()
    model = made("cnn")
    rule = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"method": "spardl", "density": 0.1, "optimizer": rule}
    path = (Hooks if kind == "Synchronizer" else Ddp)(model, None if kind == "plain" else options)

    def step(batch: Tensor) -> None:
        rule.zero_grad()
        path.backward([batch])
        rule.step()

    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile reads .grad of non-leaf tensors
        for batch in batches(model, range(5)):
            compiled(batch)
    assert counters["frames"]["ok"]
    return counters["frames"]["total"]


def test_hooks_are_not_traced_in_a_compiled_step() -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        return [frames(kind) for kind in ("plain", "attach", "Synchronizer")]

    for plain, attached, synchronized in run_workers(2, work, 120):
        assert attached <= plain + 5
        assert synchronized <= plain + 5
