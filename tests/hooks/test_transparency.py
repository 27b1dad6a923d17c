"""At density 1, every handle trains like DDP in all kinds of loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import Collective, Ddp, Hooks, Path, batches, loss_of, made, train, weights
from tests.support.harness import run_workers

PATHS: dict[str, type[Path]] = {"ddp": Ddp, "hooks": Hooks, "collective": Collective}
ALL = {"method": "spardl", "density": 1.0}


def close(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=1e-11, atol=1e-13))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("ddp", "cnn"),
        *(
            pytest.param(path, kind, marks=pytest.mark.slow)
            for path in PATHS
            for kind in ("cnn", "transformer")
            if (path, kind) != ("ddp", "cnn")
        ),
    ],
)
def test_density_1_is_plain_ddp(path: str, kind: str) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[bool, bool]:
        plain, one, several = made(kind), made(kind), made(kind)
        expected = train(Ddp(plain, None), plain)
        options = ALL if path == "collective" else {**ALL, "bucket_mb": 0.001}
        found = train(PATHS[path](one, options), one)
        # Four micro-batches are one batch.
        parts = train(PATHS[path](several, options), several, passes=4)
        return close(found, expected), close(parts, expected)

    assert run_workers(2, work) == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(workers: int) -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        plain, one = made("cnn"), made("cnn")
        return close(train(Ddp(one, ALL), one), train(Ddp(plain, None), plain))

    assert all(run_workers(workers, work))


@pytest.mark.slow
def test_two_models_do_not_interfere() -> None:
    """Two models trained alternately give the results of separate trainings."""

    def work(cluster: ProcessGroupCluster) -> bool:
        options = {"method": "spardl", "density": 0.1, "bucket_mb": 0.001}
        alone = [made("cnn"), made("transformer")]
        expected = [train(Ddp(model, options), model, range(6)) for model in alone]
        models = [made("cnn"), made("transformer")]
        paths: list[Path] = [Ddp(models[0], options), Ddp(models[1], options)]
        rules = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(6):
            for model, path, rule in zip(models, paths, rules, strict=True):
                rule.zero_grad()
                path.backward(batches(model, [step]))
                rule.step()
        return all(torch.equal(weights(model), one) for model, one in zip(models, expected, strict=True))

    assert all(run_workers(2, work))


class Halves(nn.Module):
    """Uses two layers alternately, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.turn = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.turn += 1
        return self.layers[self.turn % 2](inputs)

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(size, 4, generator=generator, dtype=torch.float64)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ddp",
    [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def test_ddp_features(ddp: dict[str, Any]) -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        found = []
        for options in (None, {**ALL, "bucket_mb": 0.0001}):
            torch.manual_seed(5)
            model: Any = Halves().double() if "find_unused_parameters" in ddp else made("cnn")
            path = Ddp(model, options, **ddp)
            loss = square if isinstance(model, Halves) else loss_of
            found.append(train(path, model, range(8), loss=loss, weight_decay=0.1))
        return close(*found)

    assert all(run_workers(2, work))


@pytest.mark.slow
def test_unused_parameters_stay_unchanged() -> None:
    """Also without DDP: weight decay must not change parameters without a gradient."""

    def work(cluster: ProcessGroupCluster) -> bool:
        found = []
        for kind in (Ddp, Hooks):
            torch.manual_seed(5)
            model: Any = Halves().double()
            path = Ddp(model, None, find_unused_parameters=True) if kind is Ddp else Hooks(model, ALL)
            found.append(train(path, model, range(8), loss=square, weight_decay=0.1))
        return close(*found)

    assert all(run_workers(2, work))
