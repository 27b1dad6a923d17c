"""Local updates (optimizer state applied before compression) in user loops."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method import AdamMomentum, AutoMomentum, GlobalResidual, SgdMomentum
from tests.hooks.loops import batches, loss_of, made, weights
from tests.support.harness import run_workers

STEPS = 8
# Some gradients of attention are zero up to rounding errors, which Adam would scale to full size.
EPS = 1e-4
PART = spardl.Method(TopK(0.1), SparDL(), GlobalResidual(), AutoMomentum())
MEASURED = replace(PART, momentum=AutoMomentum(update_scale="measured"))
WITHOUT, SHORTER, UNCHANGED = (replace(PART, momentum=AutoMomentum(factor=factor)) for factor in (0.0, 0.5, 0.9))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 0.03}, {"params": matrices}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=EPS, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [each for each in model.parameters() if each.ndim < 2]
    matrices = [each for each in model.parameters() if each.ndim > 1]
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 0.02}, {"params": matrices}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=EPS, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
}


def whole(name: str) -> spardl.Method:
    """A method that sends everything and updates like an optimizer."""
    rules = {"adam": AdamMomentum((0.9, 0.999), EPS), "adamw": AdamMomentum((0.8, 0.9), EPS)}
    rule = rules.get(name, AutoMomentum())
    return spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), rule)


@dataclass
class Loop:
    """A training loop with or without a handle."""

    handle_of: Callable[..., Any] | None
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    scaler: GradScaler | None = None
    passes: int = 1

    def __post_init__(self) -> None:
        self.model = made("transformer")
        self.optimizer = self.optimizer_of(self.model)
        self.ddp: nn.Module = self.model if self.handle_of is alone else DistributedDataParallel(self.model)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.handle: Any = None
        if self.handle_of is not None:
            options = {"optimizer": self.optimizer, "clip_norm": self.clip_norm, "scaler": self.scaler, **self.options}
            self.handle = self.handle_of(self.ddp, **options)

    def _pass(self, words: Tensor) -> None:
        loss = loss_of(self.ddp, words) / self.passes
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    @contextmanager
    def _last(self) -> Iterator[None]:
        if self.handle_of is alone:
            with self.handle:
                yield
        else:
            yield

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        words = batches(self.model, range(step * self.passes, (step + 1) * self.passes))
        for each in words[:-1]:
            with (self.handle if self.handle_of is alone else self.ddp).no_sync():
                self._pass(each)
        with self._last():
            self._pass(words[-1])
        if self.handle_of is None and self.clip_norm:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.rates.step()

    def run(self, steps: range = range(STEPS)) -> Tensor:
        for step in steps:
            self.step(step)
        if hasattr(self.handle, "flush"):
            self.handle.flush()
        return weights(self.model)


def attached(method: spardl.Method, **more: Any) -> Callable[..., Any]:
    return lambda ddp, **options: spardl.attach(ddp, method, **{**options, **more})


def alone(model: nn.Module, method: spardl.Method, **options: Any) -> Any:
    return spardl.Synchronizer(model.named_parameters(), method, **options)


def both(workers: int, work: Callable[[], Any]) -> Any:
    """What work gives, which must be the same on all workers."""
    found = run_workers(workers, lambda cluster: work())
    assert len({str(each) for each in found}) == 1
    return found[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_single_worker_that_sends_everything_equals_torch(name: str) -> None:
    """With weight decay, parameter groups, a learning-rate schedule, clipping and accumulation."""

    def work() -> dict[str, float]:
        make, settings = OPTIMIZERS[name], {"clip_norm": 0.5, "passes": 2}
        plain = Loop(None, make, **settings).run()
        handles = {"wfbp": attached(whole(name)), "dear": attached(whole(name), schedule="dear"), "alone": alone}
        more = {"alone": {"options": {"method": whole(name)}}}
        found = {each: Loop(handle, make, **settings, **more.get(each, {})).run() for each, handle in handles.items()}
        return {each: float((weights - plain).abs().max()) for each, weights in found.items()}

    assert all(difference < 1e-11 for difference in both(1, work).values())


def trained_before(name: str, handle_of: Callable[..., Any], *, late: bool = False) -> Loop:
    """A loop that trained densely for four steps before a handle was attached (``late``: without the state)."""
    method = {"options": {"method": whole(name)}} if handle_of is alone else {}
    before = Loop(None, OPTIMIZERS[name])
    before.run(range(4))
    if not late:
        before.handle_of = handle_of
        target = before.model if handle_of is alone else before.ddp
        before.handle = handle_of(target, optimizer=before.optimizer, **method.get("options", {}))
        before.ddp = target
        return before
    loop = Loop(handle_of, OPTIMIZERS[name], **method)
    loop.run(range(1))
    for mine, other in ((loop.model, before.model), (loop.optimizer, before.optimizer), (loop.rates, before.rates)):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    return loop


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("late", [False, True], ids=["attached", "loaded"])
def test_state_of_a_trained_optimizer_is_taken_over(name: str, late: bool) -> None:
    """Uses the optimizer's own beta2, so that a single worker must train like torch."""

    def work() -> dict[str, float]:
        plain = Loop(None, OPTIMIZERS[name]).run()
        found = {}
        for each, handle_of in (("wfbp", attached(whole(name))), ("alone", alone)):
            loop = trained_before(name, handle_of, late=late)
            found[each] = float((loop.run(range(4, STEPS)) - plain).abs().max())
            found[f"{each} state"] = len(loop.optimizer.state)
        return found

    assert all(value < 1e-11 for value in both(1, work).values())


def test_dear_takes_over_the_state_of_a_trained_optimizer() -> None:
    def work() -> list[float]:
        plain = Loop(None, adamw).run()
        loop = trained_before("adamw", attached(whole("adamw"), schedule="dear"))
        return [float((loop.run(range(4, STEPS)) - plain).abs().max()), len(loop.optimizer.state)]

    difference, left = both(1, work)
    assert difference < 1e-11
    assert left == 0


def test_recommended_recipe_keeps_the_size_of_trained_updates() -> None:
    """Its beta2 differs from the optimizer's; a variance that restarted at zero would be one gradient."""

    def work() -> float:
        loop = Loop(None, adamw)
        loop.run(range(30))
        groups = {each: group for group in loop.optimizer.param_groups for each in group["params"]}
        squares = {
            each: state["exp_avg_sq"] / (1 - groups[each]["betas"][1] ** int(state["step"]))
            for each, state in loop.optimizer.state.items()
        }
        handle = spardl.attach(loop.ddp, "spardl", density=1.0, scope="model", optimizer=loop.optimizer)
        loss_of(loop.ddp, batches(loop.model, [30])[0]).backward()
        state = handle.state_dict()
        variance = torch.cat([group["variance"] for group in state["groups"]])
        after = variance.sum() / (1 - 0.9 ** state["groups"][0]["updates"])
        return float(after / sum(each.sum() for each in squares.values()))

    assert 0.85 < both(1, work) < 1.2


def test_partly_trained_optimizer_state_is_dropped_with_warning() -> None:
    def work() -> list[str]:
        loop = Loop(None, adamw)
        loop.run(range(2))
        del loop.optimizer.state[next(loop.model.parameters())]
        loop.handle_of = attached(PART)
        loop.handle = loop.handle_of(loop.ddp, optimizer=loop.optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.run(range(2, 4))
        return [str(each.message) for each in caught]

    (line,) = both(1, work)
    assert "AdamW has no moments for 1 of the 13 averaged parameters (first: embed.weight)" in line


def test_detach_before_first_step_keeps_the_optimizer_state() -> None:
    def work() -> bool:
        plain = Loop(None, adamw).run()
        loop = Loop(None, adamw)
        loop.run(range(4))
        attached(PART)(loop.ddp, optimizer=loop.optimizer).detach()
        return torch.equal(loop.run(range(4, STEPS)), plain)

    assert both(1, work)


def test_loaded_handle_state_overrides_moments_of_old_checkpoint() -> None:
    """Earlier versions left moments from before attach() in the optimizer's checkpoint."""

    def work() -> bool:
        loop = trained_before("adamw", attached(PART))
        stale = copy.deepcopy(loop.optimizer.state_dict()["state"])
        loop.run(range(4, 6))
        groups = copy.deepcopy(loop.optimizer.state_dict()["param_groups"])
        saved = [copy.deepcopy(part.state_dict()) for part in (loop.model, loop.rates, loop.handle)]
        expected = loop.run(range(6, STEPS))
        again = Loop(attached(PART))
        for part, values in zip((again.model, again.rates, again.handle), saved, strict=True):
            part.load_state_dict(values)
        again.optimizer.load_state_dict({"state": stale, "param_groups": groups})
        return torch.equal(again.run(range(6, STEPS)), expected)

    assert both(2, work)


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_workers_that_send_everything_equal_ddp(name: str) -> None:
    """The mean of momenta is the momentum of the mean."""

    def work() -> float:
        plain = Loop(None, OPTIMIZERS[name]).run()
        return float((Loop(attached(whole(name)), OPTIMIZERS[name]).run() - plain).abs().max())

    assert both(2, work) < 1e-12


def test_momentum_is_shorter_by_default_and_kept_on_request() -> None:
    def work() -> list[bool]:
        found = [Loop(attached(method), sgd).run() for method in (PART, SHORTER, UNCHANGED)]
        explicit = Loop(attached(replace(PART, momentum=SgdMomentum(0.9))), sgd).run()
        return [torch.equal(found[0], found[1]), torch.equal(found[2], explicit), torch.equal(found[0], found[2])]

    assert both(2, work) == [True, True, False]


def test_without_momentum_equals_sgd_at_a_higher_rate() -> None:
    def work() -> float:
        plain = Loop(None, lambda model: torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.01)).run()
        found = Loop(attached(replace(WITHOUT, compressor=TopK(1.0))), sgd).run()
        return float((found - plain).abs().max())

    assert both(2, work) < 1e-12


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, PART) for name in OPTIMIZERS), ("adamw", MEASURED), ("sgd", WITHOUT), ("nesterov", SHORTER)],
    ids=[*OPTIMIZERS, "measured", "without_momentum", "shorter_momentum"],
)
def test_sparse_weights_are_equal_on_all_workers_and_handles(name: str, method: spardl.Method) -> None:
    def work() -> list[float]:
        one = Loop(attached(method), OPTIMIZERS[name]).run()
        other = Loop(attached(method, schedule="dear"), OPTIMIZERS[name]).run()
        assert torch.equal(one, other)
        return one.tolist()

    both(3, work)


def test_optimizer_has_no_state_until_detach_and_works_after() -> None:
    def work() -> list[int]:
        loop = Loop(attached(PART))
        loop.run(range(3))
        counts = [len(loop.optimizer.state_dict()["state"])]
        loop.handle.detach()
        loop.step(3)
        return [*counts, len(loop.optimizer.state_dict()["state"]) // len(list(loop.model.parameters()))]

    assert both(2, work) == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "method", "name"),
    [
        *(("wfbp", PART, "adamw"), ("dear", PART, "adamw"), ("wfbp", MEASURED, "adamw")),
        *(("wfbp", WITHOUT, "sgd"), ("wfbp", SHORTER, "nesterov")),
    ],
    ids=["wfbp", "dear", "measured", "without_momentum", "shorter_momentum"],
)
def test_save_and_load_resume_bit_exactly(schedule: str, method: spardl.Method, name: str) -> None:
    def work() -> bool:
        loop = Loop(attached(method, schedule=schedule), OPTIMIZERS[name])
        loop.run(range(4))
        parts = (loop.model, loop.optimizer, loop.rates, loop.handle)
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in parts], buffer)
        expected = loop.run(range(4, STEPS))
        buffer.seek(0)
        again = Loop(attached(method, schedule=schedule), OPTIMIZERS[name])
        loaded = torch.load(buffer, weights_only=True)
        for part, values in zip((again.model, again.optimizer, again.rates, again.handle), loaded, strict=True):
            part.load_state_dict(values)
        return torch.equal(again.run(range(4, STEPS)), expected)

    assert both(2, work)


def test_a_scaler_changes_nothing_but_its_overflows() -> None:
    """Scales are powers of two, so weights are bit-identical; all workers skip an overflow."""

    def work() -> list[bool]:
        plain = Loop(attached(PART)).run()
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scaled = Loop(attached(PART), scaler=scaler).run()
        close = float((scaled - plain).abs().max()) < 1e-9
        return [close, scaler.get_scale() > 2.0**10]

    assert both(2, work) == [True, True]


def refusal(work: Callable[[], Any]) -> str:
    def tried() -> str:
        try:
            work()
        except ConfigError as error:
            return str(error)
        return "accepted"

    return both(1, tried)


def clipped_by_the_loop() -> None:
    loop = Loop(attached(PART))
    loop.optimizer.zero_grad()
    loss_of(loop.ddp, batches(loop.model, [0])[0]).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()


def cycled() -> None:
    loop = Loop(attached(PART))
    loop.rates = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=10)
    loop.run(range(3))


def with_options(**options: Any) -> Callable[[], object]:
    return lambda: Loop(attached(PART), lambda model: torch.optim.AdamW(model.parameters(), **options))


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "betas": (0.5, 0.9)}, {"params": rest}])


def with_another(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])


ADAM = spardl.Method(TopK(0.1), SparDL(), GlobalResidual(), AdamMomentum())


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (clipped_by_the_loop, "was changed between backward() and step()"),
        (cycled, "cycle_momentum=False"),
        (with_options(amsgrad=True), "does not support AdamW(amsgrad=True)"),
        (with_options(maximize=True), "maximize=False"),
        (lambda: Loop(attached(PART), in_groups), "but not in momentum, betas or eps"),
        (
            lambda: Loop(attached(PART), lambda model: torch.optim.Adagrad(model.parameters())),
            "not Adagrad; use one of these",
        ),
        (lambda: Loop(attached(PART, optimizer=None), clip_norm=1.0), "clip_norm=1.0 needs optimizer="),
        (lambda: Loop(attached(ADAM, optimizer=None)), "pass optimizer= to attach()"),
        (lambda: Loop(attached(ADAM), sgd), "momentum=adam does not match SGD"),
        (
            lambda: Loop(attached(PART, optimizer="adam")),
            "or a list of several, got 'adam'",
        ),
        (
            lambda: Loop(attached(PART), with_another),
            "1 of the optimizer's 14 parameters are not averaged",
        ),
        (lambda: Loop(alone, with_another, {"method": PART}), "use a second optimizer for them"),
        (lambda: Loop(attached(PART), clip_norm=-1), "clip_norm must be a number above 0"),
        (
            lambda: Loop(attached(spardl.make_method("none")), clip_norm=1.0),
            "clip_norm has no effect where gradients are averaged",
        ),
        (lambda: Loop(attached(spardl.make_method("dgc")), sgd), "use torch.optim.SGD with momentum=0"),
    ],
    ids=[
        *("clipped", "cycled", "amsgrad", "maximize", "groups", "adagrad", "clip_alone", "without", "other", "word"),
        *("another", "another_alone", "clip", "dense_clip", "twice"),
    ],
)
def test_unsupported_optimizers_are_refused(work: Callable[[], Any], words: str) -> None:
    assert words in refusal(work)


def test_without_the_optimizer_gradients_are_averaged() -> None:
    """momentum=auto then leaves the optimizer its state."""

    def work() -> bool:
        optimizers = spardl.Method(PART.compressor, PART.communicator, PART.residual)
        found = [Loop(attached(method, optimizer=None)).run() for method in (PART, optimizers)]
        return torch.equal(*found)

    assert both(2, work)
