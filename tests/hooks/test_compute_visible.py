"""Outer steps that send the changes of weights that a forward pass in bfloat16 would see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.schedules import AfterBackward, Dear, OuterSteps
from tests.hooks.alone import backward, made, weights
from tests.support.harness import run_workers, same_bits


def small_steps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001)


def test_equals_a_loop_over_all_workers() -> None:
    """With local SGD's outer step: anchors move by the average of each worker's visible entries."""

    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(
            model.named_parameters(), small_steps(model), "compute_visible", every=2, lr=1.0, momentum=0.0
        )
        found = []
        for step in range(8):
            backward(model, rank, step)
            outer.step()
            found.append(weights(model))
        outer.close()
        return found

    models = [made() for _ in range(3)]
    rules = [small_steps(model) for model in models]
    anchor, kept = weights(models[0]), [torch.zeros_like(weights(models[0])) for _ in models]
    expected: list[list[Tensor]] = [[] for _ in models]
    for step in range(8):
        for rank, (model, own) in enumerate(zip(models, rules, strict=True)):
            backward(model, rank, step)
            own.step()
        if step % 2 == 1:
            sums = [rest + anchor - weights(model) for rest, model in zip(kept, models, strict=True)]
            sent = [torch.where((anchor - each).bfloat16() == anchor.bfloat16(), 0, each) for each in sums]
            kept = [each - gone for each, gone in zip(sums, sent, strict=True)]
            assert all(0 < each.count_nonzero() < each.numel() for each in kept)
            anchor = anchor - torch.stack(sent).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
        for rank, model in enumerate(models):
            expected[rank].append(weights(model))
    for found, wanted in zip(run_workers(3, work), expected, strict=True):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-12, atol=1e-12)


STREAMING = {"fragments": 2, "delay": 1, "mixing": 0.5}


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="whole"), pytest.param(STREAMING, id="fragments", marks=pytest.mark.slow)]
)
def test_replicas_are_equal_and_resume_exactly(options: dict[str, Any]) -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        model = made()
        own = small_steps(model)
        outer = spardl.Outer(model.named_parameters(), own, "compute_visible", every=2, **options)

        def trained(steps: range) -> Tensor:
            for step in steps:
                backward(model, rank, step)
                outer.step()
            outer.exchange()
            return weights(model)

        trained(range(5))
        saved = copy.deepcopy([own.state_dict(), outer.state_dict()])
        found = [trained(range(5, 9))]
        own.load_state_dict(saved[0])
        outer.load_state_dict(saved[1])
        found.append(trained(range(5, 9)))
        outer.close()
        return found

    found = [each for pair in run_workers(2, work) for each in pair]
    assert all(same_bits(each, found[0]) for each in found)


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrong_places_are_refused(alone: None) -> None:
    complaint = "compressor=compute_visible compares changes of weights with the weights, but .* averages gradients"
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=f"{complaint}; use spardl.Outer"):
        spardl.attach(nn.parallel.DistributedDataParallel(model), "compute_visible")
    with pytest.raises(ConfigError, match=complaint):
        spardl.Synchronizer(model.parameters(), "compute_visible")
    half = nn.Linear(3, 2).bfloat16()
    with pytest.raises(ConfigError, match=r"compute_visible needs weights in float32, but bias is torch\.bfloat16"):
        spardl.Outer([("bias", half.bias)], torch.optim.SGD([half.bias]), "compute_visible")
    with pytest.raises(ConfigError, match=complaint):
        spardl.all_reduce(torch.ones(3), "compute_visible")
    method = spardl.make_method("compute_visible")
    for schedule in (AfterBackward(), Dear()):
        with pytest.raises(ConfigError, match=f"but schedule={schedule.name} averages gradients"):
            schedule.check(method, clips=False)
    OuterSteps().check(method, clips=False)
