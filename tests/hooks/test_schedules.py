"""Schedules in a plain DDP loop: weights equal those of DDP for all kinds of loops."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.schedules import AfterBackward, Wfbp
from tests.schedules.loops import SETTINGS, loss_of, make_model, weights
from tests.support.harness import run_workers

STEPS = 8
NAMES = ("wfbp", "mg_wfbp", "layer_fusion", "dear")
SPARSE = {"method": "spardl", "density": 0.2, "recipe": "published"}


def words(step: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + number)
    return torch.randint(11, (2, 5), generator=generator)


@dataclass
class Loop:
    """A user loop, in which only the call of ``attach`` names a schedule."""

    options: dict[str, Any] | None
    setting: str = "momentum"
    dtype: torch.dtype = torch.float64
    scaler: GradScaler | None = None
    bad: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.model = make_model().to(self.dtype)
        self.how = SETTINGS[self.setting]
        self.optimizer = self.how.optimizer(self.model)
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.dear = (self.options or {}).get("schedule") == "dear"
        self.handle: Any = None
        if self.options is not None:
            more = {"optimizer": self.optimizer, "clip_norm": self.how.clip_norm} if self.dear else {}
            self.handle = spardl.attach(self.ddp, **{**self.options, **more, "scaler": self.scaler})
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        passes = self.how.accumulation
        for number in range(passes):
            with torch.enable_grad() if number == passes - 1 else self.ddp.no_sync():
                loss = loss_of(self.ddp, words(step, number)) / passes
                if step in self.bad and dist.get_rank() == 0:
                    loss = loss * math.inf
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.how.clip_norm is not None and not self.dear:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.how.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.rates.step()

    def run(self, steps: range = range(STEPS)) -> Tensor:
        for step in steps:
            self.step(step)
        if self.handle is not None:
            self.handle.flush()
        return weights(self.model)


def on_all(work: Callable[[], Any]) -> Any:
    """What work gives, which must be the same on both workers."""
    one, other = run_workers(2, lambda cluster: work())
    assert str(one) == str(other)
    return one


@pytest.mark.parametrize(
    "setting",
    [
        "everything",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("momentum", "adamw", "two_groups", "clipping")),
    ],
)
def test_dense_training_is_that_of_ddp(setting: str) -> None:
    """With tied, unused and foreign weights, parameter groups, changing rates, accumulation and clipping."""

    def work() -> dict[str, float]:
        plain = Loop(None, setting).run()
        found = {name: Loop({"method": "none", "schedule": name}, setting).run() for name in NAMES}
        return {name: float((each - plain).abs().max()) for name, each in found.items()}

    assert all(difference < 1e-12 for difference in on_all(work).values())


@pytest.mark.parametrize("method", [SPARSE, {"method": "int8"}], ids=["spardl", "int8"])
def test_dear_is_wfbp_of_the_same_groups(method: dict[str, Any]) -> None:
    def work() -> list[bool]:
        found = []
        for setting in ("momentum", "accumulation"):
            one, other = (
                Loop({**method, "schedule": name, "bucket_mb": 0.001}, setting).run() for name in ("wfbp", "dear")
            )
            found.append(torch.equal(one, other))
        return found

    assert on_all(work) == [True, True]


def test_a_loss_that_is_scaled_and_overflows() -> None:
    """All workers skip the step, the scale decreases, and dense training equals DDP."""

    def work() -> list[tuple[float, float]]:
        found = []
        for options in (None, *({"method": "none", "schedule": name, "bucket_mb": 0.001} for name in ("wfbp", "dear"))):
            scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            found.append((Loop(options, scaler=scaler, bad=(2, 6)).run(), scaler.get_scale()))
        (plain, scale), *others = found
        return [(float((each - plain).abs().max()), own - scale) for each, own in others]

    assert all(difference < 1e-12 and scale == 0 for difference, scale in on_all(work))


def test_nothing_is_lost_where_a_step_is_skipped() -> None:
    """Dropped averages return to the residual, in the same way for dear and wfbp."""

    def work() -> bool:
        found = []
        for name in ("wfbp", "dear"):
            scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            options = {**SPARSE, "schedule": name, "bucket_mb": 0.001}
            found.append(Loop(options, scaler=scaler, bad=(2, 3)).run())
        return torch.equal(*found)

    assert on_all(work)


class Mixed(nn.Module):
    """With two dtypes, a frozen layer, and a layer that is skipped in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).double()
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.second = nn.Linear(8, 4)
        self.at_times = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, *, other: bool = False) -> Tensor:
        hidden = self.frozen(self.first(inputs.double()).float())
        return (self.at_times if other else self.second)(hidden)


def test_types_frozen_and_unused_parameters() -> None:
    def trained(options: dict[str, Any] | None) -> Tensor:
        torch.manual_seed(2)
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if options is not None:
            dear = {"optimizer": optimizer} if options["schedule"] == "dear" else {}
            handle = spardl.attach(ddp, "none", **options, **dear)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with torch.autocast("cpu", torch.bfloat16):
                ddp(inputs).float().square().mean().backward()
            optimizer.step()
        if options is not None:
            handle.flush()
        return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])

    def work() -> dict[str, float]:
        plain = trained(None)
        return {name: float((trained({"schedule": name}) - plain).abs().max()) for name in NAMES}

    assert all(difference < 1e-6 for difference in on_all(work).values())


@pytest.mark.parametrize("name", [pytest.param("mg_wfbp", marks=pytest.mark.slow), "wfbp", "layer_fusion", "dear"])
def test_the_state_round_trip(name: str) -> None:
    """Saves after four of eight steps, and loads before anything is measured."""

    def work() -> bool:
        loop = Loop({**SPARSE, "schedule": name})
        loop.run(range(4))
        parts = (loop.model, loop.optimizer, loop.rates, loop.handle)
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in parts], buffer)
        expected = loop.run(range(4, STEPS))
        loop.handle.detach()
        buffer.seek(0)
        again = Loop({**SPARSE, "schedule": name})
        for part, values in zip(
            (again.model, again.optimizer, again.rates, again.handle),
            torch.load(buffer, weights_only=True),
            strict=True,
        ):
            part.load_state_dict(values)
        # Measured groups differ between runs, and so do the entries that a sparse method selects.
        return name in ("mg_wfbp", "layer_fusion") or torch.equal(again.run(range(4, STEPS)), expected)

    assert on_all(work)


def test_evaluation_between_steps_sees_the_latest_weights() -> None:
    def work() -> list[float]:
        losses = []
        for name in ("wfbp", "dear"):
            loop, found = Loop({**SPARSE, "schedule": name, "bucket_mb": 0.001}), []
            for step in range(4):
                loop.step(step)
                with torch.no_grad():
                    found.append(loss_of(loop.model, words(99)).item())
            losses.append(found)
            loop.handle.detach()
        assert losses[0] == losses[1]
        return losses[0]

    run_workers(2, lambda cluster: work())


def test_detach_gives_the_optimizer_back() -> None:
    def work() -> list[bool]:
        loop = Loop({**SPARSE, "schedule": "dear"})
        loop.run(range(3))
        loop.handle.detach()
        before = weights(loop.model)
        loop.dear, loop.handle = False, None
        loop.step(3)
        changed = not torch.equal(weights(loop.model), before)
        again = spardl.attach(loop.ddp, "spardl", density=0.2)
        loop.step(4)
        return [changed, again.stats().steps == 1]

    assert on_all(work) == [True, True]


def test_models_with_changing_control_flow_are_refused() -> None:
    """Forward passes wait only for parameters that the first one has used."""

    class Winding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Tensor, *, foreign: bool) -> Tensor:
            hidden = self.first(inputs)
            return F.linear(hidden, self.second.weight) if foreign else hidden + self.second(inputs)

    def work(cluster: ProcessGroupCluster) -> str:
        model = Winding()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        spardl.attach(ddp, "none", schedule="dear", optimizer=optimizer, bucket_mb=0.00001)
        try:
            for foreign in (False, True):
                ddp(torch.ones(2, 4), foreign=foreign).sum().backward()
                optimizer.step()
        except spardl.SpardlError as error:
            return str(error)
        return "nothing"

    assert all("use schedule=wfbp for models whose control flow changes" in each for each in run_workers(2, work))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "after_backward"}, "schedule='after_backward' is not supported here; use one of wfbp"),
    (
        {"schedule": AfterBackward()},
        "schedule must be one of wfbp, mg_wfbp, layer_fusion, dear, or",
    ),
    ({"schedule": 3}, "schedule must be one of wfbp"),
    ({"schedule": "layer_fusion", "bucket_mb": 5}, "schedule=layer_fusion chooses the group sizes itself"),
    ({"schedule": Wfbp(), "bucket_mb": 5}, "bucket_mb has no effect on a schedule object"),
    ({"schedule": "dear"}, "schedule=dear runs the optimizer's step itself; pass optimizer= to attach()"),
    ({"schedule": "dear", "optimizer": 3}, "or a list of several, got 3"),
    ({"clip_norm": 1.0}, "clip_norm=1.0 needs optimizer= (SGD, Adam, AdamW or Muon of torch.optim)"),
    ({"schedule": "dear", "optimizer": "sgd", "clip_norm": -1}, "clip_norm must be a number above 0"),
    ({"schedule": "dear", "optimizer": "lbfgs", "recipe": "published"}, "optimizer=LBFGS needs all gradients at once"),
    ({"schedule": "dear", "optimizer": "sgd", "method": "oktopk"}, "cannot be split into a reduce-scatter and an"),
]


def test_invalid_combinations_are_refused_at_once() -> None:
    kinds = {"sgd": torch.optim.SGD, "lbfgs": torch.optim.LBFGS}

    def work(cluster: ProcessGroupCluster) -> list[str]:
        model = nn.Linear(5, 5)
        ddp, said = DistributedDataParallel(model), []
        for options, _ in REFUSED:
            kind = kinds.get(str(options.get("optimizer")))
            given = {"optimizer": kind(model.parameters(), lr=0.1)} if kind else {}
            with pytest.raises(ConfigError) as error:
                spardl.attach(ddp, **{"method": "spardl", **options, **given})
            said.append(str(error.value))
        with pytest.raises(ConfigError) as error:
            spardl.Synchronizer(model.parameters(), schedule="dear")
        return [*said, str(error.value)]

    (found,) = run_workers(1, work)
    for said, (_, expected) in zip(found[:-1], REFUSED, strict=True):
        assert expected in said
        assert "\n" not in said
    assert found[-1].startswith(
        "schedule=dear updates parameters in the next forward pass, which a Synchronizer cannot observe"
    )
