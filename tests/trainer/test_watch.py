"""Runs that diverge: they end with advice, and every checkpoint can be resumed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.basics.errors import TrainingError
from spardl.clusters import Cluster
from spardl.method.method import Method
from tests.support.harness import dense, run_workers, spardl, topka
from tests.trainer.toy import Notebook, ToyTask, plan, trainer
from trainer.checkpoint import list_checkpoints, load_part
from trainer.learner import Learner
from trainer.lr import LrSchedule
from trainer.runs import Run
from trainer.task import Batch
from trainer.trainer import Trainer

METHODS = {"none": dense(), "topka": topka(0.1), "spardl": spardl(0.1, teams=2)}
STEPS_PER_EPOCH = 6  # of four workers


@dataclass(frozen=True)
class Exploding(LrSchedule):
    """Is far too high for one step, after which nothing is any good."""

    step: int = 1

    def _decay(self, epoch: float, epochs: float) -> float:
        return 1e200 if round(epoch * STEPS_PER_EPOCH) == self.step - 1 else 1.0


def exploding(method: Method, step: int, **changes: Any) -> Any:
    changes = {"max_steps": 15, "log_every": 100, "check_every": 100, "checkpoint_every": 3, "eval_every": 9, **changes}
    return plan(method, ToyTask(fancy=False), lr_schedule=Exploding(step=step), **changes)


def saved_is_finite(checkpoint: Path) -> bool:
    shared = load_part(checkpoint, None, torch.device("cpu"))
    tensors = [*shared["model"].values(), *(each["momentum_buffer"] for each in shared["optimizer"]["state"].values())]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [1, 2, 7, 8, 9])
def test_divergence_names_the_checkpoint_to_start_from(method: str, step: int, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        trainer(exploding(METHODS[method], step), tmp_path).fit()
    said = re.fullmatch(
        r"(the (?:evaluated )?loss is (?:nan|inf)|the .* no longer finite) at step (\d+); lower optimizer\.lr or set "
        r"training\.clip_norm, and (?:continue with start_from=(\S+)|start again: there is no earlier checkpoint)",
        str(caught.value),
    )
    assert said, str(caught.value)
    found = list_checkpoints(tmp_path / "checkpoints")
    assert all(saved_is_finite(checkpoint) for checkpoint in found)
    if step < 4:
        assert said[3] is None
        return
    good = Path(said[3])
    assert good == tmp_path / "checkpoints" / "step-00000006"
    steps = [int(checkpoint.name[-8:]) for checkpoint in found]
    assert steps in ([3, 6], [6, 9])
    calm = plan(METHODS[method], ToyTask(fancy=False), lr=0.01, max_steps=9)
    assert math.isfinite(trainer(calm, tmp_path / "calm", checkpoint=good).fit()["final"]["loss"])


def test_damaged_checkpoints_are_not_recommended(tmp_path: Path) -> None:
    class Harming(Notebook):
        def step(self, step: int) -> None:
            if step == 7:
                (tmp_path / "checkpoints" / "step-00000006" / "rank-2.pt").unlink()

    with pytest.raises(TrainingError, match=r"start_from=\S+step-00000003$"):
        trainer(exploding(dense(), 8), tmp_path, observers=[Harming()]).fit()


def test_a_diverged_run_is_not_finished(tmp_path: Path) -> None:
    """The last step alone is too much: nothing is logged, saved or evaluated before the end."""
    book = Notebook()
    with pytest.raises(TrainingError, match="are no longer finite at step 4; "):
        trainer(plan(dense(), lr=1e308, max_steps=4, log_every=100), tmp_path, observers=[book]).fit()
    assert ("end",) not in book.reported
    assert book.of("eval") == []
    assert not (tmp_path / "checkpoints").exists()


def test_a_loss_that_only_an_evaluation_finds(tmp_path: Path) -> None:
    """The last update went too far; the weights are finite, and no step has shown yet what they are worth."""
    with pytest.raises(TrainingError, match=r"the evaluated loss is (nan|inf) at step 4; "):
        trainer(exploding(dense(), 4, max_steps=4, checkpoint_every=None), tmp_path).fit()
    assert not list_checkpoints(tmp_path / "checkpoints")


class Faulty(ToyTask):
    """The input is NaN at some calls; call P s + r is that of rank r in step s."""

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self._calls, self._count = calls, -1

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._count += 1
        bad = self._count in self._calls
        return super().loss(model, {**batch, "points": batch["points"] * (math.nan if bad else 1)})


@pytest.mark.parametrize(("workers", "calls"), [(4, {4 * 2 + 1}), (4, {8, 9, 10, 11}), (1, {2}), (1, {5})])
def test_a_refused_gradient_does_not_end_a_run(workers: int, calls: set[int], tmp_path: Path) -> None:
    """Not even of all workers in a step after which a checkpoint is due; nor does it spoil running statistics."""
    made = plan(METHODS["topka"], Faulty(calls), max_steps=6, checkpoint_every=3, log_every=6)
    summary = trainer(made, tmp_path, workers).fit()
    assert summary["refused_gradients"] == len(calls)
    assert math.isfinite(summary["final"]["loss"])
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")] == ["3", "6"]


def test_a_moment_that_overflows(tmp_path: Path) -> None:
    """AdamW's second moment is infinite, so the weight it belongs to never moves again."""
    made = replace(plan(dense(), max_steps=3), optimizer=partial(torch.optim.AdamW, lr=0.1))
    running = trainer(made, tmp_path)
    running.fit()
    state = next(iter(running._learner._optimizer.state.values()))
    state["exp_avg_sq"][0] = math.inf
    with pytest.raises(TrainingError, match=r"the optimizer's state is no longer finite at step 3"):
        running._check_finite(3, evaluates=True)


@pytest.mark.parametrize("broken", ["weights", "loss"])
def test_all_workers_end_together(broken: str, tmp_path: Path) -> None:
    """An event that only one worker sees; no worker is left waiting."""

    def work(cluster: Cluster) -> str:
        (rank,) = cluster.local_ranks
        step = Learner.step

        def harmed(learner: Learner, number: int) -> list[float]:
            losses = step(learner, number)
            if number == 4 and rank == 1 and broken == "weights":
                next(learner.model.parameters()).data.view(-1)[3] = math.nan
            return [math.nan] if number == 4 and broken == "loss" and rank == 1 else losses

        Learner.step = harmed  # type: ignore[method-assign]
        made = plan(dense(), max_steps=6, checkpoint_every=5, log_every=100, check_every=100, eval_every=3)
        try:
            Trainer(made, cluster, Run("0", tmp_path), [], "cpu").fit()
        except TrainingError as error:
            return str(error)
        return "finished"

    found = run_workers(2, work)
    if broken == "loss":
        assert found == ["finished"] * 2
    else:
        assert found[0] == found[1]
        assert found[0].startswith("the weights are no longer finite at step 5; lower optimizer.lr or set ")
