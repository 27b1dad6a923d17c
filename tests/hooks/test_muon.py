"""Several optimizers of one model in user loops, among them Muon."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import AllReduceCodes, SparDL
from spardl.compressors import Quantized, TopK
from spardl.hooks.choosing import choose_method, default_method
from spardl.method import AutoMomentum, GlobalResidual, LocalResidual
from spardl.method.moving import low_density_warning, resolve_momentum
from tests.hooks.loops import weights
from tests.hooks.refused import refusals
from tests.support.harness import run_workers

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists since torch 2.9")

# Without a first moment, AdamW has no state that the handle replaces by the residual.
BETAS = (0.0, 0.9)
DECAY = 0.98
# A residual without decay would be the same: nothing waits.
WHOLE = spardl.Method(TopK(1.0), SparDL(), GlobalResidual(DECAY), AutoMomentum(beta2=BETAS[1]))
WHOLE_MUON = spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), AutoMomentum())
# Blocks of one entry are exact codes, with which AdamW keeps its first moment.
CODES = spardl.Method(Quantized(block=1), AllReduceCodes(), LocalResidual(DECAY), AutoMomentum(beta2=BETAS[1]))
PART = spardl.Method(TopK(0.2), SparDL(), GlobalResidual(), AutoMomentum())
Optimizers = list[torch.optim.Optimizer]


class Model(nn.Module):
    """Matrices of several shapes with vectors between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 9, bias=False), nn.Tanh())
        self.narrow, self.head = nn.Linear(9, 1), nn.Linear(1, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.narrow(self.body(inputs)).tanh())


def hidden(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if each.ndim == 2 and "head" not in name]


def others(model: nn.Module) -> list[nn.Parameter]:
    own = set(hidden(model))
    return [each for each in model.parameters() if each not in own]


def muon_and_adamw(model: nn.Module, beta1: float = BETAS[0]) -> Optimizers:
    """In groups with different learning rates and decays."""
    first, *rest = hidden(model)
    groups = [{"params": [first], "lr": 0.02, "weight_decay": 0.0}, {"params": rest, "adjust_lr_fn": "match_rms_adamw"}]
    return [
        torch.optim.Muon(groups, lr=0.05, weight_decay=0.1),
        torch.optim.AdamW(others(model), lr=0.01, betas=(beta1, BETAS[1]), eps=1e-4, weight_decay=0.1),
    ]


class Loop:
    """A training loop with one or no handle."""

    def __init__(
        self,
        handle_of: Callable[..., Any] | None,
        method: Any = WHOLE,
        bucket_cap_mb: float = 25,
        views: bool = False,
        first: float = BETAS[0],
        **options: Any,
    ) -> None:
        self.model = Model()
        self.optimizers = muon_and_adamw(self.model, first)
        self.rates = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in self.optimizers]
        self.called: nn.Module = self.model
        if handle_of is not alone:
            self.called = DistributedDataParallel(
                self.model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=views
            )
        self.handle: Any = None
        if handle_of is not None:
            self.handle = handle_of(self.called, method, optimizer=self.optimizers, **options)

    @property
    def parts(self) -> list[Any]:
        return [self.model, *self.optimizers, *self.rates, self.handle]

    def backward(self, step: int, *, equal: bool = False) -> None:
        rank = 0 if equal else torch.distributed.get_rank()
        source = torch.Generator().manual_seed(10 * step + rank)
        self.called(torch.randn(6, 4, generator=source)).square().mean().backward()
        if isinstance(self.handle, spardl.Synchronizer):
            self.handle.wait()

    def step(self, step: int, *, equal: bool = False) -> None:
        for each in self.optimizers:
            each.zero_grad()
        self.backward(step, equal=equal)
        for each in (*self.optimizers, *self.rates):
            each.step()

    def run(self, steps: range = range(8), *, equal: bool = False) -> Tensor:
        for step in steps:
            self.step(step, equal=equal)
        return weights(self.model)


def alone(model: nn.Module, method: Any, **options: Any) -> spardl.Synchronizer:
    return spardl.Synchronizer(model.named_parameters(), method, **options)


HANDLES = [
    pytest.param(spardl.attach, id="ddp"),
    pytest.param(alone, id="alone", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", HANDLES)
def test_single_worker_that_sends_everything_equals_torch(way: Callable[..., Any]) -> None:
    def work(cluster: object) -> list[Tensor]:
        return [Loop(each).run() for each in (None, way)]

    ((plain, found),) = run_workers(1, work)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [WHOLE, "none"], ids=["whole", "none"])
def test_workers_with_equal_gradients_equal_torch(method: Any) -> None:
    def work(cluster: object) -> list[Tensor]:
        return [Loop(way, method).run(equal=True) for way in (None, spardl.attach)]

    for plain, found in run_workers(2, work):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options"),
    [(None, {"first": 0.9}), ("spardl", {"density": 0.2, "wire": "int4"})],
    ids=["default", "spardl"],
)
@pytest.mark.parametrize("way", HANDLES)
def test_replicas_are_equal_and_resume_is_exact(
    way: Callable[..., Any], method: str | None, options: dict[str, Any]
) -> None:
    """With torch.save on each rank, in groups that mix parameters of both optimizers."""

    def work(cluster: object) -> list[Tensor]:
        whole, first, resumed = (Loop(way, method, **options) for _ in range(3))
        file = io.BytesIO()
        first.run(range(3))
        torch.save([each.state_dict() for each in first.parts], file)
        file.seek(0)
        for each, saved in zip(resumed.parts, torch.load(file, weights_only=True), strict=True):
            each.load_state_dict(saved)
        return [whole.run(range(6)), resumed.run(range(3, 6))]

    rows = run_workers(2, work)
    assert all(torch.equal(each, rows[0][0]) for row in rows for each in row)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["mg_wfbp", "layer_fusion"])
def test_schedules_that_measure_groups_keep_replicas_equal(schedule: str) -> None:
    def work(cluster: object) -> Tensor:
        return Loop(spardl.attach, "spardl", density=0.2, schedule=schedule).run(range(10))

    first, second = run_workers(2, work)
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "scaled"), [("wfbp", False), ("wfbp", True), ("dear", False), ("dear", True)])
def test_muon_alone_equals_torch(schedule: str, scaled: bool) -> None:
    """For a model of matrices, whose workers get equal batches; with a loss scale that grows."""

    def trained(attaches: bool) -> Tensor:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        muon = torch.optim.Muon(model.parameters(), lr=0.05, nesterov=False)
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2) if scaled else None
        ddp = DistributedDataParallel(model)
        handle = None
        if attaches:
            handle = spardl.attach(ddp, WHOLE_MUON, optimizer=muon, schedule=schedule, scaler=scaler)
        for step in range(7):
            muon.zero_grad()
            loss = ddp(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            if scaler is None:
                loss.backward()
                muon.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(muon)
                scaler.update()
        if handle is not None:
            handle.flush()
        return weights(model)

    for plain, found in run_workers(2, lambda cluster: (trained(False), trained(True))):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_outer_steps_all_optimizers_locally() -> None:
    """One worker with an outer learning rate of 1 trains as without outer steps, and counts each step once."""

    def work(cluster: object) -> list[Tensor]:
        plain, loop, counted = Loop(None), Loop(alone, "none"), Loop(alone, "none")
        outers = []
        for each in (loop, counted):
            each.handle.detach()
            named, several = each.model.named_parameters(), each.optimizers
            outers.append(spardl.Outer(named, several, "none", every=2, lr=1.0, momentum=0.0))
        for step in range(6):
            plain.step(step)
            for each, outer in zip((loop, counted), outers, strict=True):
                for optimizer in each.optimizers:
                    optimizer.zero_grad()
                each.backward(step)
                if each is loop:
                    outer.step()
                else:
                    for optimizer in each.optimizers:
                        optimizer.step()
                    outer.count()
                for rate in each.rates:
                    rate.step()
        assert [outer.stats().steps for outer in outers] == [3, 3]
        return [weights(each.model) for each in (plain, loop, counted)]

    ((plain, *found),) = run_workers(1, work)
    for each in found:
        torch.testing.assert_close(each, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_sharded_state_moves_to_another_number_of_workers(tmp_path: Path) -> None:
    def save(cluster: object) -> None:
        loop = Loop(spardl.attach, PART)
        loop.run(range(3))
        dcp.save({"model": loop.model.state_dict(), "spardl": loop.handle.sharded()}, checkpoint_id=tmp_path)

    def load(cluster: object) -> tuple[Tensor, float]:
        loop = Loop(spardl.attach, PART)
        model = loop.model.state_dict()
        dcp.load({"model": model, "spardl": loop.handle.sharded(tmp_path)}, checkpoint_id=tmp_path)
        loop.model.load_state_dict(model)
        moments = loop.handle.state_dict()["groups"][0]["variance"]
        return loop.run(range(3, 6)), float(moments.abs().sum())

    run_workers(3, save)
    rows = run_workers(2, load)
    assert torch.equal(rows[0][0], rows[1][0])
    assert all(size > 0 for _, size in rows)


@pytest.mark.parametrize(
    ("options", "density", "wire"),
    [
        ({}, 0.1, "int4"),
        ({"density": 0.2}, 0.2, "exact"),
        ({"wire": "exact"}, 0.01, "exact"),
        ({"teams": 2}, 0.1, "int4"),
        ({"recipe": "published"}, 0.01, "exact"),
    ],
    ids=["default", "density", "wire", "teams", "published"],
)
def test_default_density_and_bits_suit_muon(options: dict[str, Any], density: float, wire: str) -> None:
    model = Model()
    for optimizer in (muon_and_adamw(model), torch.optim.Muon(hidden(model))):
        made = choose_method("spardl", options, optimizer=optimizer)
        assert (made.compressor.density, made.wire.values) == (density, wire)
    assert choose_method("spardl", {}, optimizer=torch.optim.AdamW(others(model))).compressor.density == 0.01


def test_the_default_method_with_muon_sends_signs() -> None:
    model = Model()
    for optimizer in (muon_and_adamw(model), torch.optim.Muon(hidden(model))):
        assert default_method({}, optimizer) == "onebit"
    assert default_method({"density": 0.2}, torch.optim.AdamW(others(model))) == default_method({}, None) == "spardl"
    assert default_method({"recipe": "published"}, muon_and_adamw(model)) == "spardl"
    for option, way in (("density", ", or name a .*method='spardl'"), ("wire", ", or name a .*"), ("densty", "")):
        with pytest.raises(ConfigError, match=rf"is 'onebit', which has no option {option}; remove it{way}$"):
            default_method({option: 0.2}, muon_and_adamw(model))


def test_a_method_with_a_first_moment_starts_new_moments() -> None:
    """One count of updates corrects the bias of all moments, and would be wrong for a new first moment."""

    def work(cluster: Any) -> list[int]:
        loop, found = Loop(spardl.attach, "spardl", first=0.9, density=0.5), []
        for options in ({"method": "spardl", "density": 0.4}, {}):
            loop.run(range(3))
            loop.handle.detach()
            loop.handle = spardl.attach(loop.called, optimizer=loop.optimizers, **options)
            loop.step(3)
            found.append(loop.handle._active_averager().engine.gradient_state.updates)
        return found

    assert run_workers(2, work) == [[4, 1]] * 2


@pytest.mark.parametrize(
    ("density", "optimizers", "warns"),
    [(0.01, muon_and_adamw, True), (0.1, muon_and_adamw, False), (0.01, lambda model: muon_and_adamw(model)[1], False)],
    ids=["low", "enough", "adamw"],
)
def test_low_density_of_muon_is_named(density: float, optimizers: Callable[..., Any], warns: bool) -> None:
    method = resolve_momentum(spardl.make_method("topka", density=density), optimizers(Model()))
    said = low_density_warning(method)
    assert (said is not None) is warns
    assert said is None or said.startswith("density=0.01 is low for Muon, whose updates have entries of similar sizes")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "first"), [(WHOLE, 0.0), (CODES, 0.9)], ids=["whole", "first_moment"])
def test_trained_optimizers_are_taken_over(method: spardl.Method, first: float) -> None:
    def work(cluster: object) -> bool:
        loop, plain = Loop(None, first=first), Loop(None, first=first)
        loop.run(range(3))
        plain.run(range(6))
        loop.handle = spardl.attach(loop.called, method, optimizer=loop.optimizers[::-1])  # type: ignore[arg-type]
        continued = loop.run(range(3, 6))
        assert not any(each.state for each in loop.optimizers)
        return torch.allclose(continued, weights(plain.model), rtol=1e-3, atol=1e-4)

    assert run_workers(1, work) == [True]


class Skipping(Model):
    """Leaves a square matrix out of every second pass."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        body = self.body if self.passes % 2 else self.body[:3]
        return self.head(self.narrow(body(inputs)).tanh())


def test_an_unused_matrix_is_left_alone_as_in_torch() -> None:
    """Its residual gets nothing, and its momentum stays."""

    def trained(*, handled: bool) -> tuple[list[Tensor], float]:
        model, found, waits = Skipping(), [], 0.0
        optimizers = muon_and_adamw(model)
        named, options = model.named_parameters(), {"optimizer": optimizers, "find_unused": True}
        handle = spardl.Synchronizer(named, WHOLE_MUON, **options) if handled else None  # type: ignore[arg-type]
        for step in range(6):
            for each in optimizers:
                each.zero_grad()
            model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            if handle:
                handle.wait()
                waits = max(waits, *(float(group["memory"].abs().max()) for group in handle.state_dict()["groups"]))
            for each in optimizers:
                each.step()
            found.append(model.body[3].weight.detach().clone())
        return found, waits

    def work(cluster: object) -> tuple[list[Tensor], list[Tensor], float]:
        plain, _ = trained(handled=False)
        return plain, *trained(handled=True)

    ((plain, found, waits),) = run_workers(1, work)
    assert waits == 0.0
    assert torch.equal(found[1], found[0])
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("moves", ["all", "one"])
def test_matrices_that_move_to_adamw_begin_with_new_moments(moves: str) -> None:
    """With the count of updates of old moments, the first steps would be several times too long."""

    def work(cluster: object) -> float:
        loop = Loop(spardl.attach)
        loop.run(range(5))
        loop.handle.detach()
        first, *rest = hidden(loop.model)
        moved = list(loop.model.parameters()) if moves == "all" else [first, *others(loop.model)]
        adamw = torch.optim.AdamW(moved, lr=0.01, betas=BETAS, eps=1e-4, weight_decay=0.0)
        muon = [] if moves == "all" else [torch.optim.Muon(rest, lr=0.05)]
        loop.handle, loop.optimizers = spardl.attach(loop.called, WHOLE, optimizer=[*muon, adamw]), [*muon, adamw]
        loop.rates = []
        before = [each.detach().clone() for each in moved]
        loop.step(5)
        return max(float((old - new.detach()).abs().max()) for old, new in zip(before, moved, strict=True))

    assert run_workers(1, work) == [pytest.approx(0.01, rel=0.05)]


def test_each_optimizer_may_clear_gradients_after_its_step() -> None:
    """Views of one DDP bucket share a version counter, which clearing some of them increases."""

    def work(cluster: object) -> list[Tensor]:
        found = [Loop(spardl.attach, PART).run(range(4))]
        for to_none, views in ((True, False), (False, False), (False, True)):
            loop = Loop(spardl.attach, PART, views=views)
            for step in range(4):
                loop.backward(step)
                for optimizer, rate in zip(loop.optimizers, loop.rates, strict=True):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
                    rate.step()
            found.append(weights(loop.model))
        return found

    ((expected, *found),) = run_workers(1, work)
    for each in found:
        assert torch.equal(each, expected)


@pytest.mark.parametrize("together", [True, False])
def test_clipping_of_several_optimizers_has_no_effect(together: bool) -> None:
    def work(cluster: object) -> list[Tensor]:
        limit = 1e-3
        loop = Loop(spardl.attach, PART, clip_norm=limit)
        for step in range(4):
            for each in loop.optimizers:
                each.zero_grad()
            loop.backward(step)
            parts = [loop.model.parameters()] if together else [hidden(loop.model), others(loop.model)]
            for part in parts:
                nn.utils.clip_grad_norm_(part, limit)
            for each in (*loop.optimizers, *loop.rates):
                each.step()
        return [weights(loop.model), Loop(spardl.attach, PART, clip_norm=limit).run(range(4))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ((found, expected),) = run_workers(1, work)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("steps", [30, 3, 0], ids=["equal", "fewer", "none"])
def test_optimizers_with_other_numbers_of_steps_are_taken_over(steps: int) -> None:
    def work(cluster: object) -> tuple[Tensor, Tensor, list[str]]:
        found, said = [], []
        for attaches in (False, True):
            model = Model()
            ddp = DistributedDataParallel(model)
            halves = (hidden(model), others(model))
            several = [torch.optim.AdamW(each, lr=0.01, betas=BETAS, eps=1e-4) for each in halves]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(33):
                    if attaches and step == 30:
                        spardl.attach(ddp, WHOLE, optimizer=several)
                    for each in several:
                        each.zero_grad()
                    ddp(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                    several[0].step()
                    if step >= 30 - steps:
                        several[1].step()
            said += [str(each.message) for each in caught]
            found.append(weights(model))
        return *found, said  # type: ignore[return-value]

    ((plain, found, said),) = run_workers(1, work)
    words = "AdamW has no moments for 6 of the 9 averaged parameters"
    assert any(words in each for each in said) is (steps == 0)
    if steps:
        # Conversion keeps each estimate of the variance; younger ones would follow new gradients faster.
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4 if steps == 30 else 4e-3)


def attached(optimizers: Callable[[nn.Module], Any], **options: Any) -> Callable[[], Any]:
    def call() -> None:
        model = Model()
        spardl.attach(DistributedDataParallel(model), PART, optimizer=optimizers(model), **options)

    return call


def stepping_one() -> None:
    loop = Loop(spardl.attach, PART)
    loop.backward(0)
    loop.optimizers[0].step()
    for each in loop.optimizers:
        each.zero_grad()
    loop.backward(1)


def clearing_one() -> None:
    loop = Loop(spardl.attach, PART)
    loop.step(0)
    loop.optimizers[0].zero_grad()
    loop.backward(1)
    loop.optimizers[0].step()


def clearing_the_first_bucket() -> None:
    loop = Loop(spardl.attach, PART, bucket_cap_mb=1e-5)
    loop.step(0)
    loop.step(1)
    loop.optimizers[1].zero_grad()  # of the layers that come first in a backward pass
    loop.backward(2)


def touching_after_one_step() -> None:
    loop = Loop(spardl.attach, PART)
    loop.backward(0)
    loop.optimizers[0].step()
    nn.utils.clip_grad_norm_(others(loop.model), 1e9)
    loop.optimizers[1].step()


def moving_a_matrix() -> None:
    saved = Loop(spardl.attach, PART)
    saved.step(0)
    model = Model()
    first, *rest = hidden(model)
    optimizers = [torch.optim.Muon(rest), torch.optim.AdamW([first, *others(model)], betas=BETAS, eps=1e-4)]
    handle = spardl.attach(DistributedDataParallel(model), PART, optimizer=optimizers)
    handle.load_state_dict(saved.handle.state_dict())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        attached(lambda model: [torch.optim.Muon(hidden(model)), torch.optim.AdamW(model.parameters())]),
        "3 of the 9 averaged parameters are in several optimizers (first: body.0.weight); give each",
    ),
    (
        attached(lambda model: [torch.optim.Muon(hidden(model))]),
        "optimizer is missing 6 of the 9 averaged parameters (first: body.0.bias); pass an optimizer of all",
    ),
    (
        attached(lambda model: [torch.optim.Muon(hidden(model)), torch.optim.SGD(others(model))]),
        "supports Muon with AdamW or Adam, not Muon and SGD; use one of these, or the method",
    ),
    (attached(muon_and_adamw, schedule="dear"), "schedule=dear supports one optimizer, got 2; use schedule=wfbp"),
    (attached(muon_and_adamw, scaler=GradScaler("cpu")), "scaler= supports one optimizer, got 2; train without"),
    (stepping_one, "step() of AdamW was not called after the last backward pass"),
    (clearing_the_first_bucket, "call optimizer.zero_grad() before the first backward pass"),
    (touching_after_one_step, "was changed between backward() and step(); delete clip_grad_norm_()"),
    (clearing_one, "call optimizer.zero_grad() before the first backward pass"),
    (moving_a_matrix, "Muon updated other parameters before; give each parameter the same optimizer as before"),
]


def test_refused_calls() -> None:
    (found,) = run_workers(1, lambda cluster: refusals(call for call, _ in REFUSED))
    for said, (_, words) in zip(found, REFUSED, strict=True):
        assert words in said
        assert "\n" not in said
