"""Links resolve, commands run, and code works, on all pages of the documentation."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import report
from spardl.clusters import ProcessGroupCluster
from spardl.method import registry
from tests.project.test_add_a_method import files_of_the_page
from tests.support.driver import here
from tests.support.harness import published_methods, published_parts, run_workers
from trainer.build import stand_ins

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command of the docs that trains, without the set-up before it and the remark behind it."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    found = [line.split("#")[0].split("&&")[-1].strip() for line in lines if "train.py" in line and "=mine" not in line]
    return sorted({command.replace(".venv/bin/", "") for command in found})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that code hosts give to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_begins_with_the_two_commands() -> None:
    job, tests = (block.strip() for block in blocks(ROOT / "README.md", "sh")[:2])
    assert job.endswith(".venv/bin/python train.py")
    assert tests.endswith(".venv/bin/python -m pytest -n 2")
    assert job.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert tests.startswith("python3 -m venv .venv && .venv/bin/pip install")


def test_every_choice_in_the_table_exists() -> None:
    """And every one that is published is there."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    published = {"compressor": published_methods(), "communicator": published_parts(registry.communicators())}
    for group in ("compressor", "communicator", "residual", "schedule", "dataset", "cluster", "logger"):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{group}`"))
        named = set(re.findall(r"`([a-z0-9_]+)`", row.split("|")[2]))
        choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        choices |= set(stand_ins()) if group == "dataset" else set()
        assert published.get(group, choices) <= named <= choices


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def train(words: list[str]) -> int:
    """Runs a command that trains: train.py in this process, torchrun in others."""
    if words[:2] == ["python", "train.py"]:
        return here(*words[2:])
    assert words[0] == "torchrun"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", *words[1:]]
    return subprocess.run(start, cwd=ROOT, timeout=280, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if "--help" not in words:
        # Real data are not available everywhere, and published experiments are large.
        words += ["scale.stand_in=true", *(["scale=smoke"] if "experiment=" in command and "/" in command else [])]
        words += ["training.max_steps=1", "training.eval_examples=8", "logger=none", f"output_dir={tmp_path}"]
        # Any list makes a sweep; of seeds, two do as three.
        seeds = "seed=1" if "compressor=spardl,oktopk" in command else "seed=1,2"
        words = [word.replace("seed=1,2,3", seeds) for word in words]
    if "outputs/RUN/" in command:  # the run before it, long enough to have chosen its groups
        before = [word for word in words if "outputs/RUN/" not in word]
        assert train([*before, "training.max_steps=10"]) == 0
        (run,) = tmp_path.iterdir()
        words = [word.replace("outputs/RUN", str(run)) for word in words]
    code, output = train(words), capfd.readouterr()
    assert code == 0, output.err
    if "--help" not in words:
        summaries = list(tmp_path.glob("*/summary.json"))
        assert summaries
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, tmp_path.iterdir())])
        assert report.main() == 0
        assert len(capfd.readouterr().out.splitlines()) >= 3


def _own_loop(cluster: ProcessGroupCluster) -> list[torch.Tensor]:
    """Runs the loop that has every step in its hands, and returns the weights it ends with."""
    (code,) = (each for each in blocks(ROOT / "docs" / "training-loop.md", "python") if "schedule.start" in each)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_function": nn.MSELoss(),
        "batches": [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(5 + cluster.local_ranks[0])][:5],
    }
    exec(code, names)
    assert names["gradient"].vector.numel() == 10
    return [parameter.detach() for parameter in model.parameters()]


def test_the_loop_trains_equal_replicas() -> None:
    one, other = run_workers(2, _own_loop)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    torch.manual_seed(0)
    assert not torch.equal(one[0], nn.Linear(4, 2).weight)


def _two_lines(cluster: ProcessGroupCluster) -> tuple[torch.Tensor, int]:
    (code,) = blocks(ROOT / "README.md", "python")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 20))
    names = {"ddp_model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(code, names)
    generator = torch.Generator().manual_seed(cluster.local_ranks[0])
    names["ddp_model"](torch.randn(3, 40, generator=generator)).square().mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in names["ddp_model"].parameters()])
    return gradient, names["handle"].stats().steps


def test_the_readme_s_two_lines() -> None:
    (one, steps), (other, _) = run_workers(2, _two_lines)
    assert torch.equal(one, other)
    # Of 820 entries, two workers send 3% each.
    assert 0 < int((one != 0).sum()) < 50
    assert steps == 1


def test_the_architecture_names_files_that_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:spardl|tests|conf|scripts|docs|tasks)/[\w./]+)`", page.read_text()):
            if "mine" not in name and name not in files_of_the_page():
                preset = ROOT / "conf" / "experiment" / f"{name}.yaml"
                assert (ROOT / name).exists() or preset.exists(), (page.name, name)
