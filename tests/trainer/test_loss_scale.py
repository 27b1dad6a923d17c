"""Float16 in the trainer: losses are scaled; a step that overflows on one worker is skipped by all, without loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.schedules import AfterBackward, Dear, MgWfbp, Schedule, Wfbp
from spardl.schedules.averaging import gradient_of
from tests.support.harness import dense, spardl, topka
from tests.trainer.toy import ToyTask, plan, trainer
from trainer.learner import LossScale
from trainer.task import Batch
from trainer.trainer import Trainer

SCHEDULES: dict[str, Schedule] = {
    "after_backward": AfterBackward(),
    "wfbp": Wfbp(bucket_mb=0),
    "mg_wfbp": MgWfbp(),
    "dear": Dear(threshold_mb=0),
}


class Steep(ToyTask):
    """Whose loss is finite, but not its scaled gradient, in one backward pass of each step that is named."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self._bad, self._calls = bad, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._calls += 1
        loss = super().loss(model, batch).float()
        return loss + (loss - loss.detach()) * (1e38 if self._calls - 1 in self._bad else 0)


def begun(schedule: str, folder: Path, method: Any = None, bad: set[int] | None = None, **changes: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    made = plan(method or dense(), Steep(bad or set()), precision="fp16", **{"max_steps": 8, **changes})
    return trainer(replace(made, schedule=SCHEDULES[schedule]), folder, 3)


def weights(running: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in running._learner.model.parameters()])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_all_schedules_skip_the_same_steps(clip: float | None, tmp_path: Path) -> None:
    """The first step overflows in one group, since the factor is large; the third on one of three workers."""
    found = {}
    for name in SCHEDULES:
        running = begun(name, tmp_path / name, bad={3 * 2 + 1}, clip_norm=clip)
        running.fit()
        found[name] = weights(running)
        assert running._learner._scale.factor() == 2.0**14
    assert all(torch.equal(each, found["after_backward"]) for each in found.values())
    calm = begun("wfbp", tmp_path / "calm", clip_norm=clip)
    calm.fit()
    assert not torch.equal(weights(calm), found["wfbp"])


@pytest.mark.parametrize("schedule", ["after_backward", "wfbp", "dear"])
def test_nothing_is_lost(schedule: str, tmp_path: Path) -> None:
    """A skipped step returns its averages to the residuals: every gradient is in an average or a residual."""
    running = begun(schedule, tmp_path, spardl(0.2) if schedule == "dear" else topka(0.2), bad={3 * 2 + 1})
    engine = running._learner.synchronizer
    hand_over, given, taken = engine._averaging.hand_over, 0.0, 0.0
    came: dict[int, float] = {}

    def watched(number: int, local: int) -> None:
        gradient = gradient_of(engine._gradient, engine.gradient_state.groups[number])
        came[number] = came.get(number, 0.0) + float(gradient.double().sum()) / engine.scale
        hand_over(number, local)

    engine._averaging.hand_over = watched  # type: ignore[method-assign]
    skipped = 0
    for step in range(6):
        came.clear()
        running._learner.step(step)
        # A group that overflowed on any worker is dropped.
        given += sum(total for number, total in came.items() if number not in engine._scaling.overflowed)
        overflowed, scale = engine.overflowed, engine.scale
        skipped += overflowed
        engine.flush()
        if not overflowed:
            taken += sum(3 * float(each.values.double().sum()) / scale for each in engine.averages())
    engine.begin()  # returns unused averages to the residuals
    carried = sum(engine.gradient_state.residual_sum(local) for local in range(3)) / engine.scale
    assert skipped == 2
    assert given == pytest.approx(taken + carried, abs=1e-3)


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    """The factor, and how long it has stood, are in the checkpoint."""
    whole = begun("wfbp", tmp_path / "whole", topka(0.2), checkpoint_every=4, keep_checkpoints=9)
    whole.fit()
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("*00000004")
    made = plan(topka(0.2), Steep(set()), precision="fp16", max_steps=8, checkpoint_every=4, keep_checkpoints=9)
    again = trainer(replace(made, schedule=SCHEDULES["wfbp"]), tmp_path / "again", 3, checkpoint)
    again.fit()
    assert torch.equal(weights(again), weights(whole))
    assert again._learner._scale.state_dict() == whole._learner._scale.state_dict()


def test_the_factor_follows_overflows() -> None:
    scale = LossScale(torch.device("cpu"), enabled=True)
    assert scale.scaled(torch.tensor(2.0)).item() == 2.0**17
    for overflowed, factor in ((False, 2.0**16), (True, 2.0**15), (True, 2.0**14), (False, 2.0**14)):
        scale.update(overflowed=overflowed)
        assert scale.factor() == factor
    other = LossScale(torch.device("cpu"), enabled=True)
    other.load_state_dict(scale.state_dict())
    assert other.factor() == 2.0**14


def test_disabled_scaling_changes_nothing() -> None:
    scale = LossScale(torch.device("cpu"), enabled=False)
    assert scale.scaled(torch.tensor(2.0)).item() == 2.0
    scale.update(overflowed=True)
    assert scale.factor() == 1.0
    assert scale.state_dict() == {}
    assert math.isfinite(scale.factor())
