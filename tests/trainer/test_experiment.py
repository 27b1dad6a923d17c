from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spardl.basics.errors import ConfigError, WorkerError
from spardl.method.recipes import make_method
from tests.support.harness import spardl
from tests.trainer.toy import plan
from trainer.experiment import Experiment
from trainer.launch import Launcher, Simulated
from trainer.observers import NoLogger
from trainer.runs import Run

CONFIG: dict[str, Any] = {
    "seed": 1,
    "data_dir": "data",
    "output_dir": "outputs",
    "resume": None,
    "force": False,
    "logger": {"mode": "auto"},
    "dataset": {"root": "data", "download": False, "flip": True},
    "cluster": {"workers": None, "port": None, "timeout": 60, "network": "ethernet_1g"},
    "training": {"log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "check_every": 1, "batch_size": 16},
    "optimizer": {"lr": 0.1},
}


def experiment(config: dict[str, Any] = CONFIG, launcher: Launcher | None = None) -> Experiment:
    method = spardl(0.1, teams=2)
    return Experiment(config, "toy", plan(method, max_steps=2), launcher or Simulated(device="cpu"), NoLogger())


def changed(path: str, value: Any) -> dict[str, Any]:
    node, _, key = path.rpartition(".")
    return {**CONFIG, node: {**CONFIG[node], key: value}} if node else {**CONFIG, key: value}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data_dir", "elsewhere"),
        ("output_dir", "elsewhere"),
        ("resume", "auto"),
        ("force", True),
        ("logger", {}),
        ("dataset.root", "elsewhere"),
        ("dataset.download", True),
        ("cluster.port", 5),
        ("cluster.timeout", 5),
        ("training.log_every", 5),
        ("training.checkpoint_every", 5),
        ("training.keep_checkpoints", 5),
        ("training.check_every", 5),
    ],
)
def test_what_does_not_change_the_result_is_not_part_of_the_id(path: str, value: Any) -> None:
    assert experiment(changed(path, value)).id == experiment().id


@pytest.mark.parametrize(
    ("path", "value"),
    [("seed", 2), ("dataset.flip", False), ("cluster.network", "x"), ("training.batch_size", 5), ("optimizer.lr", 1)],
)
def test_what_changes_the_result_is_part_of_the_id(path: str, value: Any) -> None:
    assert experiment(changed(path, value)).id != experiment().id


def test_what_the_memory_of_this_machine_will_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert experiment().warnings() == []
    monkeypatch.setattr("trainer.experiment.available_bytes", lambda: 1000)
    (line,) = experiment().warnings()
    assert line.startswith("not enough memory: 1 process(es) on this machine need at least ")


def test_momentum_applied_twice_is_a_warning() -> None:
    made = experiment()
    for share, momentum, warnings in ((0.1, 0.9, 1), (0.1, 0.0, 0), (1.0, 0.9, 0)):
        method = make_method("arc_topk_ef21", share=share)
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        plan_ = replace(made.plan, method=method, optimizer=optimizer)
        found = replace(made, plan=plan_).warnings()
        assert len(found) == warnings
        assert all(
            line == "compressor=arc_topk_ef21 averages running means of gradients, and SGD applies its own momentum "
            "(0.9) to them again; set its momentum=0 and a learning rate 10 times as large"
            for line in found
        )


def test_the_number_of_workers_is_part_of_the_id() -> None:
    assert experiment(launcher=Simulated(workers=6, device="cpu")).id != experiment().id


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="does not divide 3 workers"):
        experiment(launcher=Simulated(workers=3, device="cpu"))
    with pytest.raises(ConfigError, match="output_dir must name a folder"):
        experiment({**CONFIG, "output_dir": None})


def test_a_run_belongs_to_one_process_until_its_end(tmp_path: Path) -> None:
    made = experiment({**CONFIG, "output_dir": str(tmp_path), "resume": "auto"})
    with made.prepare() as run, made.prepare() as other:
        assert run.folder != other.folder
        with pytest.raises(ConfigError, match="is in use"), _resuming(made, run).prepare():
            pass
    with made.prepare() as again:
        assert again.folder in (run.folder, other.folder)


def _resuming(made: Experiment, run: Run) -> Experiment:
    run.write_summary({"id": made.id})
    return experiment({**made.config, "resume": str(run.folder)})


class Failing(Simulated):
    """Raises instead of training."""

    def __init__(self, error: BaseException, leads: bool = True) -> None:
        super().__init__(device="cpu")
        self._error = error
        self.leads = leads

    def launch(self, job: Callable[..., None], folder: Path) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerError("worker 1 failed"), {"status": "failed", "reason": "worker 1 failed"}),
        (KeyboardInterrupt(), {"status": "interrupted"}),
    ],
)
@pytest.mark.parametrize("leads", [True, False])
def test_how_a_run_ended_is_written_by_rank_0_alone(
    error: BaseException, expected: dict[str, str], leads: bool, tmp_path: Path
) -> None:
    made = experiment({**CONFIG, "output_dir": str(tmp_path)}, Failing(error, leads))
    with made.prepare() as run, pytest.raises(type(error)):
        made.perform(run)
    assert run.read_summary() == ({"id": made.id, "caveats": [], **expected} if leads else {})


def test_from_beginning_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = experiment({**CONFIG, "output_dir": str(tmp_path)})
    with made.prepare() as run:
        made.perform(run)
    assert run.folder.name == f"toy-{made.id}"
    assert run.read_summary()["status"] == "finished"
    assert f"results: {run.folder}" in capfd.readouterr().out
