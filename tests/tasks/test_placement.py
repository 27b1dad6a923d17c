from __future__ import annotations

import pytest
import torch

from tasks.placement import place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_follow_the_model_and_integers_stay(dtype):
    model = torch.nn.Linear(2, 2).to(dtype)
    placed = place({"x": torch.ones(1, 2), "n": torch.ones(1, dtype=torch.int64)}, model)
    assert placed["x"].dtype == dtype
    assert placed["n"].dtype == torch.int64


def test_tensors_follow_the_models_device():
    model = torch.nn.Linear(2, 2, device="meta")
    placed = place({"x": torch.ones(1, 2), "n": torch.ones(1, dtype=torch.int64)}, model)
    assert {tensor.device.type for tensor in placed.values()} == {"meta"}
