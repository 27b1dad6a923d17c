"""Applied updates, and the limit of an update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spardl.method import SgdMomentum
from spardl.schedules.apply_update import decay_of
from spardl.schedules.scaling import Limit


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


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_parts_do_not_prevent_clipping_the_rest(bad: float) -> None:
    """The non-finite part is left out later, without the others."""
    whole, harmed = [torch.full((4,), 3.0)], [torch.full((4,), 3.0), torch.tensor([bad, 1.0])]
    for vectors in (whole, harmed):
        Limit(1.0, first=True).clip(vectors, 6, 1.0)
    assert torch.equal(whole[0], harmed[0])
    assert float(whole[0].norm()) == pytest.approx(1)
    assert harmed[1][1] == 1


def test_where_nothing_is_finite_nothing_changes() -> None:
    vector = torch.tensor([math.inf, 1.0])
    Limit(1.0, first=True).clip([vector], 2, 1.0)
    assert vector.tolist() == [math.inf, 1.0]
