"""The flat gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.vector.flat import FlatGradient, write
from spardl.vector.sparse import SparseVector


def test_backward_and_optimizer_share_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain.load_state_dict(model.state_dict())
    flat = FlatGradient(model.named_parameters())
    inputs = torch.randn(5, 3)
    for net in (model, plain):
        net(inputs).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert torch.equal(flat.vector, expected)
    write(2 * expected, flat.vector)
    assert all(torch.equal(p.grad, 2 * q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    write(SparseVector(torch.tensor([1]), torch.tensor([7.0]), expected.numel()), flat.vector)
    assert flat.vector.nonzero().flatten().tolist() == [1]
    flat.zero()
    assert not model[0].weight.grad.any()


def test_shared_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    flat = FlatGradient(model.named_parameters())
    assert flat.vector.numel() == 4
    model(torch.ones(1, 2)).sum().backward()
    assert flat.vector.any()


def test_layers_are_neighbours_of_one_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.MultiheadAttention(2, 1), nn.Linear(2, 2))
    model[3].weight = model[0].weight
    flat = FlatGradient(model.named_parameters())
    assert [(layer.name, layer.tensors, layer.entries) for layer in flat.layers] == [
        ("0", (0, 2), 8),
        ("2", (2, 4), 18),
        ("2.out_proj", (4, 6), 6),
        ("3", (6, 7), 2),
    ]
    assert flat.layer_of()[model[3].weight] == 0


def test_hidden_gradients_come_back() -> None:
    model = nn.Linear(2, 1)
    flat = FlatGradient(model.named_parameters())
    views = [parameter.grad for parameter in model.parameters()]
    with flat.hidden([model.bias]):
        assert model.bias.grad is None
        assert model.weight.grad is views[0]
    assert model.bias.grad is views[1]


def test_mixed_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"must share one dtype.*torch.float32 on cpu, torch.float64 on cpu"):
        FlatGradient(model.named_parameters())
    with pytest.raises(ConfigError, match="found no parameters"):
        FlatGradient([])
