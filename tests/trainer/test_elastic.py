"""Runs that continue with another number of workers."""

from __future__ import annotations

import itertools
import signal
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from spardl.method.method import Method
from spardl.method.momentum import LocalMomentum
from spardl.protocol.programs import Worker
from tests.support.driver import background_run, composed, events, here, only_run, steps_logged, summary, wait_until
from tests.support.harness import dense, representatives, spardl, topka
from tests.trainer.toy import Notebook, ToyTask, plan, trainer
from trainer.checkpoint import Restart, list_checkpoints, load_part
from trainer.command_line import STOPPED
from trainer.learner import Learner


def sums(checkpoint: Path, workers: int, what: str = "memory") -> torch.Tensor:
    """The sum over all workers of what they carry, entry by entry."""
    parts = [load_part(checkpoint, rank, torch.device("cpu")) for rank in range(workers)]
    rows = [torch.cat([group[what] for group in part["synchronizer"]["groups"]]) for part in parts]
    return torch.stack(rows).sum(0)


def go_on(method: Method, folder: Path, workers: list[int], steps: int = 4, **changes: Any) -> list[Notebook]:
    """Trains ``steps`` steps with each number of workers in turn."""
    books = []
    for number, size in enumerate(workers, 1):
        made = plan(method, max_steps=number * steps, checkpoint_every=1, elastic=True, **changes)
        found = list_checkpoints(folder / "checkpoints")
        books.append(Notebook())
        trainer(made, folder, size, found[-1] if found else None, [books[-1]]).fit()
    return books


@pytest.mark.parametrize("method", [spardl(0.1), topka(0.1), dense()], ids=["spardl", "topka", "dense"])
def test_4_3_6_the_sum_of_residuals_is_kept(method: Method, tmp_path: Path) -> None:
    books = go_on(method, tmp_path, [4, 3, 6])
    for book, (before, now, step) in zip(books[1:], [(4, 3, 4), (3, 6, 8)], strict=True):
        ((at, found),) = book.of("restart")
        assert (at, found["workers_before"], found["workers"]) == (step, before, now)
        assert found["residual_sum"] == pytest.approx(found["residual_sum_before"], rel=1e-12, abs=1e-12)
        assert (found["residual_sum"] != 0) == method.residual.remembers


def test_entry_by_entry(tmp_path: Path) -> None:
    """Saved by 4, and again by 3 before they did anything."""
    made = plan(spardl(0.1), max_steps=4, elastic=True)
    trainer(made, tmp_path, 4).fit()
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    expected = sums(checkpoint, 4)
    resumed = trainer(made, tmp_path / "again", 3, checkpoint)
    found = sum(state.memory for state in resumed._learner.synchronizer.gradient_state.groups[0].states)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
    assert expected.abs().sum() > 0.1


def test_velocities_keep_their_mean(tmp_path: Path) -> None:
    method = Method(topka(0.1).compressor, topka(0.1).communicator, topka(0.1).residual, LocalMomentum(0.9))
    made = plan(method, max_steps=4, elastic=True)
    made = type(made)(**{**vars(made), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)})
    trainer(made, tmp_path, 4).fit()
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    resumed = trainer(made, tmp_path / "again", 6, checkpoint)
    found = sum(state.moments.velocity for state in resumed._learner.synchronizer.gradient_state.groups[0].states) / 6
    torch.testing.assert_close(found, sums(checkpoint, 4, "velocity") / 4, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_every_method_goes_on(tmp_path: Path) -> None:
    """With fresh thresholds, borders, bases: those of another number of workers would not fit."""
    tried = 0
    for number, method in enumerate(representatives(4, 0.1)):
        if not method.communicator.runs_on(3):
            continue
        books = go_on(method, tmp_path / str(number), [4, 3, 6], steps=1)
        assert [step for step, _ in books[-1].of("train")] == [3]
        tried += 1
    assert tried > 20


def test_the_data_go_on_where_they_were(tmp_path: Path) -> None:
    """96 examples, 4 a worker: of 4 workers 6 steps an epoch, of 3 workers 8, of 6 workers 4."""
    made = plan(dense(), task=ToyTask(examples=96), max_steps=100, epochs=2, elastic=True, checkpoint_every=1)
    restart = Restart(4, tmp_path, torch.device("cpu"))
    assert restart.shift(made, 3, 0, 3) == 3 - 4
    assert restart.shift(made, 9, 0, 6) == 9 - (4 + 2)
    assert restart.shift(made, 7, 0, 6) == 7 - 4  # the 16 examples of a step that 6 workers have not finished
    three = Restart(3, tmp_path, torch.device("cpu"))
    assert three.shift(made, 7, -1, 6) == 7 - 4

    trainer(plan(dense(), task=ToyTask(examples=96), max_steps=3, epochs=2, elastic=True), tmp_path, 4).fit()
    resumed = trainer(made, tmp_path, 3, list_checkpoints(tmp_path / "checkpoints")[-1])
    learner = resumed._learner
    assert learner.total_steps == 3 + 4 + 8
    assert learner.epochs(3) == 0.5
    first = torch.cat([learner._batches[rank]._sampler.indices(3 + 1) for rank in range(3)])
    whole = [plan(dense(), task=ToyTask(examples=96)).sampler(Worker(rank, 4)) for rank in range(4)]
    seen = torch.cat([sampler.indices(step) for sampler in whole for step in range(3)])
    assert not set(first.tolist()) & set(seen.tolist())


def test_joining_workers_draw_numbers_of_their_own(tmp_path: Path) -> None:
    made = plan(dense(), max_steps=2, elastic=True)
    trainer(made, tmp_path, 2).fit()
    resumed = trainer(made, tmp_path / "again", 4, list_checkpoints(tmp_path / "checkpoints")[-1])
    states = [worker.state_dict()["random"][0] for worker in resumed._learner.workers]
    assert all(not torch.equal(states[a], states[b]) for a in range(4) for b in range(a))


def test_costs_are_those_of_the_present_workers(tmp_path: Path) -> None:
    made = plan(topka(0.1), max_steps=4, checkpoint_every=1, elastic=True)
    trainer(made, tmp_path / "a", 4).fit()
    made = plan(topka(0.1), max_steps=8, elastic=True)
    found = trainer(made, tmp_path / "a", 2, list_checkpoints(tmp_path / "a" / "checkpoints")[-1]).fit()
    alone = trainer(made, tmp_path / "b", 2).fit()
    assert (found["step_words"], found["step_rounds"]) == (alone["step_words"], alone["step_rounds"])


RUN = (
    "training.elastic=true",
    "training.checkpoint_every=5",
    "seed=3",
    "training.max_steps=120",
    "training.epochs=1000",
)


def until_step(step: int, *words: str, outputs: Path, folder: Path) -> None:
    """Trains, and is asked to stop when so many steps are done."""
    with background_run(
        *words, f"output_dir={outputs}", "resume=auto", folder=folder, before=partial(slow_from, step)
    ) as run:
        wait_until(lambda: steps_logged(outputs) >= step or run.ended())
        run.kill(signal.SIGTERM)
        assert run.wait() == STOPPED, run.stderr


def slow_from(step: int) -> None:
    """Leaves time to ask the run to stop, before it makes many more steps."""
    whole = Learner.step

    def slowed(learner: Learner, number: int) -> object:
        if number >= step:
            time.sleep(0.1)
        return whole(learner, number)

    Learner.step = slowed  # type: ignore[method-assign, assignment]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["simulated", "process_group"])
def test_the_loss_goes_on_without_a_jump(cluster: str, tmp_path: Path) -> None:
    """4, 3, 6 workers: after a change the mean loss is as near to that before as two steps are to one another."""
    outputs, words = tmp_path / "out", (*RUN, f"cluster={cluster}", "optimizer.lr=0.05", "lr_schedule=constant")
    for workers, step in ((4, 40), (3, 80)):
        until_step(step, *words, f"cluster.workers={workers}", outputs=outputs, folder=tmp_path / "log")
    assert here(*words, "cluster.workers=6", f"output_dir={outputs}", "resume=auto") == 0
    folder = only_run(outputs)
    lines = events(folder)
    losses = [event["loss"] for event in lines if event["kind"] == "train"]
    changes = [event for event in lines if event["kind"] == "restart"]
    assert [(change["workers_before"], change["workers"]) for change in changes] == [(4, 3), (3, 6)]
    assert len(losses) == summary(folder)["steps"] == 120
    for change in changes:
        assert change["residual_sum"] == pytest.approx(change["residual_sum_before"], rel=1e-5, abs=1e-4)
        before, after = losses[: change["step"]][-10:], losses[change["step"] :][:10]
        spread = max(abs(one - next_one) for one, next_one in itertools.pairwise(before))
        assert fmean(after) - fmean(before) < spread
    assert fmean(losses[:10]) > 1.5 * fmean(losses[-10:])
    assert summary(folder)["workers"] == 6


def test_elastic_id_ignores_world_size() -> None:
    from trainer.experiment import experiment_id

    four, three = (composed(*RUN, f"cluster.workers={workers}") for workers in (4, 3))
    assert experiment_id(four, 4) == experiment_id(three, 3)
    fixed = [composed(*RUN, "training.elastic=false", f"cluster.workers={workers}") for workers in (4, 3)]
    assert len({experiment_id(fixed[0], 4), experiment_id(fixed[1], 3), experiment_id(four, 4)}) == 3
