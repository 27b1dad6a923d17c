"""The bench of overlap: what it trains, what it counts on, what it prints."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks import emulated
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.measure import measure
from spardl.vector.flat import FlatGradient
from tests.support.labs import lab
from tests.support.measuring import undisturbed

ROOT = Path(__file__).resolve().parents[2]
# The second layer is used last, though it is registered before the third.
LAYERS = (
    LayerTimes("a", 4000, 0.0, 0.012),
    LayerTimes("b", 7000, 0.008, 0.003),
    LayerTimes("c", 5000, 0.004, 0.009),
)
PROFILE = Profile("three", "none", 1, LAYERS, forward=0.012, backward=0.012, update=0.0)


def test_sleeping_model_matches_its_profile(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "three.json")
    job = emulated.from_profile(str(tmp_path / "three.json"), Namespace(compute=0.048))
    gradient = FlatGradient(job.model.named_parameters())
    assert [layer.entries for layer in gradient.layers] == [4000, 5000, 7000]
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    found = measure(
        job.model, lambda: job.loss(job.model, job.data), optimizer, name="three", batch=1, passes=2, warmup=0
    )
    # Nobody wakes up too early.
    expected = sorted(PROFILE.scaled(0.048).layers, key=lambda layer: layer.needed)
    for ours, theirs in zip(found.layers, expected, strict=True):
        assert ours.needed >= theirs.needed - 1e-4
        assert ours.ready >= theirs.ready - 1e-4
    assert found.compute >= 0.048


@pytest.mark.netlab
@pytest.mark.timeout(700)
def test_schedules_on_a_shaped_network(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "three.json")
    start = ["run", "--workers", "2", "--gbit", "0.1", "--", sys.executable, "scripts/bench_overlap.py"]
    words = ["--gbit", "0.1", "--model", f"profile:{tmp_path / 'three.json'}", "--methods", "none,spardl"]
    words += ["--rounds", "2", "--steps", "1", "--streams", "1,2", "--json", str(tmp_path / "o.json")]
    words += ["--schedules", "after_backward,wfbp:bucket_mb=0,layer_fusion,dear:layers=1"]

    def measured() -> list[dict[str, Any]]:
        done = lab(*start, *words, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n| none | ") == 8
        rows: list[dict[str, Any]] = json.loads((tmp_path / "o.json").read_text())
        return rows

    def holds(rows: list[dict[str, Any]]) -> bool:
        """Sleeping is a lower bound, and so is the ideal at the bandwidth that was measured just before."""
        return all(min(row["seconds"]) >= max(0.024, 0.9 * row["ideal"]) for row in rows)

    found = undisturbed(measured, holds)
    alone, several = found[::2], found[1::2]
    assert [(row["method"], row["schedule"].partition(":")[0], row["groups"]) for row in alone[:2] + alone[3:4]] == [
        ("none", "after_backward", 1),
        ("none", "wfbp", 3),
        ("none", "dear", 3),
    ]
    assert [(row["method"], row["schedule"]) for row in several] == [(row["method"], row["schedule"]) for row in alone]
    assert [len(alone), len(several)] == [8, 8]
    # A prediction is made for one stream only.
    assert all(row["streams"] == 1 and row["predicted"] > 0 for row in alone)
    assert all(row["streams"] == 2 and row["predicted"] is None for row in several)
    assert all(len(row["seconds"]) == 2 for row in found)


def commands() -> list[str]:
    """Those of the page, as typed."""
    text = (ROOT / "docs" / "schedules.md").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("python scripts/netlab.py")]


@pytest.mark.netlab
@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_run(command: str) -> None:
    words = [sys.executable, *shlex.split(command)[1:], "--rounds", "1", "--steps", "1", "--compute", "0.05"]
    words[words.index("python")] = sys.executable
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "| predicted | off |" in done.stdout


@pytest.mark.slow
def test_alone_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "scripts/bench_overlap.py", "--gbit", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr == ("error: no RANK in the environment; start this with scripts/netlab.py run or torchrun\n")
