"""Applied updates and their limit, partial updates, and unused parameters."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.method import SgdMomentum
from spardl.schedules.apply_update import Updater, decay_of
from spardl.schedules.gradient_state import Usage
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


OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
    # These two require other gradients: sparse ones, and those of matrices only.
    if kind.__name__ not in ("SparseAdam", "Muon")
]


def make(kind: type[torch.optim.Optimizer]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)) for _ in range(5)]
    groups = [{"params": parameters[3:], "lr": 0.05}, {"params": parameters[:3]}]
    return parameters, kind(groups, lr=0.01)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_piece_by_piece_is_all_at_once(kind: type[torch.optim.Optimizer]) -> None:
    ours, optimizer = make(kind)
    theirs, reference = make(kind)
    updater = Updater(optimizer)
    for step in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.full((3, 2), float(step + 1))
            other.grad = one.grad.clone()
        updater.hold()
        for part in (ours[:1], ours[1:4], ours[4:], []):
            updater.apply(part)
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


def test_held_settings_and_an_error() -> None:
    parameters, optimizer = make(torch.optim.SGD)
    updater = Updater(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones(3, 2)
    updater.hold()
    optimizer.param_groups[0]["lr"] = 100.0
    updater.apply(parameters[3:4])
    torch.testing.assert_close(parameters[3], before[3] - 0.05)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(LookupError))
    with pytest.raises(LookupError):
        updater.apply(parameters)
    assert optimizer.param_groups[0]["lr"] == 100.0
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


def test_an_optimizer_that_needs_everything() -> None:
    with pytest.raises(ConfigError, match="optimizer=LBFGS needs all gradients at once"):
        Updater(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))


def test_usage() -> None:
    usage = Usage(2, 3)
    for local, numbers in enumerate([(0,), (0, 2)]):
        for number in numbers:
            usage.note(local, number)
    rows = usage.rows()
    assert [row.tolist() for row in rows] == [[1, 0, 0], [1, 0, 1]]
    assert usage.unused(rows) == [1]
    assert usage.state_dict() is True
    usage.clear()
    for local in range(2):
        for number in range(3):
            usage.note(local, number)
    assert usage.unused(usage.rows()) == []
    assert usage.rows() == []
    assert usage.unused([]) == []
    other = Usage(2, 3)
    other.load_state_dict(usage.state_dict())
    assert other.rows() == []


def test_find_unused_survives_a_state_saved_without_it() -> None:
    always = Usage(1, 2, always=True)
    always.load_state_dict(False)
    assert len(always.rows()) == 1
    assert always.unused([torch.tensor([1, 1], dtype=torch.uint8)]) == []
    assert always.state_dict() is True
