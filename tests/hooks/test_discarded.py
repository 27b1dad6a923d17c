"""Backward passes whose gradients the loop discards, as in GANs: residuals and moments stay unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method import AutoMomentum, GlobalResidual
from tests.hooks.loops import weights
from tests.hooks.small import Loop
from tests.support.harness import run_workers

PART = spardl.Method(TopK(0.2), SparDL(), GlobalResidual(), AutoMomentum())
STEPS = 5


class Trained(Loop):
    """A discriminator; gradients of a generator's passes through it are discarded."""

    def __init__(self, schedule: str, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__(None)
        if make is not None:
            self.optimizer = make(self.model.parameters(), lr=0.01)
        self.handle = spardl.attach(self.ddp, PART, schedule=schedule, optimizer=self.optimizer)

    def generate(self, step: int, within: AbstractContextManager[Any]) -> None:
        with within:
            self.backward(1000 + step)


def adversarial(schedule: str, how: str, make: Callable[..., torch.optim.Optimizer] | None = None) -> Tensor:
    """Returns weights after some steps, with passes between them that are discarded as ``how`` says."""
    loop = Trained(schedule, make)
    for step in range(STEPS):
        loop.step(step)
        if how in ("discard", "no_sync"):
            loop.optimizer.zero_grad()
        within = {"discard": loop.handle.discard, "no_sync": loop.ddp.no_sync}.get(how, nullcontext)
        for number in range(2 if how else 0):
            loop.generate(10 * step + number, within())
    return loop.end()


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns this library's warnings."""
    said = [str(each.message) for each in caught if not issubclass(each.category, ResourceWarning)]
    return [line for line in said if line.startswith("spardl")]


def alone(*, generates: bool, discards: bool) -> Tensor:
    """A Synchronizer whose discarded passes run outside its block."""
    torch.manual_seed(2)
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    synchronizer = spardl.Synchronizer(model.named_parameters(), PART, optimizer=optimizer)
    source = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with synchronizer:
            model(torch.randn(3, 6, dtype=torch.float64, generator=source)).square().mean().backward()
        optimizer.step()
        if discards:
            optimizer.zero_grad()
        with synchronizer.discard() if discards else nullcontext():
            if generates:
                model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    return weights(model)


def test_passes_on_applied_gradients_leave_no_trace() -> None:
    """The textbook loop: the generator's pass adds to applied gradients, before zero_grad()."""

    def work(cluster: object) -> list[bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = []
            for schedule, make in (("wfbp", None), ("wfbp", torch.optim.Adam), ("dear", None)):
                expected = adversarial(schedule, "", make)
                found += [torch.equal(adversarial(schedule, how, make), expected) for how in ("textbook", "discard")]
            expected = alone(generates=False, discards=False)
            found += [torch.equal(alone(generates=True, discards=each), expected) for each in (False, True)]
        return [*found, not texts_of(caught)]

    assert run_workers(2, work) == [[True] * 9] * 2


def cleared(schedule: str, passes: int) -> tuple[Tensor, list[str]]:
    """Discards averages of ``passes`` passes, the first of which cannot be foreseen."""
    loop = Trained(schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            loop.step(step)
            for _ in range(max(0, min(2, passes - 2 * step))):
                loop.optimizer.zero_grad()
                loop.backward(1000 + step)
    return loop.end(), texts_of(caught)


def test_averages_that_were_cleared_are_undone() -> None:
    """The first warns and returns to residuals; later ones are undone by a snapshot."""

    def work(cluster: object) -> list[Any]:
        found: list[Any] = []
        for schedule in ("wfbp", "dear"):
            (first, said), (more, _) = cleared(schedule, 1), cleared(schedule, 7)
            found += [first.tolist(), torch.equal(first, more), [line[:40] for line in said]]
        return found

    one, other = run_workers(2, work)
    assert one == other
    assert one[1::3] == [True, True]
    assert one[2::3] == [["spardl: averaged gradients were cleared "]] * 2


def test_averages_that_were_cleared_go_back_to_residuals() -> None:
    """No mass is lost: residuals grow by the discarded pass's updates (momentum and gradient)."""

    def work(cluster: object) -> tuple[Tensor, Tensor]:
        loop = Trained("wfbp")
        loop.step(0)
        before = _vector(loop.handle.state_dict(), "memory")
        loop.optimizer.zero_grad()
        loop.backward(1)
        velocity = _vector(loop.handle.state_dict(), "velocity")
        loop.optimizer.zero_grad()
        averager = loop.handle._averager
        loop.handle._optimizer_steps.begin(averager)
        return before + velocity, _vector(loop.handle.state_dict(), "memory")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = (sum(each) for each in zip(*run_workers(2, work), strict=True))
    assert torch.allclose(expected, found, atol=1e-12)


def _vector(state: dict[str, Any], name: str) -> Tensor:
    return torch.cat([group[name].clone() for group in state["groups"]])


class Gan(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.g, self.d = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.g(noise)
        return self.d(fake) if real is None else self.d(fake.detach()) - self.d(real)


def one_module(*, discards: bool) -> tuple[list[str], bool, str]:
    """Returns warnings, whether the discriminator's residuals stay unchanged, and errors."""
    model = DistributedDataParallel(Gan(), find_unused_parameters=True)
    net = model.module
    handle = spardl.attach(model, "spardl", density=0.2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net.g, net.d)]
    source, rests = torch.Generator().manual_seed(torch.distributed.get_rank()), []

    def residual() -> Tensor:
        averager = handle._averager
        numbers = [number for number, name in enumerate(averager.gradient.names) if name.startswith("d.")]
        return torch.cat([averager.engine.gradient_state.of(number)[0].clone() for number in numbers])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for each, (ours, others) in enumerate(((net.g, net.d), (net.d, net.g))):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                before = residual() if step and ours is net.g else None
                inputs = [torch.randn(4, 6, dtype=torch.float64, generator=source) for _ in range(each + 1)]
                with handle.discard(others.parameters()) if discards else nullcontext():
                    model(*inputs).square().mean().backward()
                if before is not None:
                    rests.append(torch.equal(before, residual()))
                optimizers[each].step()
    with pytest.raises(ConfigError) as error, handle.discard([nn.Parameter(torch.ones(1))]):
        pass
    return texts_of(caught), all(rests), str(error.value)


def test_one_module_with_two_optimizers() -> None:
    for (said, rests, refused), discarded in run_workers(
        2, lambda cluster: (one_module(discards=False), one_module(discards=True))
    ):
        assert len(said) == 1
        assert "was cleared before any step() applied it" in said[0]
        assert "handle.discard(" in said[0]
        assert not rests
        assert "1 parameters that this handle does not average" in refused
        assert discarded[:2] == ([], True)


def clipped(limit: float, own: float | None, schedule: str, *, scaled: bool = False) -> str:
    """Returns errors and warnings of a loop that clips, with their step."""
    loop = Loop(None)
    scaler = GradScaler("cpu", init_scale=8.0) if scaled else None
    spardl.attach(loop.ddp, PART, schedule=schedule, optimizer=loop.optimizer, clip_norm=own, scaler=scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loop.optimizer.zero_grad()
            source = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            loss = loop.ddp(torch.randn(5, 4, dtype=torch.float64, generator=source)).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), limit)
            try:
                scaler.step(loop.optimizer) if scaler else loop.optimizer.step()
            except ConfigError as error:
                return f"{step}: {error}"
            if scaler:
                scaler.update()
    return "; ".join(texts_of(caught))


def limited(scale: float | None, *, twice: bool) -> Tensor:
    """Returns weights with ``clip_norm=``; if ``twice``, the loop clips to the same limit."""
    loop = Loop(None)
    scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    spardl.attach(loop.ddp, PART, optimizer=loop.optimizer, clip_norm=0.01, scaler=scaler)
    for step in range(4):
        loop.optimizer.zero_grad()
        source = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        loss = loop.ddp(torch.randn(5, 4, dtype=torch.float64, generator=source)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        if twice:
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        scaler.step(loop.optimizer)
        scaler.update()
    return weights(loop.model)


UNLIMITED = "0: the gradient of"
UNNECESSARY = "spardl: clip_grad_norm_() between backward() and step() has no effect"
ANOTHER = "delete clip_grad_norm_() from the loop, because this handle already clips to clip_norm=0.01"
CLIPPED: list[tuple[str, float, float | None, bool, str]] = [
    ("wfbp", 1e6, None, False, UNLIMITED),
    ("wfbp", 1e6, None, True, UNLIMITED),
    ("wfbp", 0.01, None, False, UNLIMITED),
    ("wfbp", 0.01, 0.01, False, UNNECESSARY),
    ("wfbp", 0.01, 0.01, True, UNNECESSARY),
    ("wfbp", 1e6, 0.01, False, UNNECESSARY),
    ("wfbp", 0.003, 0.01, False, ANOTHER),
    ("dear", 1e6, None, False, UNLIMITED),
    ("dear", 1e6, None, True, UNLIMITED),
    ("dear", 0.01, 0.01, False, UNNECESSARY),
    ("dear", 1e6, 0.01, False, UNNECESSARY),
    ("dear", 0.003, 0.01, False, ANOTHER),
]


def test_clipping_loops_are_reported_in_the_first_step() -> None:
    """Even if nothing is clipped yet; clipping to the same limit is allowed and has no effect."""

    def work(cluster: object) -> tuple[list[str], bool]:
        found = [clipped(limit, own, schedule, scaled=scaled) for schedule, limit, own, scaled, _ in CLIPPED]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return found, all(torch.equal(limited(each, twice=True), limited(each, twice=False)) for each in (None, 8))

    for found, equal in run_workers(2, work):
        assert equal
        for line, (*case, words) in zip(found, CLIPPED, strict=True):
            assert words in line, (case, line)


def differences(model: nn.Module, step: int) -> Tensor:
    """Returns a loss that does not change the last bias, whose gradients and averages are exactly zero."""
    first, second = model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
    return (first - second).square().sum()


@pytest.mark.parametrize(("inside", "ignored"), [(True, 1), (False, 1), (True, 3), (False, 2)])
def test_passes_are_ignored_if_their_first_gradient_is_zero(inside: bool, ignored: int) -> None:
    def trained(ignored: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        synchronizer = spardl.Synchronizer(model.named_parameters(), PART, optimizer=optimizer)
        for step in range(3):
            optimizer.zero_grad()
            with synchronizer:
                differences(model, step).backward()
            optimizer.step()
            for number in range(ignored):
                with synchronizer if inside else nullcontext():
                    differences(model, step + 100 * (number + 1)).backward()
        return synchronizer.stats().steps, weights(model)

    def work(cluster: object) -> bool:
        steps, expected = trained(0)
        found = trained(ignored)
        return found[0] == steps == 3 and torch.equal(found[1], expected)

    assert run_workers(1, work) == [True]
