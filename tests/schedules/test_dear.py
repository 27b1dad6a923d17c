"""DeAR: order of events, timing of updates, and conservation of gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters import Cluster, Network, SimulatedCluster
from spardl.clusters.base import Work
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules import AfterBackward, Dear, Schedule, Training, Wfbp
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import SETTINGS, Loop, Setting, batch, one_step, weights
from tests.support.harness import NETWORK, dense, run_workers, spardl, topka
from tests.support.quick import some_quick


def simulated(workers: int = 3) -> SimulatedCluster:
    return SimulatedCluster(workers, NETWORK, count_local=False)


@pytest.mark.parametrize(
    ("method", "setting"), some_quick(product([spardl(0.2), spardl(0.2, teams=3)], ["momentum", "everything"]), 3)
)
def test_sparse_halves_train_like_sparse_buckets(method: Method, setting: str) -> None:
    """Equal groups give bit-identical weights and residuals, although the all-gather is later."""
    late = Loop(Dear(threshold_mb=0.002), simulated(), SETTINGS[setting], method)
    soon = Loop(Wfbp(bucket_mb=0.002), simulated(), SETTINGS[setting], method)
    assert len(late.synchronizer.partition) > 2
    assert torch.equal(late.run(), soon.run())
    for local in range(3):
        pairs = zip(
            late.state()["synchronizer"][local]["groups"], soon.state()["synchronizer"][local]["groups"], strict=True
        )
        for one, other in pairs:
            assert torch.equal(one["memory"], other["memory"])
            assert one["memory"].any()


def test_real_and_simulated_workers_agree() -> None:
    def work(cluster: Cluster) -> Tensor:
        return Loop(Dear(threshold_mb=0.002), cluster, method=spardl(0.2)).run()

    expected = Loop(Dear(threshold_mb=0.002), simulated(), method=spardl(0.2)).run()
    assert all(torch.equal(found, expected) for found in run_workers(3, work))


class Recorder(SimulatedCluster):
    """Records which synchronizations are released, resumed and waited for."""

    def __init__(self) -> None:
        super().__init__(1, NETWORK, count_local=False)
        self.log: list[tuple[str, int]] = []
        self.made = 0

    def enqueue(self, programs: Any, *, pauses: bool = False) -> Work[Any]:
        inner, number, log = super().enqueue(programs, pauses=pauses), self.made, self.log
        self.made += 1

        class Spy:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                def call(*arguments: Any) -> Any:
                    log.append((name, number))
                    return getattr(inner, name)(*arguments)

                return call

        return Spy()  # type: ignore[return-value]


def test_order_of_events() -> None:
    """Reduce-scatters start with the last group, all-gathers with the first; each is waited for before its layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    cluster = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = Dear(threshold_mb=0).start(dense(), cluster, training)
    model.register_forward_hook(lambda *_: cluster.log.append(("forward", -1)))
    model[1].register_forward_hook(lambda *_: cluster.log.append(("second", -1)))
    for _ in range(2):
        one_step(synchronizer, lambda: model(torch.ones(1, 2)).sum())
    first = [("second", -1), ("forward", -1), ("release", 2), ("release", 1), ("release", 0)]
    resumed = [("resume", 0), ("resume", 1), ("resume", 2)]
    waited = [("wait", 0), ("wait", 1), ("second", -1), ("wait", 2), ("forward", -1)]
    assert cluster.log[:13] == first + resumed + waited
    assert cluster.log[13:16] == [("release", 5), ("release", 4), ("release", 3)]


def test_weights_are_not_ready_before_they_are_needed() -> None:
    loop = Loop(Dear(threshold_mb=0), simulated())
    before = weights(loop.model)
    loop.step(0)
    assert torch.equal(weights(loop.model), before)
    with torch.no_grad():
        loop.model(batch(0, 0, 0))  # an evaluation needs them as well
    used = [p for name, p in loop.model.named_parameters() if "unused" not in name]
    expected = Loop(AfterBackward(), simulated(), Setting(steps=1))
    expected.run()
    for ours, theirs in zip(used, [p for n, p in expected.model.named_parameters() if "unused" not in n], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("read", [lambda loop: loop.model.state_dict(), lambda loop: loop.optimizer.state_dict()])
def test_no_reader_sees_stale_weights(read: Callable[[Loop], Any]) -> None:
    loop = Loop(Dear(threshold_mb=0), simulated(), Setting(steps=1))
    loop.step(0)
    read(loop)
    expected = Loop(AfterBackward(), simulated(), Setting(steps=1)).run()
    assert torch.equal(weights(loop.model), expected)


def test_a_rate_that_changes_between_step_and_update() -> None:
    """An update uses the settings at the time of its step."""
    loop = Loop(Dear(threshold_mb=0), simulated(), Setting(steps=1))
    loop.step(0)
    loop.optimizer.param_groups[0]["lr"] = 7.0
    loop.synchronizer.flush()
    assert torch.equal(weights(loop.model), Loop(AfterBackward(), simulated(), Setting(steps=1)).run())
    assert loop.optimizer.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("schedule", [Dear(threshold_mb=0.002), Dear(threshold_mb=0.002, trials=3, low_mb=0.0005)])
@pytest.mark.parametrize("stop", [7, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 12))])
def test_to_save_and_continue_is_never_to_have_stopped(schedule: Dear, stop: int) -> None:
    expected = Loop(schedule, simulated(), SETTINGS["everything"], spardl(0.2) if not schedule.trials else None)
    first = Loop(schedule, simulated(), SETTINGS["everything"], spardl(0.2) if not schedule.trials else None)
    first.run(range(stop))
    second = Loop(schedule, simulated(), SETTINGS["everything"], spardl(0.2) if not schedule.trials else None)
    second.load(first.state())
    assert second.synchronizer.partition == first.synchronizer.partition
    assert torch.equal(second.run(range(stop, 20)), expected.run())


def test_the_next_forward_pass_hides_the_all_gather() -> None:
    """On the virtual clock with the times of a profile; tests/clusters/test_flights.py tests the clock itself."""
    cluster = SimulatedCluster(3, Network(alpha=1e-3, gbit=1), count_local=False)
    Loop(Dear(threshold_mb=0), cluster, Setting(steps=2)).run()
    assert all(ledger.seconds[Phase.WAIT] > 0 for ledger in cluster.ledgers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold_mb": -1}, "schedule.threshold_mb must be a number of megabytes, at least 0"),
        ({"threshold_mb": "a"}, "schedule.threshold_mb must be"),
        ({"layers": 0}, "schedule.layers must be an integer, at least 1, got 0"),
        ({"trials": -1}, "schedule.trials must be an integer, at least 0"),
        ({"trials": 2, "layers": 3}, "use schedule.layers=null, or schedule.trials=0"),
        ({"trials": 2, "low_mb": 30}, "start from low to high"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dear(**options)


def test_methods_without_halves_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot be split into a reduce-scatter and an all-gather"):
        Dear().check(topka(0.1), clips=False)
    Dear().check(spardl(0.1), clips=True)


class Fickle(nn.Module):
    """Uses its own weight late in the first pass, and first in later passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self.early = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs if self.early else self.inner(inputs) * self.weight


def test_a_parameter_that_is_used_too_soon_is_noticed() -> None:
    model = Fickle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = Dear(threshold_mb=0).start(dense(), simulated(1), training)
    one_step(synchronizer, lambda: model(torch.ones(1, 2)).sum())
    model.early = True
    with pytest.raises(TrainingError, match=r"used weight earlier than in the first step.*use schedule=wfbp"):
        one_step(synchronizer, lambda: model(torch.ones(1, 2)).sum())


def test_closing_flushes_and_lets_the_model_go() -> None:
    loop = Loop(Dear(threshold_mb=0), simulated(), Setting(steps=1))
    loop.step(0)
    loop.synchronizer.close()
    assert torch.equal(weights(loop.model), Loop(AfterBackward(), simulated(), Setting(steps=1)).run())
    assert not any(module._forward_pre_hooks for module in loop.model.modules())
    loop.model(batch(0, 0, 0)).sum().backward()


class Alternating(nn.Module):
    """Calls a different layer in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % 3](inputs).square()


def alternate(schedule: Schedule) -> Tensor:
    torch.manual_seed(0)
    model = Alternating().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    synchronizer = schedule.start(dense(), simulated(1), training)
    for step in range(7):
        inputs = torch.full((1, 2), step + 1.0, dtype=torch.float64)
        one_step(synchronizer, lambda inputs=inputs: model(inputs).sum())
    synchronizer.flush()
    return weights(model)


def test_group_skipped_by_the_next_pass_is_updated() -> None:
    assert torch.equal(alternate(Dear(threshold_mb=0)), alternate(AfterBackward()))
