"""Buckets sent during the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters import SimulatedCluster
from spardl.method.method import Method
from spardl.method.momentum import AdamMomentum
from spardl.schedules import Training, Wfbp
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import SETTINGS, Loop, Setting, make_model, momentum, one_step
from tests.support.harness import NETWORK, dense, spardl, topka

SIZES = [layer.entries for layer in FlatGradient(make_model().named_parameters()).layers]


@pytest.mark.parametrize(
    ("megabytes", "groups"),
    [(0, len(SIZES)), (max(SIZES) * 8 / 2**20, 3), (25.0, 1), (float("inf"), 1)],
)
def test_buckets_by_size(megabytes: float, groups: int) -> None:
    partition = Loop(Wfbp(megabytes), SimulatedCluster(1, NETWORK)).synchronizer.partition
    assert len(partition) == groups
    assert [layer for group in partition for layer in range(*group)] == list(range(len(SIZES)))


def test_a_bucket_has_its_own_budget_and_residual() -> None:
    loop = Loop(Wfbp(0), SimulatedCluster(2, NETWORK), method=topka(0.1))
    loop.step(0)
    kept = [len(average) for average in loop.synchronizer.averages(0)]
    at_least = [-(-size // 10) for size in SIZES]
    # The gradient of the unused layer is zero on every worker, and zeros are sent as well if k requires them.
    assert all(low <= found <= 2 * low for found, low in zip(kept, at_least, strict=True))
    assert loop.synchronizer.kept == sum(kept)
    memories = [group["memory"] for group in loop.state()["synchronizer"][0]["groups"]]
    assert [memory.numel() for memory in memories] == SIZES
    flat = torch.cat(memories)
    assert flat.any()


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_to_save_and_continue_is_never_to_have_stopped(stop: int) -> None:
    def loop() -> Loop:
        return Loop(Wfbp(0.0005), SimulatedCluster(3, NETWORK), SETTINGS["everything"], spardl(0.2))

    first, second, whole = loop(), loop(), loop()
    first.run(range(stop))
    second.load(first.state())
    assert torch.equal(second.run(range(stop, 20)), whole.run())
    assert second.synchronizer.kept == whole.synchronizer.kept


def test_residuals_outlive_a_new_cut() -> None:
    loop = Loop(Wfbp(0), SimulatedCluster(2, NETWORK), Setting(momentum), spardl(0.2))
    loop.run(range(3))
    before = torch.cat([group["memory"] for group in loop.state()["synchronizer"][1]["groups"]])
    loop.synchronizer._regroup([(0, 3), (3, len(SIZES))])
    after = loop.state()["synchronizer"][1]["groups"]
    assert torch.equal(torch.cat([group["memory"] for group in after]), before)
    assert [group["step"] for group in after] == [3, 3]
    loop.run(range(3, 5))


def test_a_measured_factor_outlives_a_new_cut() -> None:
    parts = spardl(0.2)
    rule = AdamMomentum(update_scale="measured")
    method = Method(parts.compressor, parts.communicator, parts.residual, rule)
    loop = Loop(Wfbp(0), SimulatedCluster(2, NETWORK), Setting(momentum), method)
    loop.run(range(3))
    # Nothing is measured for a layer that no worker uses.
    before = [group["spread"] for group in loop.state()["synchronizer"][1]["groups"] if "spread" in group]
    loop.synchronizer._regroup([(0, 3), (3, len(SIZES))])
    after = [group["spread"] for group in loop.state()["synchronizer"][1]["groups"]]
    assert after == [after[0]] * 2
    assert after[0]["own"] == pytest.approx(sum(each["own"] for each in before))
    loop.run(range(3, 5))


def test_refused_gradients_are_counted_by_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = Wfbp(0).start(spardl(0.5), SimulatedCluster(1, NETWORK), training)
    one_step(synchronizer, lambda: model[1](model[0](torch.ones(1, 2)).detach() * float("nan")).sum())
    assert synchronizer.gradient_state.refused() == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_gradient_that_is_complete_twice() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                inputs = checkpoint(self.inner, inputs, use_reentrant=True)
            return inputs

    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = Wfbp(0).start(dense(), SimulatedCluster(1, NETWORK), training)
    with pytest.raises(TrainingError, match=r"inner\.(weight|bias) was computed twice.*use schedule=after_backward"):
        one_step(synchronizer, lambda: model(torch.ones(1, 2, requires_grad=True)).sum())


def test_steps_driven_by_hand_tell_what_was_left_out_or_cut_off() -> None:
    """optimizer.zero_grad() detaches the gradients from the averaged vector."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = Wfbp(0).start(dense(), SimulatedCluster(1, NETWORK), training)
    with pytest.raises(TrainingError, match=r"backward pass started before begin\(\)"):
        synchronizer.before_backward(last=True)
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match=r"(weight|bias) is no longer a view of the flat gradient; call"):
        one_step(synchronizer, lambda: model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("value", [-1, "a", float("nan"), None, True])
def test_sizes_that_make_no_sense(value: float) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.bucket_mb must be a number of megabytes"):
        Wfbp(value)
