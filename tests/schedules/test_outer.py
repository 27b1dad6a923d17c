"""Outer steps: equal to plain training and to the library's handle, on real and simulated workers."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spardl
from spardl.basics.errors import ConfigError, StoppedError
from spardl.clusters import Cluster, ProcessGroupCluster, SimulatedCluster
from spardl.method import LocalMomentum
from spardl.method.method import Method
from spardl.schedules import AfterBackward, OuterSteps, Training
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import SETTINGS, Loop, Setting, adamw, batch, loss_of, make_model, weights
from tests.support.driver import composed
from tests.support.harness import NETWORK, dense, run_workers, same_bits, topka
from tests.support.harness import spardl as sparse
from tests.support.quick import some_quick
from tests.trainer.toy import Notebook, ToyTask, plan, simulated, trainer
from trainer.build import build_dataset, build_plan
from trainer.checkpoint import list_checkpoints
from trainer.learner import Plan
from trainer.runs import Run
from trainer.trainer import Trainer


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def built(*words: str) -> Plan:
    plain = composed(*words)
    return build_plan(plain, build_dataset(plain))


VISIBLE = spardl.make_method("compute_visible")
METHODS = {"dense": dense(), "spardl": sparse(0.2), "topka": topka(0.2), "compute_visible": VISIBLE}
# Fragments are sent after steps 2, 3 and 4, and then every fourth step; each is in flight for two steps.
STREAMING = OuterSteps(every=4, fragments=3, delay=2, mixing=0.25)


def finished(loop: Loop, steps: range) -> Tensor:
    """The weights after some steps and the end of the training."""
    for step in steps:
        loop.step(step)
    loop.synchronizer.end()
    loop.synchronizer.flush()
    return weights(loop.model)


def test_clip_norm_limits_each_workers_own_gradient() -> None:
    """With an exchange after every step and an outer rate of 1, one worker trains as without outer steps."""

    def trained(schedule: AfterBackward | OuterSteps, clip_norm: float | None) -> Tensor:
        return Loop(schedule, SimulatedCluster(1, NETWORK), Setting(clip_norm=clip_norm, steps=3)).run()

    outer = OuterSteps(every=1, lr=1.0, momentum=0.0)
    clipped = trained(outer, 0.05)
    assert torch.allclose(clipped, trained(AfterBackward(), 0.05), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(clipped, trained(outer, None))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_exchange_after_every_step_equals_plain_training(workers: int) -> None:
    """With SGD without momentum, an outer learning rate of 1, and numbers without rounding."""

    def trained(schedule: AfterBackward | OuterSteps) -> Tensor:
        model = torch.nn.Linear(3, 2, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        gradient, cluster = FlatGradient(model.named_parameters()), SimulatedCluster(workers, NETWORK)
        training = Training(model, gradient, torch.optim.SGD(model.parameters(), 0.25))
        engine, source = schedule.start(dense(), cluster, training), torch.Generator().manual_seed(1)
        for _ in range(5):
            for local in range(workers):
                engine.begin(local)
                factors = torch.randint(-8, 9, (2, 3), generator=source).double()
                engine.before_backward(last=True)
                (model.weight * factors).sum().backward()
                engine.collect()
            engine.finish()
        engine.flush()
        return model.weight.detach().clone()

    plain = trained(AfterBackward())
    assert plain.abs().sum() > 1
    assert same_bits(trained(OuterSteps(every=1, lr=1.0, momentum=0.0)), plain)


@pytest.mark.parametrize(
    ("schedule", "setting", "method"),
    some_quick(product([OuterSteps(every=3), STREAMING], ["adamw", "everything"], METHODS), 5),
)
def test_real_and_simulated_workers_agree_to_the_last_bit(schedule: OuterSteps, setting: str, method: str) -> None:
    def work(cluster: Cluster) -> Tensor:
        return finished(Loop(schedule, cluster, SETTINGS[setting], METHODS[method]), range(8))

    wanted = work(SimulatedCluster(2, NETWORK))
    assert not same_bits(wanted, weights(make_model()))
    assert all(same_bits(found, wanted) for found in run_workers(2, work))


def test_the_library_s_outer_are_the_same_to_the_last_bit() -> None:
    def work(cluster: ProcessGroupCluster) -> Tensor:
        (rank,) = cluster.local_ranks
        model = make_model()
        outer = spardl.Outer(
            model.named_parameters(), adamw(model), "none", every=3, lr=0.7, momentum=0.9, communicator="dense"
        )
        (rule,) = outer._optimizers
        for step in range(9):
            rule.zero_grad()
            loss_of(model, batch(step, rank, 0)).backward()
            outer.step()
        outer.close()
        return weights(model)

    cluster = SimulatedCluster(3, NETWORK)
    wanted = finished(Loop(OuterSteps(every=3, momentum=0.9), cluster, SETTINGS["adamw"]), range(9))
    assert all(same_bits(found, wanted) for found in run_workers(3, work))


def test_the_library_s_fragments_are_the_same_to_the_last_bit() -> None:
    """After each step, with fragments in flight, mixed and not yet sent."""
    cluster = SimulatedCluster(2, NETWORK)
    loop = Loop(replace(STREAMING, momentum=0.9), cluster, SETTINGS["adamw"])
    wanted: list[list[Tensor]] = [[], []]
    for step in range(11):
        loop.step(step)
        loop.synchronizer.flush()
        for rank, found in enumerate(wanted):
            own = loop.synchronizer.local_tensors(rank)["worker's weights are"]
            found.append(torch.cat([tensor.flatten() for tensor in own]))
    loop.synchronizer.end()
    loop.synchronizer.flush()

    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        model, found = make_model(), []
        rule = adamw(model)
        outer = spardl.Outer(
            model.named_parameters(),
            rule,
            "none",
            every=4,
            momentum=0.9,
            fragments=3,
            delay=2,
            mixing=0.25,
            communicator="dense",
        )
        for step in range(11):
            rule.zero_grad()
            loss_of(model, batch(step, rank, 0)).backward()
            outer.step()
            found.append(weights(model))
        outer.exchange()
        outer.close()
        return [*found, weights(model)]

    for found, own in zip(run_workers(2, work), wanted, strict=True):
        assert all(same_bits(one, other) for one, other in zip(found, [*own, weights(loop.model)], strict=True))
    assert not same_bits(wanted[0][-1], wanted[1][-1])


@pytest.mark.parametrize(
    ("schedule", "method", "stop"), some_quick(product([OuterSteps(every=3), STREAMING], METHODS, [2, 3, 5, 7]), 5)
)
def test_to_save_and_continue_is_never_to_have_stopped(schedule: OuterSteps, method: str, stop: int) -> None:
    def loop() -> Loop:
        return Loop(schedule, SimulatedCluster(3, NETWORK), SETTINGS["adamw"], METHODS[method])

    wanted, first, second = finished(loop(), range(8)), loop(), loop()
    first.run(range(stop))
    second.load(copy.deepcopy(first.state()))
    assert same_bits(finished(second, range(stop, 8)), wanted)
    # Reading the weights or saving a state changes nothing.
    assert same_bits(finished(first, range(stop, 8)), wanted)


def test_fragments_equal_a_loop_over_all_workers() -> None:
    """Two alternating halves of a model, each delayed by a step and mixed; local steps of plain gradient descent."""
    workers, steps, lr, mixing = 3, 9, 0.7, 0.25
    schedule = OuterSteps(every=4, lr=lr, momentum=0.0, fragments=2, delay=1, mixing=mixing)
    loop = Loop(schedule, SimulatedCluster(workers, NETWORK), Setting(plain_sgd))
    found = [loop.run(range(step, step + 1)) for step in range(steps)]

    model = make_model()
    border = loop.gradient.layers[loop.synchronizer.partition[0][1]].tensors[0]
    parts = {2: slice(0, border), 0: slice(border, None)}  # which is due after steps 2, 4, 6, ..., modulo 4
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    own = [[anchor.clone() for anchor in anchors] for _ in range(workers)]
    late: list[slice] = []
    for step in range(1, steps + 1):
        for rank, mine in enumerate(own):
            for parameter, tensor in zip(model.parameters(), mine, strict=True):
                parameter.data = tensor
            rule = plain_sgd(model)
            rule.zero_grad()
            loss_of(model, batch(step - 1, rank, 0)).backward()
            rule.step()
        for part in late:
            for mine in own:
                mine[part] = [(1 - mixing) * a + mixing * b for a, b in zip(mine[part], anchors[part], strict=True)]
        late = [parts[step % 4]] if step % 4 in parts else []
        for part in late:
            means = [torch.stack(each).mean(0) for each in zip(*(mine[part] for mine in own), strict=True)]
            anchors[part] = [a - lr * (a - mean) for a, mean in zip(anchors[part], means, strict=True)]
        # ``flush`` also applies averages in flight.
        wanted = torch.cat([anchor.flatten() for anchor in anchors])
        torch.testing.assert_close(found[step - 1], wanted, rtol=1e-12, atol=1e-12)


def test_differences_that_are_not_sent_stay_in_residuals() -> None:
    """After one exchange, P times the average plus the residuals equals the progress of all workers."""
    loop = Loop(OuterSteps(every=4, lr=1.0), SimulatedCluster(3, NETWORK), Setting(adamw), sparse(0.1))
    begin = weights(loop.model)
    sent = 3 * (begin - loop.run(range(4)))
    left = torch.stack([loop.synchronizer.gradient_state.residuals(local)[0] for local in range(3)]).sum(0)
    other = Loop(OuterSteps(every=4, lr=1.0, momentum=0.0), SimulatedCluster(3, NETWORK), Setting(adamw))
    whole = 3 * (begin - other.run(range(4)))
    torch.testing.assert_close(sent + left, whole, rtol=1e-10, atol=1e-12)
    assert left.abs().sum() > 0.1


def test_nothing_is_sent_between_exchanges() -> None:
    cluster = SimulatedCluster(3, NETWORK)
    loop = Loop(OuterSteps(every=4), cluster, Setting(adamw))
    begin = weights(loop.model)
    assert same_bits(loop.run(range(3)), begin)
    assert cluster.ledgers[0].bytes_sent == 0
    assert not same_bits(loop.run(range(3, 4)), begin)
    assert cluster.ledgers[0].bytes_sent > 0


def test_who_uses_no_gradient_is_left_alone() -> None:
    loop = Loop(OuterSteps(every=2), SimulatedCluster(2, NETWORK), Setting(adamw))
    unused = loop.model.unused.weight.detach().clone()
    loop.run(range(4))
    assert same_bits(loop.model.unused.weight.detach(), unused)


@pytest.mark.parametrize("schedule", [OuterSteps(every=3), OuterSteps(every=4, fragments=2, delay=1)])
def test_4_3_6_workers(schedule: OuterSteps, tmp_path: Path) -> None:
    """Between exchanges, a new worker starts with the state of an existing one."""
    books = []
    for number, size in enumerate([4, 3, 6], 1):
        made = plan(sparse(0.2), max_steps=5 * number, checkpoint_every=1, elastic=True)
        made = replace(made, schedule=schedule)
        found = list_checkpoints(tmp_path / "checkpoints")
        books.append(Notebook())
        trainer(made, tmp_path, size, found[-1] if found else None, [books[-1]]).fit()
    for book in books[1:]:
        ((_, found),) = book.of("restart")
        assert found["residual_sum"] == pytest.approx(found["residual_sum_before"], rel=1e-12, abs=1e-12)


def test_automatic_momentum_leaves_the_optimizer_its_state() -> None:
    words = ("optimizer=adamw", "optimizer.lr=0.001", "schedule=outer", "compressor=spardl")
    assert built(*words).method.momentum.name == "optimizer"
    assert built(*words[:2], words[3]).method.momentum.name == "adam"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("outer", OuterSteps()),
        ("local_sgd", OuterSteps(16, 1.0, 0.0)),
        ("diloco", OuterSteps(500, 0.7, 0.9)),
        ("streaming_diloco", OuterSteps(100, 0.7, 0.9, fragments=4, delay=5, mixing=0.5)),
    ],
)
def test_recipes_by_name(name: str, published: OuterSteps) -> None:
    assert built(f"schedule={name}", "compressor=none").schedule == published


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be"),
        ({"every": 2.5}, "every must be"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be a number above 0, got nan"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        (
            {"every": 4, "fragments": 5},
            "at most every=4 and delay below it, got fragments=5 and delay=0",
        ),
        ({"every": 4, "delay": 4}, "at most every=4 and delay below it, got fragments=1 and delay=4"),
        ({"fragments": 0}, "fragments must be"),
        ({"mixing": 0}, "mixing must be above 0 and at most 1, got 0"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterSteps(**options)


def test_incompatible_settings_are_refused() -> None:
    moved = replace(sparse(0.1), momentum=LocalMomentum(0.9))
    with pytest.raises(ConfigError, match="momentum=local would be applied in addition to the momentum"):
        OuterSteps().check(moved, clips=False)
    model = make_model()
    gradient, cluster = FlatGradient(model.named_parameters()), SimulatedCluster(2, NETWORK)
    with pytest.raises(ConfigError, match="need each worker's optimizer"):
        OuterSteps().start(dense(), cluster, Training(model, gradient, None))


def test_workers_that_were_given_different_steps() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        method: Method = dense()
        with pytest.raises(ConfigError, match="every") as error:
            Loop(OuterSteps(every=2 + cluster.local_ranks[0]), cluster, Setting(adamw), method)
        return str(error.value)

    assert all("rank 1 has every=3, rank 0 has every=2" in text for text in run_workers(2, work))


def test_sixteen_workers_receive_at_most_a_quarter_of_all_gather() -> None:
    """At equal density, SparseLoCo's all-gather grows with the number of workers; SparDL's all-reduce does not."""

    def received(method: Method) -> float:
        cluster = SimulatedCluster(16, NETWORK)
        loop = Loop(OuterSteps(every=2, lr=1.0), cluster, Setting(adamw), method)
        loop.run(range(8))
        return max(ledger.bytes_received for ledger in cluster.ledgers)

    assert 0 < received(sparse(0.1)) <= received(topka(0.1)) / 4


def test_nonfinite_gradient_makes_no_step_and_is_counted() -> None:
    def trained(spoiled: float) -> tuple[Tensor, int]:
        loop = Loop(OuterSteps(every=3), SimulatedCluster(2, NETWORK), Setting(adamw), sparse(0.2))
        engine = loop.synchronizer
        for step in range(6):
            for local in range(2):
                engine.begin(local)
                engine.before_backward(last=True)
                loss = loss_of(loop.model, batch(step, local, 0))
                (loss * (spoiled if (step, local) == (1, 1) else 1.0)).backward()
                engine.collect()
            engine.finish()
        engine.close()
        for tensors in (each for local in range(2) for each in engine.local_tensors(local).values()):
            assert all(tensor.isfinite().all() for tensor in tensors)
        return weights(loop.model), engine.gradient_state.refused()

    spoiled, refused = trained(torch.nan)
    assert refused == 1
    whole, none = trained(1.0)
    assert none == 0
    assert not same_bits(spoiled, whole)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_memory_in_another_order() -> None:
    def trained(form: torch.memory_format) -> Tensor:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(4, 3, 3).double().to(memory_format=form)
        training = Training(model, FlatGradient(model.named_parameters()), torch.optim.SGD(model.parameters(), 0.1))
        engine = OuterSteps(every=1).start(dense(), SimulatedCluster(1, NETWORK), training)
        for _ in range(3):
            engine.begin()
            engine.before_backward(last=True)
            model(torch.ones(1, 4, 5, 5, dtype=torch.float64)).square().mean().backward()
            engine.collect()
            engine.finish()
        engine.close()
        return model.weight.detach().contiguous()

    wanted = trained(torch.contiguous_format)
    torch.testing.assert_close(trained(torch.channels_last), wanted, rtol=1e-12, atol=1e-12)


def test_resized_run_at_the_end_of_the_data_exchanges_progress(tmp_path: Path) -> None:
    """100 examples: for 3 workers 33 steps of one each, for 8 workers 32 as many examples."""
    made = plan(dense(), task=ToyTask(fancy=False, examples=100), max_steps=None, epochs=1, batch_size=1, elastic=True)
    made = replace(made, schedule=OuterSteps(every=30))
    with pytest.raises(StoppedError):
        Trainer(made, simulated(3), Run("0", tmp_path, None), heartbeat=lambda step: step == 32).fit()
    after = trainer(made, tmp_path, 8, list_checkpoints(tmp_path / "checkpoints")[-1])
    shown = weights(after._learner.model)
    assert after._learner.total_steps == after._progress.step == 32
    after.fit()
    assert not same_bits(weights(after._learner.model), shown)
