"""The flat gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spardl.errors import ConfigError
from spardl.flat import FlatGradient
from spardl.sparse import SparseVector


def test_backward_adds_into_the_vector_and_the_optimizer_reads_it() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain.load_state_dict(model.state_dict())
    flat = FlatGradient(model.parameters())
    inputs = torch.randn(5, 3)
    for net in (model, plain):
        net(inputs).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert torch.equal(flat.vector, expected)
    flat.write(2 * expected)
    assert all(torch.equal(p.grad, 2 * q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    flat.write(SparseVector(torch.tensor([1]), torch.tensor([7.0]), expected.numel()))
    assert flat.vector.nonzero().flatten().tolist() == [1]
    flat.zero()
    assert not model[0].weight.grad.any()


def test_shared_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    flat = FlatGradient(model.parameters())
    assert flat.vector.numel() == 4
    model(torch.ones(1, 2)).sum().backward()
    assert flat.vector.any()


def test_mixed_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"must all have one type.*torch.float32 on cpu, torch.float64 on cpu"):
        FlatGradient(model.parameters())
    with pytest.raises(ConfigError, match="found none"):
        FlatGradient([])
