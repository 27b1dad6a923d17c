"""One synchronization after the backward pass."""

from __future__ import annotations

import torch
from torch import nn

from spardl.clusters import SimulatedCluster
from spardl.schedules import AfterBackward, Training
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import Loop, Setting, batch, loss_of, make_model, momentum, weights
from tests.support.harness import NETWORK, same_bits, spardl, to_dense


def test_dense_training_equals_one_large_batch() -> None:
    """The average over four workers equals the gradient of the mean loss in every step."""
    ours = Loop(AfterBackward(), SimulatedCluster(4, NETWORK)).run()
    plain = make_model()
    optimizer = momentum(plain)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(plain, torch.cat([batch(step, rank, 0) for rank in range(4)])).backward()
        optimizer.step()
    torch.testing.assert_close(ours, weights(plain))


def test_the_optimizer_gets_the_average() -> None:
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    gradient = FlatGradient(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    synchronizer = AfterBackward().start(
        spardl(0.1), SimulatedCluster(3, NETWORK), Training(model, gradient, optimizer)
    )
    for local in range(3):
        synchronizer.begin(local)
        synchronizer.before_backward(last=True)
        model(torch.randn(1, 40)).sum().backward()
        synchronizer.collect()
        assert not gradient.vector.any()
    synchronizer.finish()
    (average,) = synchronizer.averages(0)
    assert torch.equal(-model.weight, to_dense(average).view(1, 40))
    assert all(same_bits(*synchronizer.averages(local), average) for local in range(3))
    assert synchronizer.kept == len(average)
    assert not gradient.vector.any()


def test_settings_are_those_of_the_step() -> None:
    """Changing the learning rate after a step does not affect that step."""
    loop = Loop(AfterBackward(), SimulatedCluster(2, NETWORK), Setting(steps=1))
    expected = loop.run()
    other = Loop(AfterBackward(), SimulatedCluster(2, NETWORK), Setting(steps=1))
    other.step(0)
    other.optimizer.param_groups[0]["lr"] = 7.0
    other.synchronizer.flush()
    assert torch.equal(weights(other.model), expected)
