"""One synchronization after the backward pass."""

from __future__ import annotations

import copy

import torch
from torch import nn

from spardl.clusters import SimulatedCluster
from spardl.flat import FlatGradient
from spardl.schedules import AfterBackward
from tests.harness import NETWORK, dense, same_bits, spardl, to_dense


def test_dense_training_equals_one_large_batch() -> None:
    """Four workers' averaged gradients are the gradient of the mean loss, step after step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    gradient = FlatGradient(model.parameters())
    schedule = AfterBackward(dense(), SimulatedCluster(4, NETWORK), gradient)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        inputs = torch.randn(4, 5, 4, dtype=torch.float64)
        for local in range(4):
            model(inputs[local]).square().mean().backward()
            schedule.collect(local)
        schedule.finish()
        ours.step()
        gradient.zero()
        theirs.zero_grad()
        plain(inputs.view(20, 4)).square().mean().backward()
        theirs.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_leaves_the_average_in_the_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(40))
    gradient = FlatGradient([parameter])
    schedule = AfterBackward(spardl(0.1), SimulatedCluster(3, NETWORK), gradient)
    for local in range(3):
        parameter.grad.copy_(torch.randn(40))
        schedule.collect(local)
        assert not gradient.vector.any()
    averages = schedule.finish()
    assert torch.equal(parameter.grad, to_dense(averages[0]))
    assert all(same_bits(average, averages[0]) for average in averages)
