"""Golden results of handles: weights and saved states stay the same when the code changes.

See ``tests/golden/test_golden.py``. Version 0.1.0 saved the states in ``tests/golden/handles`` after three of six
steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from spardl.clusters import ProcessGroupCluster
from tests.golden.test_golden import GOLDEN, HALF_ELSEWHERE, Book, bits_depend_on
from tests.hooks.loops import Ddp, Hooks, Path, batches, loss_of, made, weights
from tests.support.harness import run_workers
from tests.support.quick import some_quick

KINDS: dict[str, type[Path]] = {"attach": Ddp, "Synchronizer": Hooks}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none", "bucket_mb": 0.001},
    "spardl": {"method": "spardl", "density": 0.1, "bucket_mb": 0.001},
    "oktopk": {"method": "oktopk", "density": 0.1, "bucket_mb": 0.002},
    "dgc": {"method": "dgc", "density": 0.1},
    "powersgd": {"method": "powersgd", "rank": 1, "bucket_mb": 0.001},
    "random_block": {"method": "random_block", "density": 0.2, "bucket_mb": 0.001},
}
SAVED = GOLDEN / "handles"
STEPS, HALF = 6, 3


@pytest.fixture(scope="module")
def book() -> Iterator[Book]:
    book = Book("handles")
    yield book
    book.save()


def compare(name: str, found: list[torch.Tensor], book: Book) -> None:
    """Compares weights with the golden digest, on other machines with the norm, up to rounding."""
    assert all(torch.equal(each, found[0]) for each in found)
    digest = hashlib.sha256(found[0].numpy().tobytes()).hexdigest()
    norm = float(found[0].double().norm())
    if book.writing:
        known = book.figures.get(name, {}).get("digests", {})
        book.figures[name] = {"norm": norm, "digests": {**known, bits_depend_on(): digest}}
    entry = book.figures[name]
    assert norm == pytest.approx(entry["norm"], rel=1e-6)
    assert digest == entry["digests"].get(bits_depend_on(), digest)


class Training:
    """Training of one worker, optionally with two gradient types and a loss scale."""

    def __init__(self, kind: str, options: dict[str, Any], *, mixed: bool = False, scaled: bool = False) -> None:
        self.model = made("cnn", torch.float32 if scaled else torch.float64)
        if mixed:
            self.model.head = nn.Sequential(Rounding(), self.model.head.float())
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        self.path = KINDS[kind](self.model, {**options, "scaler": self.scaler})
        self.rule = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def run(self, steps: range) -> None:
        for batch in batches(self.model, steps):
            self.rule.zero_grad()
            kept = batch.to(next(self.model.parameters()).dtype)
            self.path.backward([kept], lambda model, part: self.scaler.scale(loss_of(model, part).float()))
            self.scaler.step(self.rule)
            self.scaler.update()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.rule, self.path.handle


class Rounding(nn.Module):
    """Continues in another dtype."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()


@pytest.mark.parametrize(("kind", "method"), some_quick(product(KINDS, OPTIONS), 5))
def test_weights(kind: str, method: str, book: Book) -> None:
    def work(cluster: ProcessGroupCluster) -> torch.Tensor:
        training = Training(kind, OPTIONS[method])
        training.run(range(STEPS))
        return weights(training.model)

    compare(f"{kind} {method}", run_workers(2, work), book)


@pytest.mark.parametrize("how", ["mixed", "scaled"])
@pytest.mark.parametrize("kind", KINDS)
def test_types_and_scales(kind: str, how: str, book: Book) -> None:
    def work(cluster: ProcessGroupCluster) -> torch.Tensor:
        training = Training(kind, OPTIONS["spardl"], **{how: True})
        training.run(range(STEPS))
        return torch.cat([parameter.detach().double().flatten() for parameter in training.model.parameters()])

    compare(f"{kind} {how}", run_workers(2, work), book)


@pytest.mark.parametrize("method", ["spardl", "powersgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues(kind: str, method: str, book: Book) -> None:
    def work(cluster: ProcessGroupCluster) -> torch.Tensor:
        training = Training(kind, OPTIONS[method])
        file = SAVED / f"{kind}-{method}-{cluster.local_ranks[0]}.pt"
        if book.writing and not file.exists():
            training.run(range(HALF))
            torch.save([part.state_dict() for part in training.parts], file)
        else:
            for part, values in zip(training.parts, torch.load(file, weights_only=True), strict=True):
                part.load_state_dict(values)
        training.run(range(HALF, STEPS))
        return weights(training.model)

    compare(f"{kind} {method} {HALF_ELSEWHERE}", run_workers(2, work), book)
