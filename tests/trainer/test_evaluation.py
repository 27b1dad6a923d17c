from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from spardl.clusters import Cluster
from tests.support.harness import dense, run_workers
from tests.trainer.toy import ToyTask, plan, simulated
from trainer.learner import Learner, evaluate

CPU = torch.device("cpu")


def measured(cluster: Cluster, steps: int = 2, **changes: int) -> dict[str, float]:
    made = plan(dense(), ToyTask(), **changes)
    learner = Learner(made, cluster, CPU)
    for step in range(steps):
        learner.step(step)
    settings = made.settings
    return evaluate(made.task, learner.model, cluster, learner.workers, settings)


def test_every_example_counts_once() -> None:
    """Eleven examples on one to twelve workers: the untrained model gives the same figures."""
    expected = measured(simulated(1), steps=0)
    task = ToyTask()
    torch.manual_seed(1)
    model = task.build_model().double().eval()
    whole = task.summarize(
        dict(zip(task.sums, task.measure(model, task.test.batch(torch.arange(11), None)).tolist(), strict=True))
    )
    assert expected == pytest.approx(whole)
    for workers in (2, 5, 12):
        assert measured(simulated(workers), steps=0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("wanted", "chosen"), [(1, [0]), (4, [0, 2, 5, 8]), (11, range(11)), (50, range(11))])
def test_a_part_of_the_examples_is_spread_evenly(wanted: int, chosen: Sequence[int]) -> None:
    task = ToyTask()
    torch.manual_seed(1)
    model = task.build_model().double().eval()
    sums = task.measure(model, task.test.batch(torch.tensor(list(chosen)), None)).tolist()
    expected = task.summarize(dict(zip(task.sums, sums, strict=True)))
    for workers in (1, 3):
        assert measured(simulated(workers), steps=0, eval_examples=wanted) == pytest.approx(expected, rel=1e-12)


def test_real_and_simulated_workers_measure_the_same_bits(tmp_path: Path) -> None:
    found = run_workers(3, measured)
    assert found == [measured(simulated(3))] * 3


def test_running_statistics_are_averaged_and_the_model_trains_on() -> None:
    cluster = simulated(4)
    learner = Learner(plan(dense()), cluster, CPU)
    learner.step(0)
    own = [worker.state_dict()["buffers"]["1.running_mean"].clone() for worker in learner.workers]
    assert not torch.equal(own[0], own[1])
    settings = plan(dense()).settings
    evaluate(learner._plan.task, learner.model, cluster, learner.workers, settings)
    norm = learner.model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm1d)
    assert torch.equal(norm.running_mean, torch.stack(own).mean(0))
    assert learner.model.training
    after = [worker.state_dict()["buffers"]["1.running_mean"] for worker in learner.workers]
    assert all(torch.equal(one, other) for one, other in zip(own, after, strict=True))
