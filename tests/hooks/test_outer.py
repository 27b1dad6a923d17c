"""Outer steps compared with plain training, a loop over all workers, and resumed runs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.small import OPTIONS, backward, made, rule, weights
from tests.support.harness import run_workers, same_bits


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_exchange_in_every_step_equals_plain_training_bitwise(workers: int) -> None:
    """With dense sums, SGD without momentum, an outer rate of 1 and exact numbers."""

    def work(cluster: ProcessGroupCluster) -> tuple[Tensor, Tensor]:
        (rank,) = cluster.local_ranks
        model = nn.Linear(3, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        outer = spardl.Outer(
            model.parameters(), torch.optim.SGD(model.parameters(), 0.25), "none", every=1, lr=1.0, momentum=0.0
        )
        plain, source = torch.zeros(2, 3, dtype=torch.float64), torch.Generator().manual_seed(1)
        for _ in range(5):
            gradients = torch.randint(-8, 9, (workers, 2, 3), generator=source).double()
            model.weight.grad = gradients[rank].clone()
            outer.step()
            plain -= 0.25 * gradients.sum(0) / workers
        outer.close()
        return model.weight.detach(), plain

    for found, plain in run_workers(workers, work):
        assert same_bits(found, plain)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)], ids=["local SGD", "DiLoCo"])
def test_equals_a_loop_over_all_workers(lr: float, momentum: float) -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        # Weights of rank 0 are used on all workers.
        model = made(seed=rank)
        outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=3, lr=lr, momentum=momentum)
        found = []
        for step in range(10):
            backward(model, rank, step)
            outer.step()
            found.append(weights(model))
        outer.close()
        return found

    models = [made() for _ in range(3)]
    rules = [rule(model) for model in models]
    anchor, velocity = weights(models[0]), torch.zeros_like(weights(models[0]))
    expected: list[list[Tensor]] = [[] for _ in models]
    for step in range(10):
        for rank, (model, own) in enumerate(zip(models, rules, strict=True)):
            backward(model, rank, step)
            own.step()
        if step % 3 == 2:
            average = anchor - torch.stack([weights(model) for model in models]).mean(0)
            velocity = momentum * velocity + average
            anchor = anchor - lr * (average + momentum * velocity)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
        for rank, model in enumerate(models):
            expected[rank].append(weights(model))
    for found, wanted in zip(run_workers(3, work), expected, strict=True):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", OPTIONS)
def test_weights_are_equal_after_exchanges_and_resume_exactly(method: str) -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks

        def begun() -> tuple[nn.Module, torch.optim.Optimizer, spardl.Outer]:
            model = made()
            own = rule(model)
            return model, own, spardl.Outer(model.named_parameters(), own, method, every=2, **OPTIONS[method])

        def trained(steps: range) -> None:
            for step in steps:
                backward(model, rank, step)
                outer.step()

        model, own, outer = begun()
        trained(range(5))
        saved = copy.deepcopy([part.state_dict() for part in (model, own, outer)])
        trained(range(5, 8))
        straight = weights(model)
        outer.close()
        found = [straight]
        model, own, outer = begun()
        # Twice: training must not change the loaded state.
        for _ in range(2):
            own.load_state_dict(copy.deepcopy(saved[1]))  # torch would modify the saved tensors
            outer.load_state_dict(saved[2])
            assert outer.since == 1
            trained(range(5, 8))
            found.append(weights(model))
        outer.close()
        return found

    found = [each for pair in run_workers(3, work) for each in pair]
    assert all(same_bits(each, found[0]) for each in found)


def test_differences_that_are_not_sent_are_kept() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[Tensor, Tensor, Tensor]:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(
            model.named_parameters(), rule(model), "spardl", every=3, lr=1.0, momentum=0.0, density=0.1
        )
        alone = made()
        own = rule(alone)
        for step in range(3):
            backward(model, rank, step)
            outer.step()
            backward(alone, rank, step)
            own.step()
        (group,) = outer.state_dict()["groups"]
        outer.close()
        before = weights(made())
        return before - weights(alone), before - weights(model), group["memory"].flip(0).sort().values

    rows = run_workers(4, work)
    differences, averages, residuals = (torch.stack(each) for each in zip(*rows, strict=True))
    assert averages[0].count_nonzero() < 8
    # Compared as sums, because residuals are in the order of the backward pass.
    torch.testing.assert_close(residuals.sum() + 4 * averages[0].sum(), differences.sum(), rtol=1e-9, atol=1e-9)


def test_a_residual_takes_the_place_of_momentum() -> None:
    def work(cluster: ProcessGroupCluster) -> list[float]:
        model = made()
        found = []
        for method, momentum in (("none", None), ("spardl", None), ("spardl", 0.5), ("none", 0.0)):
            outer = spardl.Outer(model.parameters(), rule(model), method, momentum=momentum)
            found.append(outer.momentum)
            outer.close()
        return found

    assert run_workers(1, work) == [[0.9, 0.0, 0.5, 0.0]]


def test_default_momentum_rises_and_default_rates_follow_it() -> None:
    def work(cluster: ProcessGroupCluster) -> list[list[float]]:
        (rank,) = cluster.local_ranks
        found = []
        for method, options in DEFAULTS:
            model = made()
            outer = spardl.Outer(model.named_parameters(), rule(model), method, every=1, **options)
            momenta = []
            for step in range(3):
                backward(model, rank, step)
                outer.step()
                momenta.append(outer._anchors.optimizer.param_groups[0]["momentum"])
            saved = outer.state_dict()
            assert saved["outer"].pop("exchanges") == [3]
            outer.load_state_dict(saved)  # of an older version
            backward(model, rank, 3)
            outer.step()
            momenta.append(outer._anchors.optimizer.param_groups[0]["momentum"])
            found.append([outer._anchors.optimizer.param_groups[0]["lr"], *momenta])
            outer.close()
        return found

    for found in run_workers(2, work):
        assert found == [
            [0.7, 0.5, pytest.approx(1 - 0.5 / (1 + 1 / 12)), pytest.approx(1 - 0.5 / (1 + 2 / 12)), 0.9],
            [0.7, 0.9, 0.9, 0.9, 0.9],
            [1.5, 0.0, 0.0, 0.0, 0.0],
            [0.7, 0.5, 0.5, 0.5, 0.5],
        ]


DEFAULTS = (
    ("none", {}),
    ("none", {"momentum": 0.9}),
    ("spardl", {"density": 0.5}),
    ("spardl", {"density": 0.5, "momentum": 0.5}),
)


@pytest.mark.slow
def test_a_dozen_exchanges_learn_more_than_a_single_worker() -> None:
    """With the defaults; a constant momentum of 0.9, or a rate of 0.7 with a residual, did not."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        (rank,) = cluster.local_ranks
        losses = []
        for method, options in ((None, {}), ("none", {}), ("spardl", {"density": 0.25})):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
            adamw = torch.optim.AdamW(model.parameters(), 3e-3)
            outer = method and spardl.Outer(model.named_parameters(), adamw, method, every=10, **options)
            source = torch.Generator().manual_seed(5 + rank)
            for _ in range(120):
                inputs, targets = _taught(16, source)
                adamw.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                (outer or adamw).step()
            if outer:
                outer.close()
            inputs, targets = _taught(4096, torch.Generator().manual_seed(99))
            losses.append(nn.functional.mse_loss(model(inputs), targets).item())
        return losses

    rows = run_workers(4, work)
    alone, dense, sparse = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    assert dense < alone
    assert sparse < alone


def _taught(examples: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and the noisy outputs of a fixed network."""
    teacher = torch.Generator().manual_seed(0)
    first, second = torch.randn(32, 64, generator=teacher) / 5.6, torch.randn(64, 8, generator=teacher) / 3
    inputs = torch.randn(examples, 32, generator=source)
    outputs = torch.relu(inputs @ first) @ second
    return inputs, outputs + 0.3 * torch.randn(outputs.shape, generator=source)


def test_gradients_of_the_loop_are_left_alone() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        model = made()
        outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=1)
        backward(model, 0, 0)
        before = [parameter.grad for parameter in model.parameters()]
        outer.step()
        outer.close()
        return all(one is parameter.grad for one, parameter in zip(before, model.parameters(), strict=True))

    assert run_workers(2, work) == [True, True]


@pytest.mark.parametrize("first", ["step", "exchange"])
def test_weights_loaded_after_it_was_made_are_no_steps(first: str) -> None:
    """The first exchange would have undone the load."""

    def work(cluster: ProcessGroupCluster) -> str:
        model, trained = made(), made(seed=1)
        outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=1)
        model.load_state_dict(trained.state_dict())
        backward(model, 0, 0)
        try:
            getattr(outer, first)()
        except ConfigError as error:
            assert same_bits(weights(model), weights(trained))
            return str(error)
        finally:
            outer.close()
        return ""

    assert all("before creating the Outer" in line for line in run_workers(2, work))


@pytest.mark.parametrize("how", ["max_norm", "some loaded"])
def test_weights_changed_by_a_forward_pass_are_local_training(how: str) -> None:
    """Also partly loaded weights, which cannot be distinguished: both warn."""

    def work(cluster: ProcessGroupCluster) -> tuple[int, list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1 if how == "max_norm" else None), nn.Linear(3, 1))
        outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=1)
        if how == "some loaded":
            model[1].load_state_dict(nn.Linear(3, 1).state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                model(torch.arange(4)).square().mean().backward()
                outer.step()
        outer.close()
        return outer.stats().steps, [line for each in caught if (line := str(each.message)).startswith("spardl")]

    for steps, said in run_workers(2, work):
        assert steps == 2
        assert len(said) == 1
        assert "of 3 parameters were changed after this Outer was created" in said[0]


def test_steps_made_by_the_loop_come_first() -> None:
    """The loop steps another optimizer and calls ``count()``."""

    def work(cluster: ProcessGroupCluster) -> int:
        model = made()
        first, outer = rule(model), spardl.Outer(model.named_parameters(), rule(model), "none", every=1)
        backward(model, 0, 0)
        first.step()
        outer.count()
        backward(model, 0, 1)
        outer.step()
        outer.close()
        return outer.stats().steps

    assert run_workers(2, work) == [2, 2]


@pytest.mark.slow  # accelerate takes seconds to import
def test_an_optimizer_that_accelerate_wrapped() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        from accelerate import Accelerator

        (rank,) = cluster.local_ranks
        found = []
        for wrap in (lambda optimizer: optimizer, Accelerator(cpu=True).prepare_optimizer):
            model = made()
            outer = spardl.Outer(model.named_parameters(), wrap(rule(model)), "none", every=2)
            for step in range(4):
                backward(model, rank, step)
                outer.step()
            outer.close()
            found.append(weights(model))
        return same_bits(*found)

    assert run_workers(2, work) == [True, True]


def test_a_state_and_then_a_model_may_be_loaded() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        (rank,) = cluster.local_ranks
        found = []
        saved: list[Any] = []
        for _ in range(2):
            model = made()
            outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=3)
            if saved:
                outer.load_state_dict(saved[0])
                model.load_state_dict(saved[1])
            for step in range(4):
                backward(model, rank, step)
                outer.step()
                if step == 1 and not saved:
                    saved += [copy.deepcopy(outer.state_dict()), copy.deepcopy(model.state_dict())]
            outer.close()
            found.append(weights(model))
        return not same_bits(*found)

    assert run_workers(2, work) == [True, True]


def test_parameters_of_a_second_optimizer_may_have_made_a_step() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        (rank,) = cluster.local_ranks
        model = made()
        first, *others = model.parameters()
        other = torch.optim.SGD([first], lr=0.1)
        outer = spardl.Outer(model.named_parameters(), torch.optim.SGD(others, lr=0.1), "none", every=1)
        backward(model, rank, 0)
        other.step()
        outer.step()
        outer.close()
        return True

    assert run_workers(2, work) == [True, True]
