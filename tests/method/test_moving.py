"""Replacement of momentum=auto once the optimizer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, SparDL
from spardl.compressors import ReusedThreshold, TopK
from spardl.method import (
    AdamMomentum,
    AutoMomentum,
    GlobalResidual,
    LocalMomentum,
    LocalResidual,
    NoResidual,
    OptimizerMomentum,
    SgdMomentum,
)
from spardl.method.moving import coupled_decay, resolve_momentum
from spardl.schedules.apply_update import ApplyUpdate

AUTO = spardl.Method(TopK(0.1), SparDL(), GlobalResidual(), AutoMomentum())


def optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize(
    ("kind", "options", "momentum", "decay"),
    [
        (torch.optim.SGD, {"lr": 0.1}, OptimizerMomentum(), None),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}, SgdMomentum(0.8), None),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            SgdMomentum(0.9, nesterov=True),
            None,
        ),
        (torch.optim.Adam, {}, AdamMomentum((0.0, 0.99)), 0.98),
        (torch.optim.AdamW, {"betas": (0.5, 0.9), "eps": 1e-5}, AdamMomentum((0.0, 0.9), 1e-5), 0.98),
    ],
)
def test_momentum_of_the_optimizer_becomes_local(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], momentum: object, decay: float | None
) -> None:
    found = resolve_momentum(AUTO, optimizer(kind, **options))
    assert type(found.momentum) is type(momentum)
    assert found.momentum == momentum or not momentum.moved
    assert found.residual.decay == decay
    assert found.compressor == TopK(0.1, scope="chunk" if isinstance(momentum, AdamMomentum) else "auto")
    assert found.communicator == AUTO.communicator


@pytest.mark.parametrize(
    ("momentum", "factor", "gain"), [(0.9, 0.0, 10.0), (0.9, 0.5, 5.0), (0.9, 0.9, 1.0), (0.5, 0.25, 1.5)]
)
def test_shorter_momentum_keeps_the_total_change(momentum: float, factor: float, gain: float) -> None:
    found = resolve_momentum(
        replace(AUTO, momentum=AutoMomentum(factor=factor)), optimizer(torch.optim.SGD, momentum=momentum)
    )
    assert isinstance(found.momentum, SgdMomentum)
    assert found.momentum.factor == factor
    assert found.momentum.gain == pytest.approx(gain)
    moments = found.momentum.init_moments(torch.zeros(2))
    gradients = [torch.ones(2), *[torch.zeros(2)] * 300]
    total = sum(found.momentum.apply(each, moments).clone() for each in gradients)
    torch.testing.assert_close(total, torch.full((2,), 1 / (1 - momentum)))


@pytest.mark.parametrize(
    ("compressor", "residual", "given", "momentum"),
    [
        (TopK(0.01), GlobalResidual(), None, SgdMomentum(0.5, gain=2.0)),
        (TopK(0.1), LocalResidual(), None, SgdMomentum(0.5, gain=2.0)),
        (TopK(0.01), GlobalResidual(), 0.75, SgdMomentum(0.75)),
        (TopK(0.2), GlobalResidual(), None, SgdMomentum(0.75)),
        (TopK(0.01), NoResidual(), None, SgdMomentum(0.75)),
        (ReusedThreshold(0.01), LocalResidual(), None, SgdMomentum(0.75)),
    ],
    ids=["default", "10%", "given", "20%", "no_residual", "threshold"],
)
def test_handles_shorten_momentum_that_a_residual_replaces(
    compressor: Any, residual: Any, given: float | None, momentum: SgdMomentum
) -> None:
    method = spardl.Method(compressor, AllGather(), residual, AutoMomentum(factor=given))
    made = optimizer(torch.optim.SGD, momentum=0.75)
    assert resolve_momentum(method, made, for_handle=True).momentum == momentum
    # The trainer keeps the results of existing run ids.
    assert resolve_momentum(method, made).momentum == SgdMomentum(0.75)


def test_handles_keep_a_small_momentum() -> None:
    assert resolve_momentum(AUTO, optimizer(torch.optim.SGD, momentum=0.4), for_handle=True).momentum == SgdMomentum(
        0.4
    )
    assert type(resolve_momentum(AUTO, optimizer(torch.optim.SGD), for_handle=True).momentum) is OptimizerMomentum


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (optimizer(torch.optim.SGD, momentum=0.5), "momentum_factor=0.6 is above the momentum of the optimizer, 0.5"),
        (
            optimizer(torch.optim.AdamW),
            "momentum_factor=0.6 has no effect with AdamW, because only SGD",
        ),
        (None, "momentum_factor=0.6 has no effect without optimizer=; pass SGD, or remove it"),
    ],
    ids=["above", "adamw", "without"],
)
def test_momentum_factor_needs_sgd(made: torch.optim.Optimizer | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_momentum(replace(AUTO, momentum=AutoMomentum(factor=0.6)), made)


@pytest.mark.parametrize(("name", "value"), [("gain", 0.0), ("gain", "a"), ("factor", 1.0)])
def test_invalid_values_of_sgd(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"momentum.{name} must be"):
        SgdMomentum(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compressor", "scope"),
    [
        (TopK(0.1, scope="model"), "model"),
        (TopK(0.1, scope="layer"), "layer"),
        (TopK(0.1, scope="chunk"), "chunk"),
        # Of a chunk less than one entry would be sent.
        (TopK(0.0002), "auto"),
        # A threshold for each chunk would be too much work.
        (ReusedThreshold(0.1), "auto"),
    ],
    ids=["model", "layer", "chunk", "a low density", "thresholds"],
)
def test_chosen_scope_is_kept(compressor: Any, scope: str) -> None:
    method = spardl.Method(compressor, AllGather(), LocalResidual(), AutoMomentum())
    found = resolve_momentum(method, optimizer(torch.optim.AdamW))
    assert found.compressor == compressor
    assert found.compressor.scope == scope
    assert found.momentum == AdamMomentum((0.0, 0.95))


def test_chosen_decay_is_kept() -> None:
    method = spardl.Method(TopK(0.1), SparDL(), GlobalResidual(0.5), AutoMomentum())
    assert resolve_momentum(method, optimizer(torch.optim.AdamW)).residual == GlobalResidual(0.5)


def test_chosen_beta2_is_kept() -> None:
    method = spardl.make_method("spardl", beta2=0.99)
    assert resolve_momentum(method, optimizer(torch.optim.AdamW)).momentum == AdamMomentum((0.0, 0.99))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.SGD, "has no effect with SGD, .* remove it"),
        (None, "has no effect without optimizer=, .* remove it"),
    ],
)
def test_beta2_without_adam_is_refused(kind: type[torch.optim.Optimizer] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_momentum(spardl.make_method("spardl", beta2=0.99), optimizer(kind, lr=0.1) if kind else None)


def test_chosen_update_scale_is_kept() -> None:
    method = spardl.make_method("spardl", update_scale="measured")
    expected = AdamMomentum((0.0, 0.99), update_scale="measured")
    assert resolve_momentum(method, optimizer(torch.optim.AdamW)).momentum == expected


@pytest.mark.parametrize(("given", "scale"), [(None, "measured"), ("none", "none"), ("measured", "measured")])
def test_handles_measure_the_scale_of_adams_updates(given: str | None, scale: str) -> None:
    method = spardl.make_method("spardl", update_scale=given)
    expected = AdamMomentum((0.0, 0.99), update_scale=scale)
    assert resolve_momentum(method, optimizer(torch.optim.AdamW), for_handle=True).momentum == expected
    # The trainer keeps the results of existing run ids.
    assert resolve_momentum(method, optimizer(torch.optim.AdamW)).momentum == replace(
        expected, update_scale=given or "none"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.SGD, "has no effect with SGD, .* remove it"),
        (None, "has no effect without optimizer=, .* remove it"),
    ],
)
def test_update_scale_without_adam_is_refused(kind: type[torch.optim.Optimizer] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_momentum(
            spardl.make_method("spardl", update_scale="measured"), optimizer(kind, lr=0.1) if kind else None
        )


def test_other_momenta_are_kept() -> None:
    method = spardl.Method(AUTO.compressor, AUTO.communicator, AUTO.residual, LocalMomentum())
    assert resolve_momentum(method, optimizer(torch.optim.AdamW)) is method
    assert type(resolve_momentum(AUTO, None).momentum) is OptimizerMomentum


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "SGD(dampening=0.1)"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=False"),
        (torch.optim.RMSprop, {}, "not RMSprop; use one of these"),
        (torch.optim.Adafactor, {}, "not Adafactor; use one of these"),
        (type("OtherAdamW", (torch.optim.AdamW,), {}), {}, "not OtherAdamW; use one of these"),
    ],
)
def test_unsupported_optimizers_are_refused(kind: type[torch.optim.Optimizer], options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_momentum(AUTO, optimizer(kind, **options))
    assert words in str(error.value)
    text = str(error.value)
    assert 0 < text.index("bf16 or int8") < text.index("recipe=published")


def test_factor_with_a_plain_optimizer() -> None:
    """The optimizer is unchanged, with factor 0."""
    weights = nn.Parameter(torch.ones(3))
    made = torch.optim.SGD([weights], lr=0.5)
    steps = ApplyUpdate(made, SgdMomentum(0.9))
    for _ in range(2):
        weights.grad = torch.ones(3)
        made.step()
    assert weights.tolist() == [0.0] * 3
    steps.close()


@pytest.mark.parametrize(
    ("kind", "expected"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.1), (torch.optim.AdamW, 0.0)]
)
def test_weight_decay_follows_the_optimizer(kind: type[torch.optim.Optimizer], expected: float) -> None:
    made = optimizer(kind, lr=0.1, weight_decay=0.1)
    assert coupled_decay(made, made.param_groups[0]) == expected
