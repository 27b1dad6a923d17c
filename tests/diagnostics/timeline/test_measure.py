"""What the hooks see. A clock that counts its marks makes the order of events exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.measure import Clock, measure


def counting() -> Callable[[], float]:
    """A clock on which every mark is one second after the one before."""
    marks = count(1)
    return lambda: float(next(marks))


class Chain(nn.Module):
    """Uses its parts in another order than they are registered in, a twice; shares, spares and borrows weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.b.weight
        self.unused = nn.Linear(4, 7)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.b(self.a(self.c(x))))
        x = self.tied(self.a(x))[None]
        result: Tensor = self.attention(x, x, x, need_weights=False)[0].sum()
        return result


def run(model: nn.Module, loss: Callable[[], Tensor], **options: Any) -> Profile:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    return measure(model, loss, optimizer, name="toy", batch=3, **options)


@pytest.fixture
def counted() -> Profile:
    torch.manual_seed(0)
    model = Chain()
    return run(model, lambda: model(torch.ones(3, 4)), passes=3, warmup=1, timer=counting())


def test_layers_are_those_of_registration(counted: Profile) -> None:
    names = ["a", "b", "c", "tied", "unused", "attention", "attention.out_proj"]
    assert [layer.name for layer in counted.layers] == names
    assert counted.entries == (20, 16, 20, 4, 35, 60, 20)
    assert (counted.model, counted.batch) == ("toy", 3)


def test_needed_is_the_first_use(counted: Profile) -> None:
    """Marks: begin 1, root 2, c 3, a 4, b 5, frozen 6, tied 7, attention 8.

    The second use of a has none, nor has the projection in the attention, which is not called.
    """
    needed = {layer.name: layer.needed for layer in counted.layers}
    assert [needed[name] for name in ("c", "a", "b", "tied", "attention")] == [2, 3, 4, 6, 7]
    assert needed["attention.out_proj"] == needed["attention"]
    assert needed["unused"] == counted.forward == 8


def test_ready_is_the_last_gradient(counted: Profile) -> None:
    """Ten gradients arrive, those of c last, b's only after both uses; then the backward pass is over."""
    ready = {layer.name: layer.ready for layer in counted.layers}
    assert counted.backward == 11
    assert ready["unused"] == counted.backward
    assert ready["attention.out_proj"] < ready["attention"] < ready["b"] < ready["a"] < ready["c"] == 10
    assert ready["tied"] < ready["b"]


def test_the_update_is_per_entry(counted: Profile) -> None:
    assert counted.update == pytest.approx(1 / sum(counted.entries))


def test_the_warm_up_does_not_count() -> None:
    model, clock, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), counting(), count(1)

    def loss() -> Tensor:
        for _ in range(9 if next(calls) <= 3 else 0):
            clock()
        return model(torch.ones(1, 2)).sum()

    assert run(model, loss, passes=2, warmup=3, timer=clock).forward == 4
    assert next(calls) == 6


def test_hooks_are_gone_afterwards() -> None:
    model = Chain()
    run(model, lambda: model(torch.ones(3, 4)), passes=1, warmup=0)
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_real_seconds_fit_together() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    found = run(model, lambda: model(torch.ones(8, 32)).sum())
    assert 0 < found.forward < 60
    assert 0 < found.backward < 60
    needed = [layer.needed for layer in found.layers]
    assert needed == sorted(needed)
    assert list(found.ready) == sorted(found.ready, reverse=True)
    assert "cpu" in found.device


def test_nothing_to_measure() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="passes must be at least 1, got 0"):
        run(model, lambda: model(torch.ones(1, 2)).sum(), passes=0)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="found no parameters"):
        measure(frozen, lambda: torch.zeros(()), torch.optim.SGD(model.parameters()), name="x", batch=1)


def test_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="not finite"):
        run(model, lambda: model(torch.full((1, 2), torch.inf)).sum() * 0)


def test_marks_on_a_gpu_are_events_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the measured device, as a hook may run in a thread with another one."""
    recorded: list[object] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            recorded.append(stream)

        def elapsed_time(self, stop: Event) -> float:
            return 1500.0 if stop is not self else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    clock = Clock(torch.device("cuda", 3))
    start, stop = clock.mark(), clock.mark()
    assert recorded == [("stream of", torch.device("cuda", 3))] * 2
    assert clock.between(start, stop) == 1.5
