"""Muon with AdamW as an optimizer of the trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method import AutoMomentum, GlobalResidual, MuonMomentum
from spardl.method.moving import double_momentum_warning, resolve_momentum
from spardl.schedules import AfterBackward, Dear, OuterSteps, Wfbp
from tests.support.driver import composed
from tests.trainer.toy import ToyTask, plan, trainer
from trainer.build import build_dataset, build_plan
from trainer.learner import sample_optimizer
from trainer.optimizers import MuonAdamW, make_optimizer, optimizer_parts

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")

MUON = partial(MuonAdamW, lr=0.02, adamw_lr=0.01, weight_decay=0.1, betas=(0.0, 0.9), eps=1e-4)
SCHEDULES = {
    "after_backward": AfterBackward(),
    "wfbp": Wfbp(bucket_mb=0.0001),
    "dear": Dear(threshold_mb=0.0001),
}


class TorchOptimizers(torch.optim.Optimizer):
    """Steps of torch's Muon and AdamW on the matrices and the other parameters of a model."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        own = list(parameters)
        super().__init__(own, {"lr": 0.02})
        matrices = [each for each in own[:-2] if each.ndim == 2]
        rest = [each for each in own if all(each is not matrix for matrix in matrices)]
        self.muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.0, 0.9), eps=1e-4, weight_decay=0.1)

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()


def weights(method: spardl.Method, make: Any, schedule: Any, workers: int, folder: Path, **more: Any) -> Tensor:
    made = plan(method, ToyTask(fancy=False), max_steps=6, **more)
    job = trainer(replace(made, optimizer=make, schedule=schedule), folder, workers)
    job.fit()
    return torch.cat([parameter.detach().flatten() for parameter in job._learner.model.parameters()])


def whole() -> spardl.Method:
    """Sends all entries of the updates, undamped."""
    method = spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), AutoMomentum(beta2=0.9))
    return resolve_momentum(method, optimizer_parts(sample_optimizer(MUON)))


def test_dense_training_makes_the_steps_of_torch(tmp_path: Path) -> None:
    dense = spardl.make_method("none")
    expected = weights(dense, TorchOptimizers, AfterBackward(), 2, tmp_path / "torch")
    for name, schedule in SCHEDULES.items():
        found = weights(dense, MUON, schedule, 2, tmp_path / name)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_worker_that_sends_all_makes_the_steps_of_torch(name: str, tmp_path: Path) -> None:
    method = whole()
    assert isinstance(method.momentum, MuonMomentum)
    expected = weights(spardl.make_method("none"), TorchOptimizers, AfterBackward(), 1, tmp_path / "torch")
    found = weights(method, MUON, SCHEDULES[name], 1, tmp_path / "moved")
    # Muon computes in bfloat16.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_embeddings_and_the_last_layer_are_left_to_adamw() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = make_optimizer(MUON, model)
    assert isinstance(optimizer, MuonAdamW)
    muon, adamw = optimizer.parts
    assert muon.param_groups[0]["params"] == [model[1].weight]
    assert len(adamw.param_groups[0]["params"]) == 6
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]


def test_the_state_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = make_optimizer(MUON, model)

    def step(own: torch.optim.Optimizer) -> list[Tensor]:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        own.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    start = step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = step(optimizer)
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), start, strict=True):
            parameter.copy_(before)
    again = make_optimizer(MUON, model)
    again.load_state_dict(saved)
    assert all(torch.equal(*pair) for pair in zip(step(again), expected, strict=True))


def test_outer_steps_keep_the_state_of_each_worker(tmp_path: Path) -> None:
    """Two simulated workers that exchange in every step are a worker whose gradients are equal."""
    schedule = OuterSteps(every=2, lr=1.0, momentum=0.0)
    once, twice = (weights(spardl.make_method("none"), MUON, schedule, 2, tmp_path / name) for name in "ab")
    assert torch.equal(once, twice)
    dense = weights(spardl.make_method("none"), MUON, AfterBackward(), 2, tmp_path / "dense")
    assert not torch.equal(once, dense)


def test_the_configuration_resolves_to_muon_before_compression() -> None:
    plain = composed("optimizer=muon", "model=gpt_chars", "compressor=spardl", "compressor.density=0.1")
    made = build_plan(plain, build_dataset(plain))
    assert isinstance(made.method.momentum, MuonMomentum)
    made.check(2)
    plain = composed("optimizer=muon", "model=gpt_chars", "compressor=spardl", "momentum=adam")
    with pytest.raises(ConfigError, match="momentum=adam does not match Muon; use momentum=auto"):
        build_plan(plain, build_dataset(plain)).check(2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("compressor=dgc",), "momentum=corrected replaces the momentum of SGD, but MuonAdamW has other moments"),
        (("optimizer.lr=-1",), "optimizer cannot be created with lr=-1"),
        (("optimizer.adjust_lr_fn=foo",), "optimizer cannot be created with"),
        (("optimizer.ns_steps=200",), "optimizer.ns_steps must be an integer, at least 0 and at most 99, got 200"),
    ],
)
def test_wrong_settings_are_one_line(words: tuple[str, ...], complaint: str) -> None:
    plain = composed("optimizer=muon", "model=gpt_chars", "compressor=none", *words)
    with pytest.raises(ConfigError) as error:
        build_plan(plain, build_dataset(plain)).check(2)
    assert complaint in str(error.value)


def test_memory_counts_the_momentum_of_matrices() -> None:
    plain = composed("optimizer=muon", "model=gpt_chars", "compressor=none")
    made = build_plan(plain, build_dataset(plain))
    assert made.need(1).optimizer == 4 * made.parameters()


def test_running_means_keep_the_rate_of_muon() -> None:
    method = spardl.make_method("arc_topk_ef21")
    said = double_momentum_warning(
        method, make_optimizer(partial(MuonAdamW), nn.Sequential(*map(nn.Linear, [4, 4], [4, 4])))
    )
    assert said is not None
    assert said.endswith("set its momentum=0, and betas=(0, ...) for other parameters, or use SGD with momentum=0")


def test_a_model_without_matrices_is_refused() -> None:
    plain = composed("optimizer=muon", "compressor=none")
    with pytest.raises(ConfigError, match="optimizer=muon finds no matrices in CifarResNet, other than embeddings"):
        build_plan(plain, build_dataset(plain)).check(2)


def test_other_versions_of_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"optimizer=muon needs torch 2\.9 or newer, found"):
        MUON([nn.Parameter(torch.zeros(2, 2))])
