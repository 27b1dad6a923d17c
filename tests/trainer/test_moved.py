"""An optimizer's state moved before compression, in the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import Dense, SparDL
from spardl.compressors import NoCompression, TopK
from spardl.method import AdamMomentum, GlobalResidual, NoResidual, OptimizerMomentum, SgdMomentum
from spardl.schedules import AfterBackward, Dear, Schedule, Wfbp
from tests.support.driver import composed
from tests.trainer.toy import ToyTask, plan, trainer
from trainer.build import build_dataset, build_plan
from trainer.lr import Cosine

SCHEDULES = {
    "after_backward": AfterBackward(),
    "wfbp": Wfbp(bucket_mb=0.0001),
    "dear": Dear(threshold_mb=0.0001),
}
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ADAMW = partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
ADAM = partial(torch.optim.Adam, lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05)
RULES = {ADAMW: AdamMomentum((0.8, 0.9), 1e-4), ADAM: AdamMomentum((0.8, 0.9), 1e-4)}


def weights(method: spardl.Method, make: Make, schedule: Schedule, workers: int, folder: Path, **more: Any) -> Tensor:
    """After some steps with a schedule of learning rates."""
    made = plan(method, ToyTask(fancy=False), lr_schedule=Cosine(warmup_epochs=0.1), max_steps=8, **more)
    job = trainer(replace(made, optimizer=make, schedule=schedule), folder, workers)
    job.fit()
    return torch.cat([parameter.detach().flatten() for parameter in job._learner.model.parameters()])


def whole(momentum: OptimizerMomentum | Any) -> spardl.Method:
    return spardl.Method(TopK(1.0), SparDL(), GlobalResidual(), momentum)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("make", [ADAMW, ADAM, SGD], ids=["adamw", "adam", "sgd"])
def test_one_worker_that_sends_all_is_dense_training(name: str, make: Make, tmp_path: Path) -> None:
    """With the norm limited, and several passes in a step."""
    rule = RULES.get(make, SgdMomentum(0.9, nesterov=True))
    dense = spardl.make_method("none")
    more = {"clip_norm": 0.1, "accumulation": 2}
    expected = weights(dense, make, SCHEDULES["after_backward"], 1, tmp_path / "dense", **more)
    found = weights(whole(rule), make, SCHEDULES[name], 1, tmp_path / "moved", **more)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_workers_that_send_all_are_dense_training_with_momentum(name: str, tmp_path: Path) -> None:
    dense = weights(spardl.make_method("none"), SGD, SCHEDULES["after_backward"], 3, tmp_path / "dense")
    rule = SgdMomentum(0.9, nesterov=True)
    torch.testing.assert_close(
        weights(whole(rule), SGD, SCHEDULES[name], 3, tmp_path / "moved"), dense, rtol=0, atol=1e-12
    )


def test_schedules_agree_where_groups_do_not_matter(tmp_path: Path) -> None:
    """Dense updates of several workers, limited before: the same whenever they are sent."""
    method = spardl.Method(NoCompression(), Dense(), NoResidual(), AdamMomentum())
    found = [weights(method, ADAMW, each, 3, tmp_path / name, clip_norm=0.1) for name, each in SCHEDULES.items()]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-12)


def test_the_optimizer_must_be_of_that_kind() -> None:
    with pytest.raises(ConfigError, match="momentum=adam does not match SGD"):
        replace(plan(whole(AdamMomentum())), optimizer=SGD).check(2)


def test_muon_before_compression_is_refused() -> None:
    plain = composed("momentum=adam", "optimizer=adamw")
    plain["momentum"] = {"_target_": "spardl.method.muon.MuonMomentum"}
    with pytest.raises(ConfigError, match="momentum=muon needs the matrices of optimizer=muon"):
        build_plan(plain, build_dataset(plain))
