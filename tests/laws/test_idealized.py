"""The ideal method, on which ideas are tried, does what its rows say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from scripts.idealized import SQUARES, VARIANTS, WORKERS, Variant, Workers
from tests.support.labs import ROOT

SHAPES = [torch.Size((20, 10)), torch.Size((10,)), torch.Size((30, 10))]
ENTRIES = 510


def gradients(steps: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(WORKERS, ENTRIES, generator=source) for _ in range(steps)]


def test_at_density_1_it_is_torch_s_own_adam() -> None:
    """Of the average of all gradients."""
    weights = nn.Parameter(torch.zeros(ENTRIES))
    adam = torch.optim.AdamW([weights], lr=1.0, betas=(0.0, SQUARES), weight_decay=0.0)
    workers, total = Workers(VARIANTS["dense"], SHAPES), torch.zeros(ENTRIES)
    for step, each in enumerate(gradients(5), start=1):
        weights.grad = each.mean(0)
        adam.step()
        update, sent = workers.average(each, step)
        total -= update
        assert sent == ENTRIES
    torch.testing.assert_close(total, weights.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("raw", [False, True])
def test_what_is_not_sent_stays(raw: bool) -> None:
    """Sent and left add up to what was put in, where nothing decays."""
    variant = Variant(density=0.1, decay=1.0, frozen_after=1, raw=raw)
    workers, sent = Workers(variant, SHAPES), torch.zeros(ENTRIES)
    # The average before Adam: what it is made of.
    workers.adam = lambda average, step: average  # type: ignore[method-assign]
    batch = gradients(1)[0]
    roots = torch.ones(1) if raw else batch.abs() + 1e-8
    for step in range(1, 6):
        update, count = workers.average(batch, step)
        sent += update * WORKERS
        assert count == ENTRIES // 10
    torch.testing.assert_close(sent + workers.residual.sum(0), 5 * (batch / roots).sum(0), rtol=1e-4, atol=1e-4)


def test_quotas_and_exemptions() -> None:
    sizes = torch.rand(ENTRIES, generator=torch.Generator().manual_seed(1))
    sizes[:200] += 1
    free = Workers(Variant(density=0.1), SHAPES).choice(sizes)
    quota = Workers(Variant(density=0.1, quota=True), SHAPES).choice(sizes)
    exempt = Workers(Variant(density=0.1, exempt=True), SHAPES).choice(sizes)
    borders = torch.tensor([200, 210])
    counts = [
        torch.bucketize(each, borders, right=True).bincount(minlength=3).tolist() for each in (free, quota, exempt)
    ]
    assert counts == [[51, 0, 0], [20, 1, 30], [51, 10, 0]]


def test_a_frozen_variance_and_inertia() -> None:
    first, second, third = gradients(3)
    frozen = Workers(Variant(frozen_after=1), SHAPES)
    frozen.average(first, 1)
    before = frozen.variance.clone()
    frozen.average(second, 2)
    assert torch.equal(frozen.variance, before)
    coasting, still = Workers(Variant(inertia=0.5, density=1.0), SHAPES), Workers(Variant(density=1.0), SHAPES)
    pairs = []
    for step, each in enumerate([first, third], start=1):
        pairs.append((coasting.average(each, step)[0].clone(), still.average(each, step)[0].clone()))
    torch.testing.assert_close(pairs[1][0], 0.5 * pairs[1][1] + 0.25 * pairs[0][1])


@pytest.mark.slow
def test_the_script_prints_a_row_for_each_rate_and_seed() -> None:
    words = ["--steps", "2", "--width", "8", "--only", "quota", "dense", "--seeds", "1", "2"]
    command = [sys.executable, "scripts/idealized.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows[:2]] == [["quota", "0.02", "1"], ["quota", "0.02", "2"]]
    assert [row[4] for row in rows[4:]] == ["100.00%"] * 4
    assert len(rows) == 8
    assert all(3 < float(row[3]) < 5 for row in rows)
