from __future__ import annotations

import math

import pytest

from spardl.basics.errors import ConfigError
from trainer.lr import Constant, Cosine, Exponential, LinearDecay, LrSchedule, MultiStep


@pytest.mark.parametrize(
    ("schedule", "epoch", "expected"),
    [
        (Constant(), 0.0, 1.0),
        (Constant(), 7.0, 1.0),
        (Constant(2.0, 0.1), 0.0, 0.1),
        (Constant(2.0, 0.1), 1.0, 0.55),
        (Constant(2.0, 0.1), 2.0, 1.0),
        (Cosine(), 0.0, 1.0),
        (Cosine(), 2.5, 0.5 + 0.5 / math.sqrt(2)),
        (Cosine(), 5.0, 0.5),
        (Cosine(), 10.0, 0.0),
        (Cosine(2.0, 0.0), 1.0, 0.5),
        (Cosine(2.0, 0.0), 6.0, 0.5),
        (Cosine(), 12.0, 0.0),
        (LinearDecay(), 0.0, 1.0),
        (LinearDecay(), 2.5, 0.75),
        (LinearDecay(2.0), 6.0, 0.5),
        (LinearDecay(), 11.0, 0.0),
        (LinearDecay(warmup_factor=0.0, warmup_fraction=0.2), 1.0, 0.5),
        (LinearDecay(warmup_factor=0.0, warmup_fraction=0.2), 6.0, 0.5),
        (Exponential(gamma=0.5), 0.99, 1.0),
        (Exponential(gamma=0.5), 3.5, 0.125),
        (Exponential(2.0, 0.0, gamma=0.5), 1.0, 0.5),
        (MultiStep(milestones=[3, 6], gamma=0.1), 2.99, 1.0),
        (MultiStep(milestones=[3, 6], gamma=0.1), 3.0, 0.1),
        (MultiStep(milestones=[3, 6], gamma=0.1), 9.0, 0.01),
        (MultiStep(10.0, 0.1, milestones=[3], gamma=0.5), 5.0, 0.55),
    ],
)
def test_factors_of_ten_epochs(schedule: LrSchedule, epoch: float, expected: float) -> None:
    assert schedule.factor(epoch, 10.0) == pytest.approx(expected, abs=1e-12)


def test_a_warm_up_longer_than_the_run() -> None:
    assert Cosine(5.0, 0.0).factor(1.0, 2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(warmup_epochs=-1),
        lambda: Constant(warmup_factor=1.5),
        lambda: Cosine(warmup_epochs="2"),
        lambda: MultiStep(milestones=5),
        lambda: MultiStep(milestones=["a"]),
        lambda: MultiStep(gamma=None),
        lambda: MultiStep(gamma=math.nan),
        lambda: MultiStep(gamma=math.inf),
        lambda: MultiStep(milestones=[1, math.nan]),
        lambda: Constant(warmup_epochs=math.nan),
        lambda: LinearDecay(warmup_epochs=math.inf),
    ],
)
def test_values_out_of_range(make) -> None:
    with pytest.raises(ConfigError, match=r"lr_schedule\.(warmup_epochs|milestones) must be"):
        make()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Exponential(gamma=0.0), "lr_schedule.gamma"),
        (lambda: Exponential(gamma=1.1), "lr_schedule.gamma"),
        (lambda: Cosine(warmup_fraction=1.0), "warmup_fraction must be"),
        (lambda: Cosine(warmup_epochs=1.0, warmup_fraction=0.1), "exclude each other"),
    ],
)
def test_other_values_out_of_range(make, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()
