from __future__ import annotations

import gc
import math
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spardl.basics.errors import TrainingError
from spardl.clusters import Cluster
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules import AfterBackward, Dear, Engine, Schedule, Wfbp
from tests.support.harness import dense, run_workers, spardl, topka
from tests.support.quick import some_quick
from tests.trainer.toy import Notebook, Stopped, Stopper, ToyTask, plan, simulated, trainer
from trainer.checkpoint import list_checkpoints
from trainer.lr import Cosine
from trainer.observers import Observer
from trainer.runs import Run
from trainer.task import Batch
from trainer.trainer import Trainer

METHODS = {
    "none": dense(),
    "topka": topka(0.1),
    "spardl": spardl(0.1, teams=2),
    "spardl, 4 teams": spardl(0.1, teams=4, gather="recursive"),
}
SECONDS = (
    "wall_seconds",
    "cluster_seconds",
    "evaluation_seconds",
    "step_seconds",
    "step_seconds_beside",
    "samples_per_second",
    "break_even_gbit",
)


def comparable(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in (*SECONDS, "peak_memory_bytes")}


def figures(book: Notebook, kind: str) -> list[tuple[int, dict[str, float]]]:
    measured = ("seconds/", "time", "samples/second")
    return [
        (step, {name: value for name, value in values.items() if not name.startswith(measured)})
        for step, values in book.of(kind)
    ]


@pytest.mark.parametrize(("method", "stop"), some_quick(product(METHODS, [1, 4, 7]), 4))
def test_stopped_and_continued_equals_undisturbed(method: str, stop: int, tmp_path: Path) -> None:
    """Weights, losses, metrics, counts: of a run with dropout, batch normalisation, noise and a warm-up."""
    changes: dict[str, Any] = {"max_steps": 8, "log_every": 3, "checkpoint_every": 1, "eval_every": 0.3}
    made = plan(METHODS[method], lr_schedule=Cosine(1.0), **changes)
    whole = Notebook()
    expected = trainer(made, tmp_path / "whole", observers=[whole]).fit()

    first, second = Notebook(), Notebook()
    with pytest.raises(Stopped):
        trainer(made, tmp_path / "parts", observers=[first, Stopper(stop + 1)]).fit()
    checkpoint = list_checkpoints(tmp_path / "parts" / "checkpoints")[-1]
    assert checkpoint.name == f"step-{stop:08d}"
    found = trainer(made, tmp_path / "parts", checkpoint=checkpoint, observers=[second]).fit()

    assert comparable(found) == comparable(expected)
    for kind in ("train", "eval"):
        parts = [item for item in figures(first, kind) if item[0] <= stop] + figures(second, kind)
        assert parts == figures(whole, kind)


class Remembering(ToyTask):
    """Knows its models as long as somebody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[weakref.ref[nn.Parameter]] = []

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.weights += map(weakref.ref, model.parameters())
        return model


@pytest.mark.parametrize("observers", [[], [Stopper(3)]], ids=["at its end", "in the middle"])
@pytest.mark.parametrize("schedule", [AfterBackward(), Wfbp(bucket_mb=0.001), Dear(threshold_mb=0.001)])
def test_no_weights_are_left_of_a_training_that_is_over(
    schedule: Schedule, observers: list[Observer], tmp_path: Path
) -> None:
    """The next one of a sweep, in the same process, needs the memory."""
    task = Remembering()
    made = replace(plan(dense(), task), schedule=schedule)
    with suppress(Stopped):
        trainer(made, tmp_path, observers=observers).fit()
    gc.collect()
    assert task.weights
    assert not any(weights() is not None for weights in task.weights)


def test_observers_receive_all_events(tmp_path: Path) -> None:
    book = Notebook()
    summary = trainer(plan(dense(), max_steps=3, log_every=2, eval_every=0.3), tmp_path, observers=[book]).fit()
    reported = [event[:2] for event in book.reported]
    steps = [("step", 1), ("step", 2), ("train", 2), ("eval", 2), ("step", 3), ("train", 3), ("eval", 3)]
    assert reported == [("begin", 0), *steps, ("end",)]
    assert summary["final"].items() <= book.of("eval")[-1][1].items()
    assert summary["best"] == max(values["accuracy"] for _, values in book.of("eval"))
    assert book.of("train")[0][1]["bytes/sent"] == pytest.approx(summary["step_bytes"], rel=0.01)


class Phases(Observer):
    """Writes down what is going on, and what is done."""

    def __init__(self) -> None:
        self.reported: list[str | int | None] = []

    def phase(self, what: str | None) -> None:
        self.reported.append(what)

    def step(self, step: int) -> None:
        self.reported.append(step)


def test_long_phases_are_announced(tmp_path: Path) -> None:
    book = Phases()
    made = plan(dense(), max_steps=2, check_every=5, checkpoint_every=1, keep_checkpoints=5)
    trainer(made, tmp_path, observers=[book]).fit()
    saving = ["checking the weights", "saving a checkpoint"]
    end = ["comparing replicas", "checking the weights", "evaluating", "saving a checkpoint", "comparing replicas"]
    assert book.reported == ["building the model", "first step", 1, *saving, None, 2, *end]
    again = Phases()
    trainer(made, tmp_path, checkpoint=list_checkpoints(tmp_path / "checkpoints")[0], observers=[again]).fit()
    assert again.reported == ["loading the checkpoint", "first step", 2, *end]


def test_the_seconds_of_a_step_are_those_of_the_table(tmp_path: Path) -> None:
    """Those of all workers; here, rank 0 computes for no time and rank 3 for three seconds."""
    cluster = simulated(4)
    made = plan(dense(), max_steps=2, log_every=2)
    book = Notebook()
    training = Trainer(made, cluster, Run("0", tmp_path), [book])
    step = training._learner.step

    def slow(number: int) -> list[float]:
        for rank, ledger in enumerate(cluster.ledgers):
            ledger.spend(Phase.COMPUTE, float(rank))
        return step(number)

    training._learner.step = slow  # type: ignore[method-assign]
    summary = training.fit()
    ((_, values),) = book.of("train")
    assert values["seconds/compute"] == pytest.approx(1.5, rel=0.2)
    for phase, seconds in summary["step_seconds"].items():
        assert values[f"seconds/{phase}"] == pytest.approx(seconds)


def test_counts_of_the_summary(tmp_path: Path) -> None:
    found = trainer(plan(dense(), max_steps=5, check_every=2), tmp_path).fit()
    length = found["parameters"]
    assert length == 16 * 6 + 16 + 16 + 16 + 3 * 16 + 3
    assert found["workers"] == 4
    assert found["steps"] == 5
    assert found["epochs"] == 5 / 6
    assert found["density"] == 1
    assert found["replica_checks"] == 2 + 1 + 1  # every second step, the last step, the weights
    assert found["step_rounds"] == 6
    assert found["step_bytes_dense"] == 2 * 8 * length * 3 / 4
    assert found["step_bytes"] == pytest.approx(found["step_bytes_dense"], rel=0.01)
    assert found["refused_gradients"] == 0


def test_checkpoints_once_per_epoch_and_at_the_end(tmp_path: Path) -> None:
    trainer(plan(dense(), max_steps=14, keep_checkpoints=5), tmp_path).fit()
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "checkpoints")] == ["06", "12", "14"]


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method: str, tmp_path: Path) -> None:
    book = Notebook()
    made = plan(METHODS[method], ToyTask(fancy=False), max_steps=60, log_every=20)
    trainer(made, tmp_path, observers=[book]).fit()
    losses = [values["loss"] for _, values in book.of("train")]
    assert losses[-1] < 0.9 * losses[0]


class Poisoned(ToyTask):
    """The loss is NaN at some calls; the workers of a simulation take turns, so call 4 s + r is rank r in step s."""

    def __init__(self, calls: set[int] | None) -> None:
        super().__init__()
        self._calls = calls
        self._count = -1

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._count += 1
        bad = self._calls is None or self._count in self._calls
        return super().loss(model, batch) * (math.nan if bad else 1)


@pytest.mark.parametrize("method", ["topka", "spardl"])
def test_nan_on_one_worker_is_discarded(method: str, tmp_path: Path) -> None:
    book = Notebook()
    running = trainer(plan(METHODS[method], Poisoned({4 * 2 + 1}), max_steps=5), tmp_path, observers=[book])
    summary = running.fit()
    assert summary["refused_gradients"] == 1
    lines = [values for _, values in book.of("train")]
    assert [line.get("refused", 0) for line in lines] == [0, 0, 1, 1, 1]
    assert all(math.isfinite(line["loss"]) for line in lines)
    residuals = [running._learner.synchronizer.state_dict(local)["groups"][0]["memory"] for local in range(4)]
    assert all(residual.isfinite().all() and residual.any() for residual in residuals)
    assert all(parameter.isfinite().all() for parameter in running._learner.model.parameters())


def test_real_workers_count_what_others_refused(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> tuple[int, list[float]]:
        (rank,) = cluster.local_ranks
        book = Notebook()
        made = plan(METHODS["topka"], Poisoned({2} if rank == 1 else set()), max_steps=4)
        summary = Trainer(made, cluster, Run("0", tmp_path), [book]).fit()
        return summary["refused_gradients"], [values.get("refused", 0) for _, values in book.of("train")]

    assert run_workers(2, work) == [(1, [0, 0, 1, 1])] * 2


def test_one_line_names_the_rank_and_the_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """However many ranks there are, and however many lines of figures follow."""

    def work(cluster: Cluster) -> None:
        (rank,) = cluster.local_ranks
        made = plan(METHODS["topka"], Poisoned({1, 2} if rank == 1 else set()), max_steps=5)
        Trainer(made, cluster, Run("0", tmp_path)).fit()

    run_workers(2, work)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert line.startswith("warning: rank 1 skipped or clipped a gradient in step 2 because of ")


def test_nan_on_all_workers_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss is nan at step 2; lower optimizer\.lr"):
        trainer(plan(METHODS["topka"], Poisoned(None), log_every=2), tmp_path).fit()


def test_replicas_that_differ_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.averages

    def drifting(synchronizer: Engine, local: int) -> list[Any]:
        return [-average if local == 2 else average for average in right(synchronizer, local)]

    monkeypatch.setattr(Engine, "averages", drifting)
    with pytest.raises(TrainingError, match=r"averaged gradients of ranks \[2\] differ from rank 0's at step 3"):
        trainer(plan(dense(), check_every=3), tmp_path).fit()


@pytest.mark.parametrize("method", [dense(), topka(1.0), spardl(1.0, teams=2)], ids=["none", "topka", "spardl"])
def test_one_worker_or_four_at_full_density(method: Method, tmp_path: Path) -> None:
    """A step of P workers is a step of one with P times the batch: here over the whole data, in any order."""
    weights = []
    for workers, batch_size in ((1, 96), (4, 24)):
        task = ToyTask(fancy=False)
        task.train.batch = lambda indices, generator, split=task.train: type(split).batch(split, indices, None)  # type: ignore[method-assign]
        made = plan(method if workers > 1 else dense(), task, batch_size=batch_size, max_steps=4)
        running = trainer(made, tmp_path / str(workers), workers=workers)
        running.fit()
        weights.append(torch.cat([parameter.detach().view(-1) for parameter in running._learner.model.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("untimed", [0, 3])
def test_samples_per_second_leave_out_the_first_steps(untimed: int, tmp_path: Path) -> None:
    """All steps take the same virtual time, so it does not matter which ones count."""
    made = plan(dense(), max_steps=5, untimed_steps=untimed, eval_every=0.2)
    found = trainer(made, tmp_path).fit()
    assert found["samples_per_second"] == pytest.approx(5 * 4 * 4 / found["cluster_seconds"], rel=1e-9)


def test_samples_per_second_of_too_short_a_run(tmp_path: Path) -> None:
    assert trainer(plan(dense(), max_steps=3, untimed_steps=3), tmp_path).fit()["samples_per_second"] is None
