from __future__ import annotations

from typing import Any

import pytest
import torch

from spardl.basics.errors import ConfigError
from tests.trainer.toy import settings
from trainer.learner import PRECISIONS, is_number


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1.5),
        ("epochs", 0),
        ("epochs", float("inf")),
        ("epochs", "many"),
        ("max_steps", 0),
        ("max_steps", 1.5),
        ("batch_size", 0),
        ("batch_size", None),
        ("batch_size", True),
        ("eval_batch_size", 0),
        ("accumulation", -1),
        ("clip_norm", 0.0),
        ("clip_norm", "1"),
        ("precision", "fp8"),
        ("log_every", 0),
        ("eval_every", 0),
        ("eval_examples", 0),
        ("untimed_steps", -1),
        ("checkpoint_every", 0),
        ("keep_checkpoints", 0),
        ("check_every", 0),
    ],
)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"training.{name} must be") as error:
        settings(**{name: value})
    assert repr(value) in str(error.value)


def test_steps_of_a_run() -> None:
    assert settings(epochs=2.5, max_steps=None).total_steps(10) == 25
    assert settings(epochs=0.01, max_steps=None).total_steps(10) == 1
    assert settings(epochs=2, max_steps=7).total_steps(10) == 7
    assert settings(epochs=2, max_steps=70).total_steps(10) == 20


def test_formats() -> None:
    assert settings(precision="fp64").formats.weights == torch.float64
    assert settings(precision="bf16").formats.weights == torch.float32
    assert settings(precision="bf16").formats.autocast == torch.bfloat16
    assert settings(precision="fp32").formats.autocast is None
    assert [name for name in PRECISIONS if settings(precision=name).formats.scales] == ["fp16"]


def test_numbers() -> None:
    assert is_number(int, 3)
    assert is_number(float, 3)
    assert is_number(float, 0.5)
    assert not is_number(int, 3.0)
    assert not any(is_number(kind, value) for kind in (int, float) for value in (True, "3", None))
