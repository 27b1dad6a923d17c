"""The bench of hooks: each trains the same model in the same way, and the page has what was found."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scripts import bench_hooks
from scripts.benchmarks.ddp_hooks import attached
from scripts.benchmarks.plain_loop import bytes_sent
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.support.harness import run_workers
from tests.support.labs import ROOT, in_a_lab, missing, run
from tests.support.measuring import undisturbed
from trainer.task import Batch, Task

PAGE, RESULTS = ROOT / "docs" / "tables" / "torch-hooks.md", ROOT / "docs" / "results" / "torch-hooks.json"
FEW = ["--rounds", "2", "--steps", "2", "--settle", "2", "--seeds", "1"]
CASES = ["alone", "ddp", "torch.fp16", "torch.powersgd,rank=2", "spardl.none", "spardl.topka,density=0.05"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    return bench_hooks


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


def plan() -> Any:
    settings = SimpleNamespace(batch_size=8, eval_batch_size=9, eval_examples=None, clip_norm=5.0)
    return SimpleNamespace(
        task=Largest(), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), settings=settings
    )


def test_local_steps_are_no_ddp_s_and_send_once_in_a_while(bench: ModuleType) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[bool], float, float, list[float]]:
        worker = cluster.local_workers[0]
        often, seldom = (bench.Case(f"outer.none,every={every}", plan(), 1, worker) for every in (1, 3))
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
def test_cases_differ_in_the_hook_only(bench: ModuleType) -> None:
    cases = ["alone", "ddp", "spardl.none", "spardl.topka,density=0.05"]
    arguments = Namespace(cases=[*cases, "ddp"], seeds=2, settle=2, rounds=2, steps=2)

    def work(cluster: ProcessGroupCluster) -> list[Any]:
        return [vars(each) for each in bench.train(plan(), arguments)]

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


def test_all_workers_have_and_test_the_same_model(bench: ModuleType) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[float], float, float, float]:
        worker = cluster.local_workers[0]
        case, again, other = (bench.Case("torch.powersgd", plan(), seed, worker) for seed in (1, 1, 2))
        assert _sums(case.model) == _sums(again.model) != _sums(other.model)
        for _ in range(40):
            case.step()
        case.losses[-bench.LAST - 1].fill_(torch.inf)  # of no interest any more
        accuracy, weights = case.tested()["accuracy"], _sums(case.model)
        assert case.bare.training  # again
        right, count = plan().task.measure(case.bare.eval(), plan().task.test.batch(torch.arange(25), None)).tolist()
        return weights, accuracy, right / count, case.last_loss()

    one, other = run_workers(2, work)
    assert one == other
    _, accuracy, alone, loss = one
    assert accuracy == alone > 0.6
    assert 0 < loss < 1


def test_powersgd_gets_one_bucket(bench: ModuleType) -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        counts = []
        for name in ("ddp", "torch.powersgd"):
            ddp, _ = attached(name, nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))))
            for _ in range(3):  # buckets are made anew after the first
                ddp(torch.randn(2, 1024)).sum().backward()
            counts.append(len(str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")))
        return counts

    assert run_workers(1, work) == [[2, 1]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--cases", "foo"], "case foo: 'foo' does not exist; use one of alone, ddp, torch.fp16"),
        (["--cases", "ddp", "spardl.topka,density"], "write an option as name=value, not 'density'"),
        (["--json", "none/x.json"], "--json none/x.json: create the folder none first"),
        (["--write", "README.md"], "lacks the lines <!-- hooks: REMARK --> and <!-- end of hooks -->"),
        (["--read", "README.md"], "--read README.md is not a file written by --json"),
        (["--read", "pyproject.json"], "pyproject.json"),
        (["--train", "model=lstm_ptb,dataset=pydocs"], "needs consecutive batches"),
        (["--train", "model=none"], "--train model=none: "),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    complaint: str,
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["bench_hooks.py", *words])
    assert bench.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_options_that_do_not_fit_name_the_case(bench: ModuleType) -> None:
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


def test_bytes_are_those_of_gloo_s_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "Inter-| Receive | Transmit",
        " face |bytes|bytes",
        "    lo: 5 1 0 0 0 0 0 0 5 1",
        "  eth0:70 1 0 0 0 0 0 0 1234 9",
    ]
    table = "\n".join(lines)
    monkeypatch.setattr(Path, "read_text", lambda path: table if str(path) == "/proc/net/dev" else "")
    for name, sent in (("eth0", 1234), ("lo", 0), ("eth7", 0)):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert bytes_sent() == sent
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert bytes_sent() == 0


def test_a_page_gets_what_a_file_has(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    learned = {"training loss": [1.0, 3.0, 2.0], "accuracy": [0.5], "loss": [9.0]}
    rows = [
        {"case": "alone", "seconds": [0.1], "sent": [0.0], "counted": None, "learned": {}},
        {"case": "ddp", "seconds": [0.3, 0.2, 0.4], "sent": [2e6, 4e6], "counted": None, "learned": learned},
    ]
    content = {"title": "One title:", "metric": "accuracy", "setting": {}, "rows": rows}
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    file.write_text(json.dumps(content))
    page.write_text("before\n<!-- hooks: by a script -->\nold\n<!-- end of hooks -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["bench_hooks.py", "--read", str(file), "--write", str(page)])
    assert bench.main() == 0
    lines = page.read_text().splitlines()
    assert lines[:4] == ["before", "<!-- hooks: by a script -->", "", "One title:"]
    assert lines[5].split(" | ")[1:] == [
        "median ms", "least..most", "x `ddp`", "MB sent", "training loss", "test accuracy |"
    ]  # fmt: skip
    assert lines[7] == "| `alone` | 100.000 | 100.000..100.000 | 0.33 |  |  |  |"
    assert lines[8] == (
        "| `ddp` | 300.000 | 200.000..400.000 | 1.00 | 3.000 | 2.0000 (1.0000..3.0000) | 0.5000 (0.5000..0.5000) |"
    )
    assert lines[9:] == ["", "<!-- end of hooks -->", "after"]
    assert "One title:" in capsys.readouterr().out
    file.write_text(json.dumps({**content, "made": {"cpu": "a processor", "commit": "0123", "python": "3"}}))
    assert bench.main() == 0
    assert page.read_text().splitlines()[9:11] == ["", "Measured on a processor, at commit 0123."]


def test_the_file_of_the_page_has_every_case(bench: ModuleType) -> None:
    content = json.loads(RESULTS.read_text())
    assert tuple(row["case"] for row in content["rows"]) == bench.CASES
    for row in content["rows"]:
        assert len(row["seconds"]) >= 5
        assert row["case"] == "alone" or len(row["learned"]["accuracy"]) == 3


@pytest.mark.slow
def test_two_workers_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- hooks: a script -->\n<!-- end of hooks -->\n")
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words += ["scripts/bench_hooks.py", "--train", "model=resnet20,dataset=digits", *FEW, "--cases", *CASES]
    words += ["--json", str(tmp_path / "found.json"), "--write", str(tmp_path / "page.md")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["case"] for row in found["rows"]] == CASES
    assert "269,434 parameters, 2 workers, batches of 16, 6 steps, 1 seeds" in done.stdout
    assert done.stdout.strip() in (tmp_path / "page.md").read_text()


@in_a_lab
def test_bytes_in_the_lab(tmp_path: Path) -> None:
    """The kernel counts what the ledger does, and headers; of dense gradients, what a ring sends."""
    words = ["--train", "model=resnet20,dataset=digits", *FEW, "--json", str(tmp_path / "found.json")]
    dense = 4 * 269_434

    def sent() -> dict[str, list[float]]:
        done = run("--", sys.executable, "scripts/bench_hooks.py", *words, "--cases", *CASES, workers=2)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "found.json").read_text())["rows"]
        found: dict[str, list[float]] = {row["case"]: row["sent"] for row in rows}
        for name in ("spardl.none", "spardl.topka,density=0.05"):
            (counted,) = (row["counted"] for row in rows if row["case"] == name)
            found[name] = [each / counted for each in found[name]]
        return found

    def holds(found: dict[str, list[float]]) -> bool:
        return (
            all(1 <= each < 1.2 for name in ("spardl.none", "spardl.topka,density=0.05") for each in found[name])
            and all(1 <= each / dense < 1.1 for each in found["ddp"])
            and all(1 <= 2 * each / dense < 1.1 for each in found["torch.fp16"])
            and max(found["torch.powersgd,rank=2"]) < 0.2 * dense
            and max(found["alone"]) < 5000
        )

    undisturbed(sent, holds)


def commands() -> list[str]:
    """Commands of the page as typed, without scripts/docs.py, which tests/scripts/test_docs_command.py runs."""
    blocks = PAGE.read_text().replace("\\\n", " ").split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [line for line in lines if "docs.py" not in line]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_run(command: str, tmp_path: Path) -> None:
    if "netlab.py" in command and (reason := missing()):
        pytest.skip(reason)
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    words = [*shlex.split(command, comments=True), "--write", str(page)]
    if "netlab.py" in command:
        small = ["--train", "model=resnet20,dataset=digits"]  # as given, four workers need 14 GB
        words += [*FEW, *small, "--json", str(tmp_path / "found.json")]
    words = [sys.executable if word == "python" else word for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    assert ("netlab.py" in command) == (page.read_text() != PAGE.read_text())
