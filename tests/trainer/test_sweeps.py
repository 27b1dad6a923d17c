"""Results that Hydra's sweepers and launchers receive: the metric of each run, and the failed runs."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

from tests.support.driver import ROOT, background_run, command, here, only_run, summary, wait_until
from trainer.command_line import STOPPED
from trainer.runs import Run, UnfinishedError
from trainer.task import Task

QUICK = ("compressor=none", "cluster=simulated", "cluster.workers=2", "training.max_steps=8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[JobReturn]:
    """What the launcher hands to the sweeper, in the order of the runs."""
    found: list[JobReturn] = []
    # Hydra loads its plugins itself: an import would bring another class of that name.
    (kind,) = (each for each in Plugins.instance().discover(Launcher) if each.__name__ == "BasicLauncher")
    launch: Callable[..., Any] = vars(kind)["launch"]

    def watched(*given: Any, **options: Any) -> Any:
        results = launch(*given, **options)
        found.extend(results)
        return results

    monkeypatch.setattr(kind, "launch", watched)
    return found


def metric(run: Path) -> float:
    found = summary(run)
    return float(found["final"][found["metric"]])


def test_a_sweeper_gets_the_metric_of_each_run(tmp_path: Path, returned: list[JobReturn]) -> None:
    """Also of a run that is skipped, since it is finished."""
    words = ("-m", "seed=1,2", *QUICK, f"output_dir={tmp_path}")
    assert here(*words) == 0
    kept = {yaml.safe_load((run / "config.yaml").read_text())["seed"]: metric(run) for run in tmp_path.glob("[!.]*")}
    assert [each.return_value for each in returned] == [kept[1], kept[2]]
    assert all(isinstance(each.return_value, float) and 0 < each.return_value <= 1 for each in returned)
    assert here(*words) == 0
    assert len(list(tmp_path.glob("[!.]*"))) == 2
    assert [each.return_value for each in returned[2:]] == [kept[1], kept[2]]


def test_a_run_that_diverged_is_a_failure_to_a_sweeper(tmp_path: Path, returned: list[JobReturn]) -> None:
    assert here("-m", "optimizer.lr=1e30,0.05", *QUICK, f"output_dir={tmp_path}") == 1
    assert [each.status for each in returned] == [JobStatus.FAILED, JobStatus.COMPLETED]
    with pytest.raises(UnfinishedError, match="the run ended with exit code 1"):
        _ = returned[0].return_value


def test_a_failed_run_ends_a_batched_sweep(tmp_path: Path, returned: list[JobReturn]) -> None:
    words = ("-m", "optimizer.lr=-1,0.05,0.04", "hydra.sweeper.max_batch_size=2", *QUICK, f"output_dir={tmp_path}")
    assert here(*words) == 1
    assert [each.status for each in returned] == [JobStatus.FAILED, JobStatus.COMPLETED]


def test_a_non_finite_metric_is_nan(tmp_path: Path) -> None:
    run = Run("0", tmp_path)
    run.write_summary({"metric": "perplexity", "final": {"perplexity": math.inf}})
    assert math.isnan(run.metric())


@pytest.mark.slow
def test_a_stopped_sweep_starts_no_further_run(tmp_path: Path) -> None:
    words = ("-m", "seed=1,2,3", "compressor=none", "cluster=simulated", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log") as run:
        wait_until(lambda: '"train"' in "".join(path.read_text() for path in tmp_path.glob("out/*/metrics.jsonl")))
        run.kill(signal.SIGTERM)
        assert run.wait() == STOPPED
    assert summary(only_run(tmp_path / "out"))["status"] == "stopped"


def kinds_of(task: Any) -> Iterator[Any]:
    """The tasks of this project that have a metric."""
    for kind in task.__subclasses__():
        yield from kinds_of(kind)
        if hasattr(kind, "metric") and kind.__module__.startswith("tasks."):
            yield kind


def test_the_direction_of_every_metric_is_documented() -> None:
    for path in (ROOT / "tasks").glob("*.py"):
        importlib.import_module(f"tasks.{path.stem}")
    rows = {f"| `{kind.metric}` | `{'maximize' if kind.higher_is_better else 'minimize'}` |" for kind in kinds_of(Task)}
    assert len(rows) >= 6
    assert not [row for row in rows if row not in CONFIGURATION]


def has(plugin: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec("hydra_plugins") is None or importlib.util.find_spec(plugin) is None
    return pytest.mark.skipif(missing, reason=f"{plugin} is not installed")


@has("hydra_plugins.hydra_joblib_launcher")
def test_runs_in_other_processes_have_exit_codes(tmp_path: Path) -> None:
    words = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optimizer.lr=1e30,0.05", "logger=none")
    done = command(*words, *QUICK, f"output_dir={tmp_path}")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "Error executing job" not in line]
    assert lines[0].startswith("error: optimizer.lr=1e+30")
    assert lines[-1] == "error: a run of the sweep failed, see above"
    assert [line.split()[2] for line in done.stdout.splitlines()[-2:]] == ["failed", "finished"]
    assert sorted(summary(run)["status"] for run in tmp_path.glob("[!.]*")) == ["failed", "finished"]


class ForkLauncher(Launcher):
    """Runs each job in another process, like Hydra's own launchers for joblib and submitit."""

    __module__ = "hydra_plugins.fork"  # Hydra takes plugins from there only

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self._context, self._function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
        return [self._fork(number, words) for number, words in enumerate(job_overrides, initial_job_idx)]

    def _fork(self, number: int, words: Any) -> JobReturn:
        if (pid := os.fork()) == 0:
            config = self._context.config_loader.load_sweep_config(self._config, list(words))
            with open_dict(config):
                config.hydra.job.update(id=str(number), num=number)
            done = run_job(self._function, config, "hydra.sweep.dir", "hydra.sweep.subdir", self._context)
            sys.stdout.flush()
            os._exit(done.status != JobStatus.COMPLETED)
        if os.waitpid(pid, 0)[1]:
            return JobReturn(status=JobStatus.FAILED, _return_value=UnfinishedError(1))
        return JobReturn(status=JobStatus.COMPLETED)


def test_the_table_has_runs_of_other_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.fork")
    package.__path__ = []
    vars(module)["ForkLauncher"] = ForkLauncher
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Plugins.instance().register(ForkLauncher)
    node = {"_target_": "hydra_plugins.fork.ForkLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="fork", node=node)
    words = ("-m", "hydra/launcher=fork", "optimizer.lr=0.05,-1,0.04", *QUICK, f"output_dir={tmp_path}")
    assert here(*words) == 1
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert "run 3 of 3: optimizer.lr=0.04" in lines
    first, failed, last = lines[-3:]
    assert first.startswith("1 optimizer.lr=0.05 finished accuracy")
    assert re.fullmatch(r"2 optimizer.lr=-1 failed - [\d.]+ - -", failed)
    assert last.startswith("3 optimizer.lr=0.04 finished accuracy")
    assert not list(tmp_path.glob(".sweep/outcomes*"))


@has("hydra_plugins.hydra_optuna_sweeper")
def test_optuna_finds_the_best_run(tmp_path: Path) -> None:
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.direction=maximize")
    drawn = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.max_failure_rate=1")
    lr = "optimizer.lr=choice(1e30,0.05,1e-9)"
    done = command("-m", *search, *drawn, lr, *QUICK, "logger=none", f"output_dir={tmp_path}")
    assert done.returncode == 1, done.stderr  # of the four runs that this seed draws, some have the rate 1e30
    assert "no longer finite" in done.stderr
    found = yaml.safe_load((tmp_path / ".sweep" / "optimization_results.yaml").read_text())
    finished = [run for run in tmp_path.glob("[!.]*") if summary(run)["status"] == "finished"]
    assert found["best_value"] == max(metric(run) for run in finished)


def test_the_runs_of_a_sweep_are_counted_and_tabled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf").mkdir()
    short = (*QUICK, "training.max_steps=2")
    words = ("-m", "optimizer.lr=0.05,-1", "seed=1,2", *short, f"output_dir={tmp_path / 'out'}")
    assert here(*words, "--config-dir", str(tmp_path / "conf")) == 1  # whose value is no setting
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert [line for line in lines if re.match(r"run \d of ", line)] == [
        f"run {number} of 4: optimizer.lr={lr} seed={seed}"
        for number, (lr, seed) in enumerate(product(("0.05", "-1"), (1, 2)), 1)
    ]
    header, *rows = lines[-5:]
    assert header == "run state metric seconds MB per worker path"
    for number, row in enumerate(rows, 1):
        assert row.startswith(f"{number} optimizer.lr=")
    for row in rows[:2]:
        assert re.search(rf"finished accuracy 0\.\d+ [\d.]+ [\d.]+ {tmp_path}/out/none-resnet20-digits-\w+$", row), row
    for row in rows[2:]:
        assert re.search(r"failed - [\d.]+ - -$", row), row
    assert here(*words[:1], "optimizer.lr=0.05,0.04", *words[3:]) == 0
    assert "skipped" in capfd.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize(
    ("words", "model", "data"),
    [
        (("model.depth=8",), "resnet8", "digits"),
        (("model.depth=20",), "resnet20", "digits"),
        pytest.param(("model=resnet32", "model.depth=8"), "resnet8", "digits", marks=pytest.mark.slow),
        (
            ("model=gpt_chars", "model.num_layers=1", "model.hidden_size=8", "training.eval_examples=8"),
            "gpt_chars-num_layers1-hidden_size8",
            "pydocs_chars",
        ),
    ],
)
def test_a_folder_is_named_by_what_ran(
    words: tuple[str, ...], model: str, data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*QUICK, "training.max_steps=1", *words, f"output_dir={tmp_path}") == 0
    assert only_run(tmp_path).name.startswith(f"none-{model}-{data}-")
    planned = f"plan: none on {model} with {data}; 2 workers (simulated) x 16 examples a step; at most 1 steps"
    assert capfd.readouterr().out.startswith(f"{planned}; results in {tmp_path}/\n")
