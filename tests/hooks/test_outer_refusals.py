"""Errors and warnings of Outer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.refused import refusals
from tests.hooks.small import backward, made, rule, weights
from tests.support.harness import run_workers, same_bits


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every must be an integer, at least 1, got 0"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0; use 0.7"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"optimizer": 3}, "optimizer must be"),
        ({"parameters": []}, "parameters is empty or all frozen"),
        ({"method": "foo"}, "foo"),
        ({"method": "dgc"}, "momentum=corrected would be applied in addition to the momentum of the outer SGD"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], complaint: str) -> None:
    model = made()
    given = {"parameters": model.parameters(), "optimizer": rule(model), "method": "none", **options}
    with pytest.raises(ConfigError, match=complaint):
        spardl.Outer(given.pop("parameters"), given.pop("optimizer"), given.pop("method"), **given)


def test_differing_settings_are_reported() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(model.parameters(), rule(model), "none", every=2, lr=0.5 + rank)
        try:
            outer.exchange()
        except ConfigError as error:
            return str(error)
        return ""

    assert all("lr=" in line and "all workers need the same value" in line for line in run_workers(2, work))


def test_state_of_another_handle_is_refused() -> None:
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

    assert "load what its state_dict() returned" in run_workers(1, work)[0]


def test_closed_outer_makes_no_steps() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        model = made()
        optimizer = rule(model)
        outer = spardl.Outer(model.named_parameters(), optimizer, "none", every=1)
        outer.close()
        backward(model, 0, 0)
        before = weights(model)
        said = refusals([outer.step, outer.count, outer.exchange])
        assert same_bits(weights(model), before)
        optimizer.step()
        assert not same_bits(weights(model), before)
        return said

    assert all(len(said) == 3 and "closed" in said[0] for said in run_workers(2, work))


def test_nonfinite_differences_warn_without_scaler_advice() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = spardl.Outer(model.named_parameters(), optimizer, "spardl", every=1, density=0.5)
        backward(model, 0, 0)
        next(model.parameters()).grad[0] = torch.inf
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outer.step()
        outer.close()
        assert torch.isfinite(weights(model)).all()
        return "".join(str(each.message) for each in caught if "spardl" in str(each.message))

    for said in run_workers(1, work):
        assert "all workers continue from the weights of the last exchange" in said
        assert "scaler" not in said


def test_parameters_frozen_later_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=3)
        backward(model, rank, 0)
        outer.step()
        model[0].weight.requires_grad_(False)
        outer.exchange()
        backward(model, rank, 1)
        with pytest.raises(ConfigError) as error:
            outer.step()
        outer.close()
        return [str(error.value), str(weights(model[0]).sum().item())]

    one, other = run_workers(2, work)
    assert one == other
    assert one[0].startswith("0.weight was trained when this handle was created and is frozen now")


@pytest.mark.parametrize("counted", [True, False])
def test_uncounted_steps_warn_once(counted: bool) -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        model = made()
        optimizer = rule(model)
        outer = spardl.Outer(model.named_parameters(), optimizer, "none", every=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(7):
                backward(model, 0, step)
                optimizer.step()
                if counted:
                    outer.count()
        outer.close()
        return [str(each.message) for each in caught if "spardl" in str(each.message)]

    (said,) = run_workers(1, work)
    assert len(said) == (not counted)
    assert all("optimizer.step() was called 3 times without Outer, which has sent nothing" in each for each in said)


@pytest.mark.parametrize("within", [False, True], ids=["same ranks", "within a node"])
def test_ddp_of_the_same_ranks_warns(within: bool) -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        (rank,) = cluster.local_ranks
        groups = [dist.new_group([each]) for each in range(2)]
        model = nn.parallel.DistributedDataParallel(made(), process_group=groups[rank] if within else None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outer = spardl.Outer(model.named_parameters(), rule(model), "none", every=2)
        outer.close()
        return [str(each.message) for each in caught if "spardl" in str(each.message)]

    for said in run_workers(2, work):
        assert len(said) == (not within)
        assert all("averages their gradients over 2 of the same ranks in every step" in each for each in said)


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_scaler_that_steps_an_outer_is_refused(call: str) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[str, int]:
        model = made()
        optimizer = rule(model)
        outer = spardl.Outer(model.named_parameters(), optimizer, "none", every=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(3, 6).double()).sum()).backward()
        (said,) = refusals([lambda: getattr(scaler, call)(outer)])
        scaler.step(optimizer)
        outer.count()
        return said, outer.since

    (said, since), *_ = run_workers(2, work)
    assert since == 1
    assert said == (
        "an Outer is not an optimizer, so scaler.step(outer) and scaler.unscale_(outer) cannot work; call "
        "scaler.step(optimizer) and then outer.count(), also after a step that the scaler skipped"
    )
