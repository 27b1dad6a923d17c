"""Muon before compression, against torch's optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.communicators import Dense
from spardl.compressors import NoCompression, TopK
from spardl.method import AdamMomentum, AutoMomentum, GlobalResidual, LocalResidual, Method, NoResidual
from spardl.method.momentum import Matrix, Moments
from spardl.method.moving import joint_rule, matrices_of, optimizers_of, resolve_momentum, step_size
from spardl.method.muon import MuonMomentum, entry_size, orthogonalize
from spardl.method.recipes import make_method
from tests.support.harness import Bench, same_bits, spardl, to_dense

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists since torch 2.9")

AUTO = replace(spardl(0.1), momentum=AutoMomentum())
ONE_BIT = make_method("onebit")
RATIOS = (None, "original", "match_rms_adamw", "spectral_unclamped")


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def muon(*parameters: Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(parameters) or [matrix(3, 2)], **options)


def adamw(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(3))], **options)


def updates(
    rule: MuonMomentum, gradients: list[Tensor], places: tuple[Matrix, ...], scale: float = 1.0
) -> list[Tensor]:
    moments = rule.init_moments(torch.zeros_like(gradients[0]))
    moments.matrices, moments.scale = places, scale
    return [rule.apply(each * scale, moments) for each in gradients]


@hypothesis.given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    nesterov=st.booleans(),
    momentum=st.sampled_from([0.0, 0.5, 0.95]),
    ratio=st.sampled_from(RATIOS),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_update_equals_that_of_torch(
    rows: int, columns: int, nesterov: bool, momentum: float, ratio: str | None, seed: int
) -> None:
    torch.manual_seed(seed)
    theirs = matrix(rows, columns)
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": ratio, "weight_decay": 0.2}
    optimizer = muon(theirs, **options)
    rule = joint_rule([optimizer])
    assert isinstance(rule, MuonMomentum)
    moments = rule.init_moments(torch.zeros(theirs.numel()))
    moments.matrices = (Matrix(0, rows, columns),)
    mine = theirs.detach().clone()
    for _ in range(4):
        theirs.grad = torch.randn(rows, columns)
        update = rule.apply(theirs.grad.flatten(), moments).view(rows, columns)
        mine.mul_(1 - 0.1 * 0.2).sub_(update, alpha=step_size(optimizer, optimizer.param_groups[0], mine))
        optimizer.step()
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@hypothesis.given(rows=st.integers(1, 50), columns=st.integers(1, 50), seed=st.integers(0, 2**31))
@hypothesis.settings(max_examples=40, deadline=None)
def test_compressed_entries_have_the_size_of_adams(rows: int, columns: int, seed: int) -> None:
    hypothesis.assume(abs(rows - columns) > 5)  # well-conditioned, so that five iterations suffice
    gradient = torch.randn(rows * columns, generator=torch.Generator().manual_seed(seed))
    (update,) = updates(MuonMomentum(), [gradient], (Matrix(0, rows, columns),))
    assert 0.6 < float(update.square().mean().sqrt()) < 1.3


def test_orthogonalized_zeros_are_zeros_and_inputs_stay() -> None:
    given = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert not orthogonalize(given, MuonMomentum().coefficients, 5, 1e-7).any()
    given[0, 0] = 2.0
    orthogonalize(given, MuonMomentum().coefficients, 5, 1e-7)
    assert given[0, 0] == 2.0


@hypothesis.given(
    shapes=st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    first=st.sampled_from([0.0, 0.9]),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_each_parameter_gets_the_update_of_its_rule(
    shapes: list[tuple[bool, int, int]], seed: int, first: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = [sum(rows * columns for _, rows, columns in shapes[:end]) for end in range(len(shapes) + 1)]
    places = [Matrix(start, rows, columns) for start, (_, rows, columns) in zip(starts, shapes, strict=False)]
    own = tuple(each for each, (owned, _, _) in zip(places, shapes, strict=True) if owned)
    gradients = [torch.randn(starts[-1], generator=generator) for _ in range(3)]
    rule, adam = MuonMomentum(betas=(first, 0.9)), AdamMomentum(betas=(first, 0.9))
    found = updates(rule, gradients, own)[-1]
    moments = adam.init_moments(gradients[0])
    others = [adam.apply(each, moments) for each in gradients][-1]
    for place in places:
        part = slice(place.start, place.stop)
        if place in own:
            alone = updates(rule, [each[part] for each in gradients], (place._replace(start=0),))
            assert torch.equal(found[part], alone[-1])
        else:
            torch.testing.assert_close(found[part], others[part])


def test_updates_have_the_loss_scale_and_moments_do_not() -> None:
    gradients = [torch.randn(9) for _ in range(3)]
    places = (Matrix(0, 2, 3),)
    plain, scaled = (updates(MuonMomentum(), gradients, places, scale) for scale in (1.0, 2.0**10))
    assert all(torch.equal(a * 2.0**10, b) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [0.0, 0.95])
def test_finite_gradients_make_finite_updates(dtype: torch.dtype, factor: float) -> None:
    limit = torch.finfo(dtype).max
    method = replace(spardl(0.2), momentum=MuonMomentum(factor=factor))
    bench = Bench.build(method, 2, 40, dtype)
    for state in bench.states:
        state.moments.matrices = (Matrix(4, 5, 6),)
    for step in range(6):
        values = (torch.randn(2, 40) * 1e37).clamp(-limit, limit).to(dtype) * (step % 3 != 2)
        bench.step(list(values))
        for state in bench.states:
            assert state.memory.isfinite().all()
            assert state.moments.variance.isfinite().all()


@pytest.mark.parametrize("factor", [0.0, 0.95])
def test_overflow_does_not_stay_in_the_momentum(factor: float) -> None:
    """The difference of the largest numbers of both signs is infinite."""
    limit = torch.finfo(torch.float32).max
    rule = MuonMomentum(factor=factor)
    moments = rule.init_moments(torch.zeros(6))
    moments.matrices = (Matrix(0, 2, 3),)
    for sign in (1, -1, 1):
        rule.apply(torch.full((6,), sign * limit), moments)
        assert moments.variance.isfinite().all()


@pytest.mark.parametrize("workers", [1, 3])
def test_equal_gradients_make_the_update_of_one_worker(workers: int) -> None:
    bench = Bench.build(Method(NoCompression(), Dense(), NoResidual(), MuonMomentum()), workers, 15)
    for state in bench.states:
        state.moments.matrices = (Matrix(0, 3, 5),)
    gradients = [torch.randn(15, dtype=torch.float64) for _ in range(4)]
    expected = updates(MuonMomentum(), gradients, (Matrix(0, 3, 5),))
    for gradient, update in zip(gradients, expected, strict=True):
        averages = bench.step([gradient.clone() for _ in range(workers)])
        assert all(same_bits(each, averages[0]) for each in averages)
        torch.testing.assert_close(to_dense(averages[0]), update, rtol=1e-12, atol=0)


def test_state_names_its_matrices() -> None:
    bench = Bench.build(replace(spardl(0.5), momentum=MuonMomentum()), 1, 12)
    (state,) = bench.states
    state.moments.matrices = (Matrix(0, 3, 3),)
    bench.step([torch.randn(12, dtype=torch.float64)])
    saved = state.state_dict()
    state.load_state_dict(saved)
    state.moments.matrices = (Matrix(3, 3, 3),)
    with pytest.raises(ValueError, match="Muon updated other parameters before; give each parameter the same"):
        state.check(saved)


def test_recommended_form_for_muon_and_adamw() -> None:
    found = resolve_momentum(AUTO, [muon(momentum=0.9, nesterov=False), adamw(betas=(0.9, 0.95), eps=1e-6)])
    assert found.momentum == MuonMomentum((0.0, 0.95), 1e-6, factor=0.9, nesterov=False)
    assert found.residual == GlobalResidual(0.98)
    assert found.compressor == TopK(0.1, scope="chunk")
    assert isinstance(resolve_momentum(AUTO, muon()).momentum, MuonMomentum)


def test_methods_that_send_every_entry_keep_the_first_moment_of_adamw() -> None:
    """No entry waits that could take its role; with AdamW alone, it is dropped as for other methods."""
    found = resolve_momentum(ONE_BIT, [muon(), adamw()], for_handle=True)
    assert found.momentum == MuonMomentum((0.9, 0.99), update_scale="measured")
    assert found.residual == LocalResidual(0.98)
    assert resolve_momentum(ONE_BIT, adamw()).momentum == AdamMomentum((0.0, 0.95))


def test_several_optimizers_of_one_kind_share_a_rule() -> None:
    assert isinstance(resolve_momentum(AUTO, [adamw(lr=0.1), adamw(lr=0.2)]).momentum, AdamMomentum)


def test_matrices_are_those_of_muon() -> None:
    own, other = matrix(3, 2), matrix(3, 2)
    assert matrices_of([torch.optim.AdamW([other]), muon(own)]) == {own}
    assert entry_size(3, 12) == pytest.approx(12**-0.5)


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (lambda: [muon(), torch.optim.SGD([matrix(2)], momentum=0.9)], "Muon with AdamW or Adam, not Muon and SGD"),
        (lambda: [muon(), torch.optim.RMSprop([matrix(2)])], "SGD, Adam, AdamW, Muon, not RMSprop"),
        (
            lambda: [muon(momentum=0.9), muon()],
            "optimizers (Muon and Muon) may differ in learning rate",
        ),
        (
            lambda: [adamw(), adamw(eps=1e-3)],
            "optimizers (AdamW and AdamW) may differ in learning rate",
        ),
        (lambda: [], "optimizer is an empty list"),
        (lambda: [adamw(), "muon"], "or a list of several, got 'muon'"),
        (lambda: muon(momentum=1.0), "momentum.factor must be at least 0 and below 1, got 1.0"),
        (lambda: muon(ns_steps=100), "momentum.steps must be at most 99, got 100"),
    ],
    ids=["sgd", "rmsprop", "two_muons", "two_adamws", "empty", "a_name", "momentum", "steps"],
)
def test_refused_optimizers(optimizers: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_momentum(AUTO, optimizers())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_same_optimizer_twice_is_refused() -> None:
    own = muon()
    with pytest.raises(ConfigError, match="contains the same optimizer twice; pass each one once"):
        optimizers_of([own, own])


def test_parameter_without_two_dimensions_is_refused() -> None:
    own = muon()
    own.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigError, match=r"Muon has a parameter of shape \(3,\), but updates matrices only; give it"):
        joint_rule([own])


def test_unknown_ratio_of_a_group_is_refused() -> None:
    own = muon()
    own.param_groups[0]["adjust_lr_fn"] = "other"
    with pytest.raises(ConfigError, match="is unknown; use one of original, match_rms_adamw, spectral_unclamped"):
        joint_rule([own])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beta2": 0.9}, "beta2=0.9 has no effect with Muon, because only Adam and AdamW use it; remove it"),
        ({"factor": 0.5}, "momentum_factor=0.5 has no effect with Muon, because only SGD uses it; remove it"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_momentum(replace(AUTO, momentum=AutoMomentum(**given)), muon())
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (1.0, 0.9)),
        ("factor", 1.0),
        ("coefficients", (1.0,)),
        ("steps", -1),
        ("least_norm", 0.0),
    ],
)
def test_invalid_values(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"momentum.{field} "):
        MuonMomentum(**{field: value})  # type: ignore[arg-type]


def test_moments_without_matrices_are_adams() -> None:
    gradient = torch.randn(8)
    rule, adam = MuonMomentum((0.0, 0.9)), AdamMomentum((0.0, 0.9))
    mine, theirs = (each.init_moments(gradient) for each in (rule, adam))
    assert isinstance(mine, Moments)
    assert torch.equal(rule.apply(gradient, mine), adam.apply(gradient, theirs))
