"""Benchmarks that train (bench.py hooks and accuracy): what differs between cases, their clock, their files."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scripts.benchmarks import accuracy, ddp_hooks, hooks, plain_loop
from scripts.benchmarks.ddp_hooks import attached
from scripts.labs.first_process import BURST
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.support.harness import run_workers
from tests.support.labs import ROOT, in_a_lab, run
from tests.support.measuring import undisturbed
from trainer import Constant
from trainer.sampler import ShuffledSampler
from trainer.task import Batch, Task

RESULTS = ROOT / "docs" / "results" / "torch-hooks.json"
FEW = ["--rounds", "2", "--steps", "2", "--settle", "2", "--seeds", "1"]
CASES = ["alone", "ddp", "torch.fp16", "torch.powersgd,rank=2", "spardl.none", "spardl.topka,density=0.05"]


class Points:
    """Random points, whose class is the place of their largest coordinate."""

    def __init__(self, count: int) -> None:
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.points)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Batch:
        return {"points": self.points[indices]}


class Largest(Task):
    """Which coordinate is the largest."""

    metric: ClassVar[str] = "accuracy"
    sums: ClassVar[tuple[str, ...]] = ("right", "count")

    def __init__(self) -> None:
        self.train, self.test = Points(96), Points(25)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 6))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["points"]), batch["points"].argmax(1))

    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        right = model(batch["points"]).argmax(1) == batch["points"].argmax(1)
        return torch.tensor([right.sum(), len(right)], dtype=torch.float64)

    def summarize(self, sums: Any) -> dict[str, float]:
        return {"accuracy": sums["right"] / sums["count"], "loss": 0.0}


def plan(task: Any = None, adam: bool = False, clip: float | None = None, **schedule: float) -> Any:
    task, sgd = task or Largest(), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    settings = SimpleNamespace(batch_size=8, eval_batch_size=9, eval_examples=None, clip_norm=clip)
    return SimpleNamespace(
        task=task,
        optimizer=partial(torch.optim.AdamW, lr=0.02) if adam else sgd,
        lr_schedule=Constant(**schedule),
        settings=settings,
        sampler=lambda worker: ShuffledSampler(len(task.train), worker, 8, 1),
    )


def test_local_steps_are_no_ddp_s_and_send_once_in_a_while() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[bool], float, float, list[float]]:
        worker = cluster.local_workers[0]
        often, seldom = (hooks.Case(f"outer.none,every={every}", plan(clip=5.0), 1, worker) for every in (1, 3))
        assert not any(isinstance(case.model, DistributedDataParallel) for case in (often, seldom))
        alike = []
        for _ in range(6):
            often.step()
            seldom.step()
            first = seldom.bare[0].weight.detach().clone()
            dist.broadcast(first, 0)
            alike.append(bool(torch.equal(first, seldom.bare[0].weight)))
        counted = often.counted(), seldom.counted()
        weights = _sums(seldom.bare)[:2]
        for case in (often, seldom):
            case.close()
        return alike, *counted, weights

    one, other = run_workers(2, work)
    assert one[0] == [True] * 6  # rank 0 is its own
    assert other[0] == [False, False, True] * 2
    assert one[1] == pytest.approx(3 * one[2])
    assert one[3] == other[3]


@pytest.mark.slow
def test_cases_differ_in_the_hook_only() -> None:
    cases = ["alone", "ddp", "spardl.none", "spardl.topka,density=0.05"]
    arguments = Namespace(cases=[*cases, "ddp"], seeds=2, settle=2, rounds=2, steps=2)

    def work(cluster: ProcessGroupCluster) -> list[Any]:
        return [vars(each) for each in hooks.train(plan(clip=5.0), arguments)]

    one, other = ({each["case"]: each for each in found} for found in run_workers(2, work))
    assert one == other  # each figure is of all workers
    assert list(one) == cases
    losses = {name: one[name]["learned"]["training loss"] for name in cases[1:]}
    for name, (first, second) in losses.items():
        assert len(one[name]["seconds"]) == len(one[name]["sent"]) == 2 * 2
        assert first != second  # another seed
    assert losses["spardl.none"] == pytest.approx(losses["ddp"], rel=1e-6)
    assert losses["spardl.topka,density=0.05"] != pytest.approx(losses["ddp"], rel=1e-3)
    assert one["spardl.none"]["learned"]["accuracy"] == one["ddp"]["learned"]["accuracy"]
    assert one["alone"]["learned"] == {}
    assert one["ddp"]["counted"] is None
    assert 0 < one["spardl.topka,density=0.05"]["counted"] < one["spardl.none"]["counted"]


def _sums(ddp: nn.Module) -> list[float]:
    """Of each parameter, and of what batch normalisation remembers."""
    return [each.double().sum().item() for each in ddp.state_dict().values()]


def test_all_workers_have_and_test_the_same_model() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[float], float, float, float]:
        worker = cluster.local_workers[0]
        case, again, other = (hooks.Case("torch.powersgd", plan(clip=5.0), seed, worker) for seed in (1, 1, 2))
        assert _sums(case.model) == _sums(again.model) != _sums(other.model)
        for _ in range(40):
            case.step()
        case.losses[-hooks.LAST - 1].fill_(torch.inf)  # of no interest any more
        accuracy, weights = case.tested()["accuracy"], _sums(case.model)
        assert case.bare.training  # again
        right, count = plan().task.measure(case.bare.eval(), plan().task.test.batch(torch.arange(25), None)).tolist()
        return weights, accuracy, right / count, case.last_loss()

    one, other = run_workers(2, work)
    assert one == other
    _, accuracy, alone, loss = one
    assert accuracy == alone > 0.6
    assert 0 < loss < 1


def test_powersgd_gets_one_bucket() -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        counts = []
        for name in ("ddp", "torch.powersgd"):
            ddp, _ = attached(name, nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))))
            for _ in range(3):  # buckets are made anew after the first
                ddp(torch.randn(2, 1024)).sum().backward()
            counts.append(len(str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")))
        return counts

    assert run_workers(1, work) == [[2, 1]]


def test_options_that_do_not_fit_name_the_case() -> None:
    cases = ["torch.powersgd,start=1", "torch.fp16,rank=1", "spardl.topka,density=2", "spardl.topka,rank=2"]
    cases += [
        "ddp,optimizer=True",
        "torch.bf16,optimizer=True",
        "spardl.topka,optimizer=adam",
        "spardl.topka,optimizer=True",
        "outer.none,every=2",
    ]

    def work(cluster: ProcessGroupCluster) -> None:
        for case in cases:
            with pytest.raises(ConfigError, match=f"^case {case}: "):
                attached(case, nn.Linear(3, 2))

    run_workers(1, work)


def test_results_are_shown_as_a_table() -> None:
    learned = {"training loss": [1.0, 3.0, 2.0], "accuracy": [0.5], "loss": [9.0]}
    rows = [
        {"case": "alone", "seconds": [0.1], "sent": [0.0], "counted": None, "learned": {}},
        {"case": "ddp", "seconds": [0.3, 0.2, 0.4], "sent": [2e6, 4e6], "counted": None, "learned": learned},
    ]
    content = {"title": "One title:", "metric": "accuracy", "setting": {}, "rows": rows}
    title, _, header, _, *lines = hooks.shown(content).splitlines()
    assert title == "One title:"
    columns = ["median ms", "least..most", "x `ddp`", "MB sent", "training loss", "test accuracy |"]
    assert header.split(" | ")[1:] == columns
    assert lines == [
        "| `alone` | 100.000 | 100.000..100.000 | 0.33 |  |  |  |",
        "| `ddp` | 300.000 | 200.000..400.000 | 1.00 | 3.000 | 2.0000 (1.0000..3.0000) | 0.5000 (0.5000..0.5000) |",
    ]
    made = {"cpu": "a processor", "commit": "0123", "python": "3"}
    assert hooks.shown({**content, "made": made}).endswith("|\n\nMeasured on a processor, at commit 0123.")


def test_the_file_of_the_page_has_every_case() -> None:
    content = json.loads(RESULTS.read_text())
    assert tuple(row["case"] for row in content["rows"]) == hooks.CASES
    for row in content["rows"]:
        assert len(row["seconds"]) >= 5
        assert row["case"] == "alone" or len(row["learned"]["accuracy"]) == 3


@in_a_lab
def test_bytes_in_the_lab(tmp_path: Path) -> None:
    """The kernel counts what the ledger does, and headers; of dense gradients, what a ring sends."""
    words = ["--train", "model=resnet20,dataset=digits", *FEW, "--json", str(tmp_path / "found.json")]
    dense = 4 * 269_434

    def sent() -> dict[str, list[float]]:
        done = run("--", sys.executable, "scripts/bench.py", "hooks", *words, "--cases", *CASES, workers=2)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "found.json").read_text())["rows"]
        found: dict[str, list[float]] = {row["case"]: row["sent"] for row in rows}
        for name in ("spardl.none", "spardl.topka,density=0.05"):
            (counted,) = (row["counted"] for row in rows if row["case"] == name)
            found[name] = [each / counted for each in found[name]]
            assert min(found[name]) >= 1
        assert min(found["ddp"]) >= dense
        assert min(found["torch.fp16"]) >= dense / 2
        return found

    def holds(found: dict[str, list[float]]) -> bool:
        return (
            all(each < 1.2 for name in ("spardl.none", "spardl.topka,density=0.05") for each in found[name])
            and max(found["ddp"]) < 1.1 * dense
            and max(found["torch.fp16"]) < 1.1 * dense / 2
            and max(found["torch.powersgd,rank=2"]) < 0.2 * dense
            and max(found["alone"]) < 5000
        )

    undisturbed(sent, holds)


ENTRANTS = [
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


@pytest.mark.slow
def test_every_entrant_learns_and_all_workers_agree() -> None:
    def work(cluster: ProcessGroupCluster) -> dict[str, Any]:
        return {case: accuracy.trained(plan(adam=True), case, seed=1, steps=41, every=20) for case in ENTRANTS}

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
        tests = accuracy.trained(plan(Slow(), adam=True), "ddp", seed=1, steps=6, every=1)
        return time.perf_counter() - began, tests[-1]["seconds"]

    # Each tests 12 or 13 points, nine at a time.
    undisturbed(
        lambda: run_workers(2, work), lambda found: all(wall > 6 * 2 * 0.3 > seconds > 0 for wall, seconds in found)
    )


def test_steps_thrown_away_do_not_train() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[Any, Any]:
        loop = accuracy.begin(plan(adam=True), "ddp", 1, 3)
        loop.timed(3)
        return accuracy.trained(plan(adam=True), "ddp", seed=1, steps=3, every=3), loop.tested()

    ((test,), alone), _ = run_workers(2, work)
    assert test["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-5)


def test_the_rate_follows_the_schedule() -> None:
    """Six steps are an epoch; the warm-up is one, from a tenth on."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        loop = accuracy.begin(plan(adam=True, warmup_epochs=1.0), "ddp", 1, 12)
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
        loop = accuracy.begin(plan(adam=True, clip=0.5), case, 1, 2)
        loop.step()
        return given[0]["optimizer"] is loop.optimizer, given[0]["clip_norm"], len(clipped)

    moved = "optimizer" in case
    assert run_workers(1, work) == [(moved, 0.5 if moved else None, 0 if moved else 1)]


def test_what_is_not_finite_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        monkeypatch.setattr(plain_loop.PlainLoop, "tested", lambda self: {"accuracy": 0.1234567, "loss": math.nan})
        return accuracy.trained(plan(adam=True), "ddp", seed=1, steps=1, every=9)

    (((test,)),) = run_workers(1, work)
    assert (test["accuracy"], test["loss"]) == (0.12346, None)


@in_a_lab
def test_bytes_and_seconds_in_the_lab(tmp_path: Path) -> None:
    """A link of 0.1 Gbit/s carries what the interface counted, and no faster, except for its bucket in each step."""
    file = tmp_path / "found.json"
    train = TRAIN.replace("=500", "=5001")
    words = ["--case", "ddp", "--steps", "12", "--every", "5", "--train", train, "--json", str(file)]
    done = run("--", sys.executable, "scripts/bench.py", "accuracy", *words, "--gbit", "0.1", gbit="0.1")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert 1 <= found["step_bytes"] / found["step_bytes_dense"] < 1.1
    assert found["cluster_seconds"] > 8 * 12 * (found["step_bytes_dense"] - BURST) / 0.1e9 / 1.05
    assert [test["step"] for test in found["evaluations"]] == [5, 10, 12]
    assert found["caveats"][0].startswith("placeholder data: docstrings")
    assert (found["gbit"], found["workers"], found["metric"]) == (0.1, 2, "accuracy")
    assert found["final"]["accuracy"] == found["evaluations"][-1]["accuracy"]
