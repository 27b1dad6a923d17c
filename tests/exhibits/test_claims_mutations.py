"""A broken method turns a verdict: small trainings, judged as claims are, with this library and without parts of it.

Three workers look for the least of a sum of squares. Each has gradients of its own that do not vanish there, large in
a few entries, which cancel over the workers, as those of workers with different data do: what is selected says little,
and what waits is all that leads there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.exhibits import base, jobs
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims import judging
from scripts.exhibits.claims.catalogue import load_all
from scripts.exhibits.kinds import trainings
from spardl.method import method
from spardl.method.method import Method, MethodState
from spardl.method.residuals import GlobalResidual
from spardl.vector.sparse import SparseVector
from tests.support import harness

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("composing")]

WORKERS, LENGTH, DENSITY, SEEDS = 3, 200, 0.1, (1, 2, 3)
STEPS, LR = 200, 0.03  # more than are needed to judge; a third of what still converges when ten steps late
FLOOR = 1.0  # of the loss
AGAINST = 14  # entries in which workers pull against each other; 20 are sent


def final_loss(made: Method, seed: int, steps: int) -> float:
    source = torch.Generator().manual_seed(seed)
    weights = torch.randn(LENGTH, generator=source, dtype=torch.float64).sign()
    own = torch.zeros(WORKERS, LENGTH, dtype=torch.float64)
    own[:, :AGAINST] = 10 * torch.randn(WORKERS, AGAINST, generator=source, dtype=torch.float64)
    own -= own.mean(0)
    bench = harness.Bench.build(made, WORKERS, LENGTH)
    for _ in range(steps):
        average = bench.step([weights + each for each in own])[0]
        weights -= LR * (average.dense() if isinstance(average, SparseVector) else average)
    return FLOOR + weights.square().mean().item()


@cache
def dense(steps: int) -> list[float]:
    return [final_loss(harness.dense(), seed, steps) for seed in SEEDS]


def judged(steps: int = STEPS) -> Any:
    """The claim of SparDL's accuracy, of trainings that are these ones."""
    case = trainings.Case("squares", ("cluster.workers=3",), "", True, known=trainings.Known(1.001 * FLOOR, "by hand"))
    sparse = (f"compressor.density={DENSITY}",)
    plan = trainings.Plan((case,), (), SEEDS, "", only=("SparDL", "dense"), sparse=sparse)
    exhibit = replace(catalogue()["spardl.convergence"], plans={"paper": plan})
    losses = [*(final_loss(harness.spardl(DENSITY), seed, steps) for seed in SEEDS), *dense(steps)]
    found = {
        job: jobs.Outcome(Path("x"), {"metric": "loss", "final": {"loss": loss}, "best": loss, "steps": steps})
        for job, loss in zip(exhibit.jobs("paper"), losses, strict=True)
    }
    (claim,) = (each for each in load_all() if each.name == "SparDL: accuracy against dense")
    claim = replace(claim, also=())
    return judging.judge(claim, {claim.exhibit: exhibit}, "paper", base.Results(Path("x"), found)).finding


KEEP = GlobalResidual.keep


def kept(share: float) -> Callable[..., None]:
    def keep(self: GlobalResidual, accumulated: Any, final: Tensor) -> None:
        KEEP(self, accumulated, final)
        accumulated.values.mul_(share)

    return keep


def divided_twice(total: Tensor, workers: int, state: MethodState) -> Tensor:
    return total / workers**2


@pytest.mark.parametrize(
    ("target", "name", "mutant"),
    [
        (GlobalResidual, "keep", kept(0.0)),
        (GlobalResidual, "keep", kept(0.5)),
        (method, "_limited", divided_twice),
    ],
    ids=["residual dropped", "mass halved", "average scaled"],
)
def test_what_is_broken_is_not(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, mutant: Any) -> None:
    monkeypatch.setattr(target, name, mutant)
    finding = judged()
    assert finding.verdict.name == "NOT"
    assert "beyond the spread of seeds" in finding.reason


@pytest.mark.parametrize(
    ("steps", "verdict", "reason"),
    [
        (STEPS, "REPRODUCED", "squares: no loss of more than 1%"),
        (math.ceil(9 / DENSITY), "UNJUDGED", "too short: 90 steps where 100 are needed"),
    ],
    ids=["whole", "too early"],  # though the figures are bad then: an entry of average size was sent nine times
)
def test_what_is_whole_is_reproduced_when_long_enough(steps: int, verdict: str, reason: str) -> None:
    finding = judged(steps)
    assert finding.verdict.name == verdict
    assert finding.reason.startswith(reason)
