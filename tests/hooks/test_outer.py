"""Outer steps: equal to plain training where they must be, to a loop over all workers, and to themselves."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError, WorkerError
from spardl.clusters import ProcessGroupCluster
from tests.harness import run_workers, same_bits


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    return (
        torch.randn(8, 6, generator=source, dtype=torch.float64),
        torch.randn(8, 1, generator=source, dtype=torch.float64),
    )


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    inputs, targets = batch(rank, step)
    (model(inputs) - targets).square().mean().backward()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def rule(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_exchange_after_every_step_is_plain_training_to_the_last_bit(workers: int) -> None:
    """With sums, SGD without momentum, an outer rate of 1, and numbers that can be told exactly."""

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
        # Weights of rank 0 are those that count.
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


OPTIONS: dict[str, dict[str, Any]] = {
    "spardl": {"density": 0.2},
    "oktopk": {"density": 0.2},
    "powersgd": {"rank": 1},
    "none": {},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_weights_are_equal_after_each_exchange_and_resumed_they_have_the_same_bits(method: str) -> None:
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
        # Twice: what was loaded is not changed by going on.
        for _ in range(2):
            own.load_state_dict(copy.deepcopy(saved[1]))  # torch would go on in the memory it is given
            outer.load_state_dict(saved[2])
            assert outer.since == 1
            trained(range(5, 8))
            found.append(weights(model))
        outer.close()
        return found

    found = [each for pair in run_workers(3, work) for each in pair]
    assert all(same_bits(each, found[0]) for each in found)


STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.5}


def streamed(method: str, rank: int, state: dict[str, Any] | None = None) -> tuple[nn.Module, Any, spardl.Outer]:
    model = made()
    own = rule(model)
    outer = spardl.Outer(model.named_parameters(), own, method, **STREAMING, **OPTIONS[method])
    if state is not None:
        own.load_state_dict(copy.deepcopy(state["optimizer"]))
        outer.load_state_dict(state["outer"])
    return model, own, outer


@pytest.mark.parametrize("method", ["spardl", "none"])
def test_fragments_go_on_to_the_same_bits_wherever_they_were_saved(method: str) -> None:
    """Also while one is under way, and on one worker alone: another who looks at another step, or never."""
    steps = 13

    def work(cluster: ProcessGroupCluster) -> tuple[list[list[Tensor]], list[int]]:
        (rank,) = cluster.local_ranks

        def trained(outer: spardl.Outer, model: nn.Module, some: range) -> list[Tensor]:
            found = []
            for step in some:
                backward(model, rank, step)
                outer.step()
                found.append(weights(model))
            return found

        model, _, outer = streamed(method, rank)
        runs = [trained(outer, model, range(steps))]
        outer.close()
        aloft = []
        for stop in range(steps):
            model, own, outer = streamed(method, rank)
            before = trained(outer, model, range(stop))
            if rank == stop % 2 or stop % 3 == 0:
                outer.state_dict()
            before += trained(outer, model, range(stop, stop + 1))
            saved = {"optimizer": copy.deepcopy(own.state_dict()), "outer": outer.state_dict()}
            aloft.append(len(saved["outer"]["outer"]["aloft"]))
            runs.append(before + trained(outer, model, range(stop + 1, steps)))
            outer.close()
            # As if the process had begun anew.
            model, own, outer = streamed(method, rank, saved)
            runs.append(before + trained(outer, model, range(stop + 1, steps)))
            outer.close()
        return runs, aloft

    for runs, aloft in run_workers(2, work):
        assert {0, 1} <= set(aloft)
        for run in runs:
            assert all(same_bits(one, other) for one, other in zip(run, runs[0], strict=True))


def test_a_state_loaded_over_one_that_is_under_way() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        (rank,) = cluster.local_ranks
        model, own, outer = streamed("spardl", rank)
        saved = {"optimizer": copy.deepcopy(own.state_dict()), "outer": outer.state_dict()}

        def trained() -> Tensor:
            for step in range(3):  # the first fragment is sent after the second
                backward(model, rank, step)
                outer.step()
            return weights(model)

        first = trained()
        own.load_state_dict(saved["optimizer"])
        outer.load_state_dict(saved["outer"])
        again = trained()
        outer.close()
        return same_bits(first, again)

    assert run_workers(2, work) == [True, True]


def test_after_an_exchange_all_fragments_are_equal_on_all_workers() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[Tensor], int]:
        (rank,) = cluster.local_ranks
        model, _, outer = streamed("spardl", rank)
        found = []
        for count in (3, 2, 4, 1):
            for step in range(count):
                backward(model, rank, 10 * count + step)
                outer.step()
            outer.exchange()
            found.append(weights(model))
        exchanges = outer.stats().steps
        outer.close()
        return found, exchanges

    one, other = run_workers(2, work)
    assert all(same_bits(*pair) for pair in zip(one[0], other[0], strict=True))
    assert (
        one[1] == other[1] == 2 * 4 + 2
    )  # those of exchange(); and one each that was due after 2 steps and had landed


def test_a_worker_lost_beside_local_steps_is_an_error_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent after 8 steps lands after 10: until then, whose worker is lost before trains alone."""
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 1.0)

    def work(cluster: ProcessGroupCluster) -> None:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(
            model.named_parameters(), rule(model), "none", timeout=5.0, every=4, delay=2, communicator="dense"
        )
        for step in range(14):
            if step == 7 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, rank, step)
            try:
                outer.step()
            except Exception as error:
                (tmp_path / "said").write_text(f"step {step + 1}: {type(error).__name__}: {error}")
                os._exit(0)
        raise AssertionError("nobody noticed")

    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        run_workers(2, work)
    assert (tmp_path / "said").read_text().startswith("step 10: PeerError: rank 0 lost contact in an exchange")


def test_fragments_that_do_not_fit() -> None:
    model = made()
    with pytest.raises(ConfigError, match="3 fragments need as many layers, and the model has 2; use fewer"):
        spardl.Outer(model.named_parameters(), rule(model), "none", fragments=3)
    with pytest.raises(ConfigError, match="fragments=2 and delay=4 do not fit into every=4"):
        spardl.Outer(model.named_parameters(), rule(model), "none", every=4, fragments=2, delay=4)


def test_a_state_of_other_fragments_is_refused_and_changes_nothing() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[str, bool]:
        (rank,) = cluster.local_ranks
        model, _, outer = streamed("spardl", rank)
        whole = spardl.Outer(model.named_parameters(), rule(model), "spardl", every=4, density=0.2)
        before = weights(model)
        told = []
        for into, saved in ((whole, outer), (outer, whole)):
            state = saved.state_dict()
            state["outer"]["weights"] = [weight + 1 for weight in state["outer"]["weights"]]
            with pytest.raises(ConfigError) as error:
                into.load_state_dict(state)
            told.append(str(error.value))
        outer.close()
        whole.close()
        return "; ".join(told), same_bits(before, weights(model))

    told = "this state is of fragments=2; load it where it was saved; this state is of fragments=1; load it where"
    for found, same in run_workers(2, work):
        assert found.startswith(told)
        assert same


def test_a_state_that_was_saved_before_there_were_fragments() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        model = made()
        own = rule(model)
        outer = spardl.Outer(model.named_parameters(), own, "spardl", every=3, density=0.2)

        def trained(some: range) -> Tensor:
            for step in some:
                backward(model, rank, step)
                outer.step()
            return weights(model)

        trained(range(5))
        optimizer, saved = copy.deepcopy(own.state_dict()), outer.state_dict()
        straight = trained(range(5, 9))
        for name in ("left", "aloft", "fragments"):
            del saved["outer"][name]
        own.load_state_dict(optimizer)
        outer.load_state_dict(saved)
        again = trained(range(5, 9))
        outer.close()
        return [straight, again]

    for straight, again in run_workers(2, work):
        assert same_bits(straight, again)


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
    # As sums, since residuals lie in the order of the backward pass.
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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0; 0.7 is DiLoCo's"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"optimizer": 3}, "optimizer must be"),
        ({"parameters": []}, "there are no parameters to average"),
        ({"method": "foo"}, "foo"),
        ({"method": "dgc"}, "momentum=corrected comes on top of the outer SGD's"),
    ],
)
def test_bad_input_is_told(options: dict[str, Any], complaint: str) -> None:
    model = made()
    given = {"parameters": model.parameters(), "optimizer": rule(model), "method": "none", **options}
    with pytest.raises(ConfigError, match=complaint):
        spardl.Outer(given.pop("parameters"), given.pop("optimizer"), given.pop("method"), **given)


def test_who_was_given_something_else_is_told() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(model.parameters(), rule(model), "none", every=2, lr=0.5 + rank)
        try:
            outer.exchange()
        except ConfigError as error:
            return str(error)
        return ""

    assert all("lr=" in line and "all workers must be given the same" in line for line in run_workers(2, work))


def test_a_state_of_something_else_is_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        model = made()
        outer = spardl.Outer(model.parameters(), rule(model), "none")
        try:
            outer.load_state_dict({"names": []})
        except ConfigError as error:
            return str(error)
        finally:
            outer.close()
        return ""

    assert "load what its state_dict() gave" in run_workers(1, work)[0]
