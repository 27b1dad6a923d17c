"""Outer steps and optimizer steps that send the changes of weights that a forward pass in bfloat16 would see."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.schedules import AfterBackward, Dear, OuterSteps
from tests.hooks.small import backward, made, weights
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


class EveryStep:
    """A loop in which each step sends the visible part of AdamW's updates; the matrices have another learning rate."""

    def __init__(self, way: str) -> None:
        self.model = made()
        vectors, matrices = (
            [each for each in self.model.parameters() if (each.ndim > 1) is many] for many in (False, True)
        )
        groups: list[dict[str, Any]] = [{"params": vectors, "lr": 0.0005}, {"params": matrices}]
        self.rule = torch.optim.AdamW(groups, lr=0.001, weight_decay=0.1)
        self.rates = torch.optim.lr_scheduler.StepLR(self.rule, 3, 0.3)
        self.way, options = way, {"optimizer": self.rule, "update_scale": "none"}
        self.ddp: nn.Module = self.model
        if way == "attach":
            self.ddp = nn.parallel.DistributedDataParallel(self.model)
            self.handle: Any = spardl.attach(self.ddp, "compute_visible", **options)
        else:
            self.handle = spardl.Synchronizer(self.model.named_parameters(), "compute_visible", **options)

    def train(self, rank: int, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            self.rule.zero_grad()
            with self.handle if self.way == "Synchronizer" else nullcontext():
                backward(self.ddp, rank, step)
            self.rule.step()
            self.rates.step()
            found.append(weights(self.model))
        return found

    def state(self) -> list[Any]:
        return copy.deepcopy([part.state_dict() for part in (self.model, self.rule, self.rates, self.handle)])


@pytest.mark.parametrize("way", ["attach", "Synchronizer"])
def test_each_step_equals_a_loop_over_all_workers(way: str) -> None:
    """A worker compares its updates, times the present learning rate, with the weights."""
    steps, workers = 8, 3

    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        return EveryStep(way).train(*cluster.local_ranks, range(steps))

    model = made()
    shared, size = weights(model), weights(model).numel()
    rates = torch.cat(
        [torch.full_like(each, 0.001 if each.ndim > 1 else 0.0005).reshape(-1) for each in model.parameters()]
    )
    rates = rates.detach()
    squares, kept = torch.zeros(workers, size).double(), torch.zeros(workers, size).double()
    expected = []
    for step in range(steps):
        rate, sent = rates * 0.3 ** (step // 3), []
        for rank in range(workers):
            backward(model, rank, step)
            gradient = torch.cat([each.grad.reshape(-1) for each in model.parameters()])  # type: ignore[union-attr]
            squares[rank] = 0.95 * squares[rank] + 0.05 * gradient.square()
            kept[rank] += gradient / ((squares[rank] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            seen = (shared - rate * kept[rank]).bfloat16() != shared.bfloat16()
            assert 0 < seen.count_nonzero() < size
            sent.append(torch.where(seen, kept[rank], 0))
            kept[rank] -= sent[-1]
        shared = (1 - 0.1 * rate) * shared - rate * torch.stack(sent).mean(0)
        nn.utils.vector_to_parameters(shared.clone(), model.parameters())
        expected.append(shared)
    for found in run_workers(workers, work):
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["attach", "Synchronizer"])
def test_each_step_resumes_exactly(way: str) -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        first = EveryStep(way)
        first.train(rank, range(4))
        saved = first.state()
        found = first.train(rank, range(4, 8))[-1:]
        first.handle.detach()
        second = EveryStep(way)
        for part, state in zip((second.model, second.rule, second.rates, second.handle), saved, strict=True):
            part.load_state_dict(state)
        return [*found, *second.train(rank, range(4, 8))[-1:]]

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
    with pytest.raises(ConfigError, match=rf"{complaint}; use attach\(..., optimizer=...\)"):
        spardl.attach(nn.parallel.DistributedDataParallel(model), "compute_visible")
    with pytest.raises(ConfigError, match=complaint):
        spardl.Synchronizer(model.parameters(), "compute_visible")
    half = nn.Linear(3, 2).bfloat16()
    with pytest.raises(ConfigError, match=r"compute_visible needs weights in float32, but bias is torch\.bfloat16"):
        spardl.Outer([("bias", half.bias)], torch.optim.SGD([half.bias]), "compute_visible")
    with pytest.raises(ConfigError, match=r"compute_visible needs weights in float32, but bias is torch\.bfloat16"):
        spardl.Synchronizer([("bias", half.bias)], "compute_visible", optimizer=torch.optim.AdamW([half.bias]))
    with pytest.raises(ConfigError, match=complaint):
        spardl.Synchronizer(
            model.parameters(), "compute_visible", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
    with pytest.raises(ConfigError, match=complaint):
        spardl.all_reduce(torch.ones(3), "compute_visible")
    method = spardl.make_method("compute_visible")
    for schedule in (AfterBackward(), Dear()):
        with pytest.raises(ConfigError, match=f"but schedule={schedule.name} averages gradients"):
            schedule.check(method, clips=False)
    OuterSteps().check(method, clips=False)
