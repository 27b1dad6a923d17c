"""The bench of accuracies: what is trained, how its clock runs, and what its file has."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from scripts import bench_accuracy as bench
from scripts.benchmarks import ddp_hooks, plain_loop
from scripts.labs.first_process import BURST
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.protocol.programs import Worker
from tests.scripts.test_bench_hooks import Largest
from tests.support.harness import run_workers
from tests.support.labs import ROOT, in_a_lab, run
from tests.support.measuring import undisturbed
from trainer import Constant
from trainer.sampler import ShuffledSampler
from trainer.task import Batch

CASES = [
    "ddp",
    "torch.bf16",
    "torch.powersgd,rank=2",
    *(f"spardl.{method},density=0.2,recipe=published" for method in ("spardl", "oktopk", "topka")),
    *(f"spardl.{method},density=0.2,optimizer=True" for method in ("spardl", "oktopk", "topka")),
    "outer.none,every=5",
    "outer.spardl,every=5,density=0.2,lr=1.0",
]
TRAIN = "model=lstm_imdb,dataset=synthetic_imdb,dataset.vocab_size=500,optimizer=adamw,training.eval_examples=20"


class Slow(Largest):
    """Tests that take time, which must not count."""

    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(0.3)
        return super().measure(model, batch)


def plan(task: Any = None, lr: float = 0.02, clip: float | None = None, **schedule: float) -> Any:
    task = task or Largest()
    settings = SimpleNamespace(batch_size=8, eval_batch_size=9, eval_examples=None, clip_norm=clip)
    return SimpleNamespace(
        task=task,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=lr),
        lr_schedule=Constant(**schedule),
        settings=settings,
        sampler=lambda worker: ShuffledSampler(len(task.train), worker, 8, 1),
    )


@pytest.mark.slow
def test_every_entrant_learns_and_all_workers_agree() -> None:
    def work(cluster: ProcessGroupCluster) -> dict[str, Any]:
        return {case: bench.trained(plan(), case, seed=1, steps=41, every=20) for case in CASES}

    one, other = run_workers(2, work, timeout=240)
    assert one == other
    for case, tests in one.items():
        assert [test["step"] for test in tests] == [20, 40, 41], case
        assert [test["seconds"] for test in tests] == sorted({test["seconds"] for test in tests}), case
        assert tests[-1]["accuracy"] > 0.5, case
    # What differs is the way to average, and nothing else.
    accuracies = {case: [test["accuracy"] for test in tests] for case, tests in one.items()}
    assert len({tuple(each) for each in accuracies.values()}) > 3


@pytest.mark.slow
def test_the_clock_stands_still_while_the_model_is_tested() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[float, float]:
        began = time.perf_counter()
        tests = bench.trained(plan(Slow()), "ddp", seed=1, steps=6, every=1)
        return time.perf_counter() - began, tests[-1]["seconds"]

    # Each tests 12 or 13 points, nine at a time.
    undisturbed(
        lambda: run_workers(2, work), lambda found: all(wall > 6 * 2 * 0.3 > seconds > 0 for wall, seconds in found)
    )


def test_steps_thrown_away_do_not_train() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[Any, Any]:
        loop = bench.begin(plan(), "ddp", 1, 3)
        loop.timed(3)
        return bench.trained(plan(), "ddp", seed=1, steps=3, every=3), loop.tested()

    ((test,), alone), _ = run_workers(2, work)
    assert test["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-5)


def test_the_rate_follows_the_schedule() -> None:
    """Six steps are an epoch; the warm-up is one, from a tenth on."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        loop = bench.begin(plan(warmup_epochs=1.0), "ddp", 1, 12)
        found = []
        for _ in range(8):
            loop.step()
            found.append(loop.optimizer.param_groups[0]["lr"])
        return found

    rates, _ = run_workers(2, work)
    assert rates == pytest.approx([0.02 * (0.1 + 0.9 * step / 6) for step in range(6)] + [0.02, 0.02])


@pytest.mark.parametrize("case", ["spardl.topka,density=0.2", "spardl.topka,density=0.2,optimizer=True"])
def test_a_hook_gets_the_optimizer_only_if_asked_to(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the limit of the norm, which the loop leaves alone then."""
    given = []
    real = ddp_hooks.spardl.attach

    def attach(*words: Any, **options: Any) -> Any:
        given.append({name: options.get(name) for name in ("optimizer", "clip_norm")})
        return real(*words, **options)

    def work(cluster: ProcessGroupCluster) -> tuple[bool, Any, int]:
        clipped = []
        monkeypatch.setattr(plain_loop.nn.utils, "clip_grad_norm_", lambda *_: clipped.append(1))
        monkeypatch.setattr(ddp_hooks.spardl, "attach", attach)
        loop = bench.begin(plan(clip=0.5), case, 1, 2)
        loop.step()
        return given[0]["optimizer"] is loop.optimizer, given[0]["clip_norm"], len(clipped)

    moved = "optimizer" in case
    assert run_workers(1, work) == [(moved, 0.5 if moved else None, 0 if moved else 1)]


def test_what_is_not_finite_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        monkeypatch.setattr(plain_loop.PlainLoop, "tested", lambda self: {"accuracy": 0.1234567, "loss": math.nan})
        return bench.trained(plan(), "ddp", seed=1, steps=1, every=9)

    (((test,)),) = run_workers(1, work)
    assert (test["accuracy"], test["loss"]) == (0.12346, None)


def test_a_summary_has_what_a_trainings_has() -> None:
    tests = [
        {"step": 2, "seconds": 0.5, "sent": 300, "accuracy": 0.5},
        {"step": 4, "seconds": 2.0, "sent": 800, "accuracy": 0.25},
    ]
    arguments = Namespace(case="ddp", seed=3, gbit=0.1, steps=4)

    def work(cluster: ProcessGroupCluster) -> Any:
        return bench.summary(plan(), arguments, tests)

    found, _ = run_workers(2, work)
    entries = found["parameters"]
    assert entries == sum(each.numel() for each in Largest().build_model().parameters())
    assert (found["final"], found["metric"]) == ({"accuracy": 0.25}, "accuracy")
    assert (found["cluster_seconds"], found["step_bytes"], found["step_bytes_dense"]) == (2.0, 200.0, 4.0 * entries)
    assert (found["workers"], found["caveats"], found["evaluations"]) == (2, [], tests)
    assert bench.shown(found).splitlines()[-1].split() == ["4", "2.00", "0.00", "0.25"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--case", "foo"], "case foo: 'foo' does not exist; use one of alone, ddp, torch.fp16"),
        (["--case", "spardl.topka,optimizer=adam"], "write optimizer=True or optimizer=False, not 'adam'"),
        (["--json", "none/x.json"], "--json none/x.json: create the folder none first"),
        (["--train", "model=lstm_ptb,dataset=pydocs"], "needs consecutive batches"),
        (["--train", "model=none"], "--train model=none: "),
        (["--train", "model=lstm_imdb,dataset=imdb,data_dir=/none"], "imdb"),
    ],
)
def test_bad_input_is_one_line(words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--case", "ddp", "--steps", "2", "--train", TRAIN, *words])
    assert bench.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_who_is_no_worker_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"^no RANK in the environment; start this with scripts/netlab.py run"):
        bench.act(Namespace())


@in_a_lab
def test_bytes_and_seconds_in_the_lab(tmp_path: Path) -> None:
    """A link of 0.1 Gbit/s carries what the interface counted, and no faster, but for its bucket in each step."""
    file = tmp_path / "found.json"
    train = TRAIN.replace("=500", "=5001")
    words = ["--case", "ddp", "--steps", "12", "--every", "5", "--train", train, "--json", str(file)]
    done = run("--", sys.executable, "scripts/bench_accuracy.py", *words, "--gbit", "0.1", gbit="0.1")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert 1 <= found["step_bytes"] / found["step_bytes_dense"] < 1.1
    assert found["cluster_seconds"] > 8 * 12 * (found["step_bytes_dense"] - BURST) / 0.1e9 / 1.05
    assert [test["step"] for test in found["evaluations"]] == [5, 10, 12]
    assert found["caveats"][0].startswith("placeholder data: docstrings")
    assert (found["gbit"], found["workers"]) == (0.1, 2)


def test_one_worker_has_the_whole_sampler() -> None:
    assert plan().sampler(Worker(0, 2)).steps_per_epoch == 6
