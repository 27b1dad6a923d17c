"""Early stopping: what counts as improvement, and runs that end before their last step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spardl.basics.errors import ConfigError
from tests.support.driver import composed, events, here, only_run, results, summary
from tests.trainer.toy import ToyTask
from trainer.early_stopping import EarlyStopping, Stopper
from trainer.experiment import experiment_id

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "values", "stops_at"),
    [
        ({"patience": 1}, [0.5, 0.6, 0.6, 0.9], 3),
        ({"patience": 2}, [0.5, 0.6, 0.6, 0.9, 0.8, NAN], 6),
        ({"patience": 2}, [NAN, 0.1, NAN, NAN], 4),
        ({"patience": 2, "mode": "min"}, [0.5, 0.6, 0.7, 0.1], 3),
        ({}, [0.5, 0.4, 0.3, 0.2], None),
    ],
)
def test_evaluations_without_improvement_are_counted(
    settings: dict[str, Any], values: list[float], stops_at: int | None
) -> None:
    stopper = Stopper(EarlyStopping(**settings), ToyTask())
    found = None
    for step, value in enumerate(values, 1):
        stopper.add(step, {"accuracy": value})
        stopper.add(step, {"accuracy": value})  # repeated after a restart
        found = found or (step if stopper.stops else None)
        again = Stopper(EarlyStopping(**settings), ToyTask())
        again.load_state_dict(stopper.state_dict())
        assert (again.stops, again.outcome()) == (stopper.stops, stopper.outcome())
        stopper = again
    assert found == stops_at


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience must be an integer, at least 1, or null, got 0"),
        ({"patience": 1, "mode": "up"}, "mode must be max, min or null, got 'up'"),
        ({"metric": "loss"}, "metric and mode have no effect without training.early_stopping.patience"),
        (
            {"patience": 1, "metric": "perplexity"},
            "metric=perplexity is not a metric of this task; choose one",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EarlyStopping(**settings).check(ToyTask())


def test_the_loss_is_minimized_and_other_metrics_need_a_mode() -> None:
    class Two(ToyTask):
        def summarize(self, sums: Any) -> dict[str, float]:
            return {**super().summarize(sums), "top5": 1.0}

    assert not EarlyStopping(1, "loss").higher_is_better(Two())
    assert EarlyStopping(1).higher_is_better(Two())
    EarlyStopping(1, "top5", "max").check(Two())
    with pytest.raises(ConfigError, match="metric=top5 has no known direction; set "):
        EarlyStopping(1, "top5").check(Two())


def test_the_id_changes_only_with_early_stopping() -> None:
    plain, stopping = composed(), composed("training.early_stopping.patience=3")
    without = {**plain, "training": {k: v for k, v in plain["training"].items() if k != "early_stopping"}}
    assert experiment_id(plain, 4) == experiment_id(without, 4) != experiment_id(stopping, 4)


# The learning rate is so small that no evaluation differs from the first.
STUCK = ("optimizer.lr=1e-12", "training.eval_every=0.05", "training.max_steps=40", "training.eval_examples=16")


@pytest.mark.parametrize(
    "words",
    [
        ("cluster.workers=2", "compressor=spardl"),
        pytest.param(("cluster=simulated", "cluster.workers=2", "schedule=dear"), marks=pytest.mark.slow),
        pytest.param(
            ("cluster=simulated", "cluster.workers=2", "schedule=outer", "schedule.every=7"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_ends_early(words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = (*words, *STUCK, "training.early_stopping.patience=2", f"output_dir={tmp_path}")
    assert here(*command) == 0
    folder = only_run(tmp_path)
    found = summary(folder)
    evaluated = sorted({event["step"] for event in events(folder) if event["kind"] == "eval"})
    assert (found["status"], found["planned_steps"], found["steps"]) == ("finished", 40, evaluated[-1])
    assert len(evaluated) == 3
    assert found["early_stopping"]["best_step"] == evaluated[0]
    assert [path.name for path in (folder / "checkpoints").iterdir()][-1:] == [f"step-{evaluated[-1]:08d}"]
    assert f"after step {evaluated[-1]} of 40: accuracy has not improved in 2 eval" in capfd.readouterr().out


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_step(tmp_path: Path) -> None:
    from tests.trainer.test_resume import kill_at

    words = (*STUCK, "training.early_stopping.patience=4", "training.checkpoint_every=1", "cluster=simulated")
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    kill_at(5, *again, folder=tmp_path / "log", outputs=tmp_path / "out")
    assert here(*again) == 0
    assert here(*words, f"output_dir={tmp_path / 'undisturbed'}") == 0
    assert results(only_run(tmp_path / "out")) == results(only_run(tmp_path / "undisturbed"))
    assert summary(only_run(tmp_path / "out"))["steps"] < 40
