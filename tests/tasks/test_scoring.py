from __future__ import annotations

import math

import pytest
import torch

from tasks.scoring import score


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(dtype):
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(6)], [1.0, 1.0, 1.0]], dtype=dtype)
    loss = -math.log(2 / 4) - math.log(1 / 8) - math.log(1 / 3)
    sums = score(logits, torch.tensor([0, 1, 2]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([loss, 1.0, 3.0], rel=1e-6)


def test_of_nothing():
    assert score(torch.empty(0, 3), torch.empty(0, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]
