"""Optimizer steps that only apply averaged updates."""

from __future__ import annotations

import torch
from torch import nn

from spardl.method import SgdMomentum
from spardl.schedules.apply_update import decay_of


def test_weight_decay_follows_a_loaded_optimizer_state() -> None:
    parameter, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.5)
    decay = decay_of(SgdMomentum(0.9), optimizer)
    assert decay is not None
    assert decay(parameter) == 0.5

    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert decay(parameter) == 0.25

    optimizer.add_param_group({"params": [late], "weight_decay": 0.125})
    assert decay(late) == 0.125

    late.requires_grad_(False)
    assert decay(late) == 0
