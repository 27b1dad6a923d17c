"""Loss scaling: residuals follow the scale, and all workers skip a step with an overflow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import Ddp, Hooks, Path, batches, loss_of, made, reports_overflow, weights
from tests.support.harness import run_workers

PATHS: dict[str, type[Path]] = {"ddp": Ddp, "hooks": Hooks}
SPARSE = {"method": "spardl", "density": 0.1, "bucket_mb": 0.0005}


def scaled(
    kind: str, options: dict[str, Any], bad: dict[int, int], steps: int = 8
) -> tuple[torch.Tensor, Any, GradScaler]:
    """Trains with a GradScaler; in some steps the gradient of a rank is infinite."""
    model = made("cnn", torch.float32)
    # With a large first scale, halved by an overflow, doubled after three good steps.
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    path = PATHS[kind](model, {**options, "scaler": scaler})
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank()
    for step, batch in enumerate(batches(model, range(8))):
        rule.zero_grad()
        harm = torch.inf if bad.get(step) == rank else 1.0

        def loss(model: Any, batch: torch.Tensor, harm: float = harm) -> torch.Tensor:
            return scaler.scale(loss_of(model, batch.float())) * harm

        path.backward([batch], loss)
        scaler.step(rule)
        scaler.update()
    return weights(model), path.handle, scaler


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "hooks"])
def test_an_overflow_is_skipped_by_all_and_training_recovers(kind: str) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[bool, float, bool]:
        found, handle, scaler = scaled(kind, SPARSE, {3: 1, 4: 0})
        residuals = torch.cat([group["memory"] for group in handle.state_dict()["groups"]])
        fine = bool(found.isfinite().all() and residuals.isfinite().all())
        rows = [torch.empty_like(found) for _ in range(cluster.size)]
        torch.distributed.all_gather(rows, found)
        return fine, scaler.get_scale(), all(torch.equal(row, found) for row in rows)

    # Three good steps double it, two overflows halve it twice, three good ones double it.
    assert run_workers(2, work) == [(True, 2.0**10, True)] * 2


@pytest.mark.parametrize("kind", ["hooks"])
def test_no_mass_is_lost_in_a_skipped_step(kind: str) -> None:
    """If one group overflows, averages of the other groups return to their residuals."""

    def work(cluster: ProcessGroupCluster) -> tuple[float, float]:
        parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
        scaler = GradScaler("cpu", init_scale=4.0)
        synchronizer = spardl.Synchronizer(parameters, "spardl", density=0.1, bucket_mb=64 * 4 / 2**20, scaler=scaler)
        given, taken = torch.zeros(64), torch.zeros(64)
        rank = cluster.local_ranks[0]
        for step in range(3):
            for number, parameter in enumerate(parameters):
                gradient = torch.randn(64, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))
                parameter.grad = None
                if step == 1 and number == 1 and rank == 0:
                    gradient[5] = torch.inf
                elif number == 0:
                    given += gradient
                parameter.backward(gradient)
            synchronizer.wait()
            if step != 1:
                taken += parameters[0].grad
            elif not parameters[1].grad.isinf().all():
                raise AssertionError("the scaler would not have seen the overflow")
        left = synchronizer.state_dict()["groups"][1]["memory"]
        return float(given.double().sum()), float((left.double() + taken.double()).sum())

    rows = run_workers(2, work)
    # The average is the mean of two workers, so each accounts for half of it.
    assert sum(row[0] for row in rows) == pytest.approx(sum(row[1] for row in rows), rel=1e-5)


@pytest.mark.slow
def test_residuals_follow_the_scale() -> None:
    """Scales are powers of two, so weights are those without a scale."""

    def same(options: dict[str, Any]) -> bool:
        found, _, scaler = scaled("hooks", options, {})
        assert scaler.get_scale() == 2.0**12
        model = made("cnn", torch.float32)
        path = Hooks(model, options)
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(model, range(8)):
            rule.zero_grad()
            path.backward([batch.float()])
            rule.step()
        return torch.equal(weights(model), found)

    def work(cluster: ProcessGroupCluster) -> dict[str, bool]:
        methods = ("spardl", "oktopk", "reused_threshold", "arc_topk_ef21")
        return {method: same({**SPARSE, "method": method}) for method in methods}

    for found in run_workers(2, work):
        assert all(found.values()), found


def test_a_fixed_threshold_takes_no_scaler() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        with pytest.raises(ConfigError) as caught:
            spardl.Synchronizer(made("cnn").named_parameters(), "threshold", scaler=GradScaler("cpu"))
        return str(caught.value)

    assert all("uses a fixed threshold" in each for each in run_workers(1, work))


def test_overflow_without_scaler_is_skipped_and_counted() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[bool, int]:
        parameter = torch.nn.Parameter(torch.zeros(10))
        synchronizer = spardl.Synchronizer([parameter], "spardl", density=0.5)
        for _ in range(2):
            first = synchronizer.stats().steps == 0
            parameter.grad = None
            parameter.backward(torch.full((10,), torch.inf if cluster.local_ranks[0] else 1.0))
            with reports_overflow(first and cluster.local_ranks[0]):
                synchronizer.wait()
        return bool(parameter.grad.isfinite().all()), synchronizer.stats().refused

    assert run_workers(2, work) == [(True, 2)] * 2


def test_overflowing_sum_reaches_scaler_and_returns_to_residual() -> None:
    """Each worker's gradient fits into the type, but their sum does not."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(10, dtype=torch.float16))
        scaler = GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(1))
        synchronizer = spardl.Synchronizer([parameter], "topka", density=1.0, scaler=scaler)
        found = []
        for gradient in (4e4, 4.0, 4.0):
            parameter.grad = None
            parameter.backward(torch.full((10,), gradient).half())
            with reports_overflow(gradient > 4):
                synchronizer.wait()
            assert parameter.grad is not None
            found.append(float(parameter.grad[0]))
            scaler.update(1.0)
        return found

    for first, second, third in run_workers(2, work):
        # Half of the largest value for two workers, at 1/64 of the scale.
        assert (first, third) == (torch.inf, 4.0)
        assert 65504 / 2 / 64 < second < 65504 / 2 / 64 + 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "hooks"])
@pytest.mark.parametrize("cut", [4, 6], ids=["after a skipped step", "after a good one"])
def test_the_state_round_trip(kind: str, cut: int) -> None:
    """A handle and its scaler resume bit-exactly."""

    def work(cluster: ProcessGroupCluster) -> bool:
        def begun(scale: float) -> tuple[Any, Path, GradScaler, torch.optim.Optimizer]:
            model = made("cnn", torch.float32)
            scaler = GradScaler("cpu", init_scale=scale, growth_interval=3)
            path = PATHS[kind](model, {**SPARSE, "scaler": scaler})
            return model, path, scaler, torch.optim.SGD(model.parameters(), lr=0.1)

        def run(parts: tuple[Any, Path, GradScaler, torch.optim.Optimizer], steps: range) -> None:
            model, path, scaler, rule = parts
            for step, batch in zip(steps, batches(model, steps), strict=True):
                harm = torch.inf if step == 3 and cluster.local_ranks[0] == 1 else 1.0
                rule.zero_grad()
                path.backward([batch], lambda model, batch: scaler.scale(loss_of(model, batch.float())) * harm)  # noqa: B023
                scaler.step(rule)
                scaler.update()

        straight, resumed = begun(2.0**10), begun(2.0**4)
        run(straight, range(cut))
        for mine, theirs in zip(resumed[:1] + resumed[2:], straight[:1] + straight[2:], strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        resumed[1].handle.load_state_dict(straight[1].handle.state_dict())
        run(straight, range(cut, 9))
        run(resumed, range(cut, 9))
        return torch.equal(weights(straight[0]), weights(resumed[0]))

    assert run_workers(2, work) == [True, True]
