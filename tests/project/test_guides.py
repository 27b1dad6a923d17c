"""The code and the commands of the guides run, and their tables hold."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from scripts import reproduce
from spardl.clusters import ProcessGroupCluster
from spardl.diagnostics.cli import front, run
from spardl.hooks.averager import Stats
from tests.project.test_docs import blocks
from tests.support.harness import run_workers
from tests.support.labs import ROOT, in_a_lab

DOCS = ROOT / "docs"
QUICKSTART, CHOOSING, BREAK_EVEN = (
    DOCS / f"{name}.md" for name in ("quickstart", "choosing-a-method", "tables/break-even")
)
GUIDES = [QUICKSTART, CHOOSING, BREAK_EVEN, *(DOCS / "tables" / f"{name}.md" for name in ("settings", "measurements"))]


class Setting:
    """What the code of the pages takes for granted: a model, an optimizer and data."""

    def __init__(self, rank: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 20))
        generator = torch.Generator().manual_seed(rank)
        draws = [(torch.randn(3, 40, generator=generator), torch.randn(3, 20, generator=generator)) for _ in range(8)]
        self.batches = draws
        self.names: dict[str, Any] = {
            "spardl": spardl,
            "torch": torch,
            "rank": rank,
            "model": model,
            "ddp_model": DistributedDataParallel(model),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "loss_function": nn.MSELoss(),
            "inputs": draws[0][0],
            "targets": draws[0][1],
        }

    def run(self, code: str, batches: slice = slice(0)) -> None:
        self.names["batches"] = self.batches[batches]
        exec(code, self.names)

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.names["model"].parameters()])


def _two_trainings(cluster: ProcessGroupCluster) -> tuple[Tensor, Tensor, Stats]:
    """The quickstart from its first line to its last but one: without a break, and cut in the middle."""
    attach, loop, look, save, resume, distributed, _ = blocks(QUICKSTART, "python")
    straight = Setting(cluster.local_ranks[0])
    straight.run(attach)
    straight.run(loop, slice(4))
    straight.run(save)
    straight.run(distributed)
    straight.run(loop, slice(4, 8))
    straight.run(look)
    resumed = Setting(cluster.local_ranks[0], seed=1)
    resumed.run(attach)
    resumed.run(resume)
    resumed.run(loop, slice(4, 8))
    return straight.weights, resumed.weights, straight.names["stats"]


@pytest.mark.slow
def test_the_quickstart_trains_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_workers(2, _two_trainings)
    first = found[0][0]
    assert all(torch.equal(first, weights) for straight, resumed, _ in found for weights in (straight, resumed))
    stats = found[0][2]
    assert stats.steps == 8
    assert 0 < stats.bytes_sent < 0.03 * stats.dense_bytes


def _tuned(cluster: ProcessGroupCluster) -> tuple[Tensor, spardl.Method, bool]:
    (code,) = (each for each in blocks(CHOOSING, "python") if "teams=2" in each)
    setting = Setting(cluster.local_ranks[0])
    setting.run(code)
    setting.run(blocks(QUICKSTART, "python")[1], slice(4))
    return setting.weights, setting.names["handle"].method, not setting.names["optimizer"].state


@pytest.mark.slow
def test_the_options_of_the_tuning_guide() -> None:
    (one, method, moved), (other, _, _) = run_workers(2, _tuned)
    assert torch.equal(one, other)
    assert (method.compressor.density, method.communicator.teams) == (0.02, 2)
    assert (method.wire.values, method.warmup.steps) == ("bfloat16", 0)
    assert moved, "the optimizer, given to the handle, keeps no state of its own"


@pytest.mark.slow
def test_the_advice_of_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(40, 20)
    names = {"model": model, "loss_function": nn.MSELoss(), "inputs": torch.randn(3, 40), "targets": torch.randn(3, 20)}
    exec(blocks(QUICKSTART, "python")[-1], {"spardl": spardl, **names})
    assert "820 parameters, 8 workers, 1 Gbit/s" in capsys.readouterr().out


def test_messages_are_those_of_the_library() -> None:
    section = QUICKSTART.read_text().split("## When something goes wrong")[1].split("## Next")[0]
    messages = re.findall(r"^\| `(.+?)` \|", section, flags=re.MULTILINE)
    sources = "".join(path.read_text() for path in (ROOT / "spardl").rglob("*.py"))
    assert len(messages) == 5
    assert all(message in sources for message in messages)


def commands(lab: bool = False) -> list[str]:
    """Those of the pages, but for trainings, examples and the installation, which have tests elsewhere."""
    text = "".join(block for page in GUIDES for block in blocks(page, "sh"))
    lines = text.replace("\\\n", " ").splitlines()
    kept = {
        line for line in lines if not any(word in line for word in ("train.py", "examples/", "pip install", "docs.py"))
    }
    return sorted(line for line in kept if ("netlab.py" in line) is lab)


@in_a_lab
def test_the_bench_of_the_tuning_guide() -> None:
    (command,) = (each for each in commands(lab=True) if "bench.py overlap" in each)
    quick = command.replace("resnet50", "resnet20").replace("--rounds 5", "--rounds 1").replace("0.3", "0.05")
    words = [sys.executable if word == "python" else word for word in shlex.split(quick)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines() if line.startswith("| spardl")] == [
        "wfbp:bucket_mb=1",
        "wfbp:bucket_mb=5",
        "wfbp",
        "wfbp:bucket_mb=inf",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    written = ("vgg16.json", "lstm_ptb.json")
    places = {name: str(tmp_path / name) for name in written}
    words = [places.get(word, word) for word in shlex.split(command)]
    monkeypatch.setattr(sys, "argv", words[1:])
    if words[0] == "spardl":
        code = run(front, words[1:], "spardl")
    elif words[1] == "scripts/reproduce.py":
        code = reproduce.main()
    else:
        code = subprocess.run([sys.executable, *words[1:]], timeout=280, check=False).returncode
    assert code == 0, capfd.readouterr().err
