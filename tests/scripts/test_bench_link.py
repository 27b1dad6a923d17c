"""What the links between workers carry, measured by a script: its figures cannot be below what physics allows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_link
from scripts.labs.first_process import tool
from tests.support.labs import ROOT, in_a_lab, lab

SHORTLY = ("--mb", "1", "--rounds", "2", "--short-rounds", "3")


def commands() -> list[str]:
    """Those of the page about slow networks that this script or the lab are in, as typed."""
    text = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if "scripts/bench_link.py" in line and line.startswith(("p", "t"))]


@in_a_lab
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
def test_a_lab_with_a_delay(tmp_path: Path) -> None:
    """A round takes gloo two ways: the receiver says that it is ready, then it is sent to."""
    file = tmp_path / "link.json"
    words = ["run", "--workers", "3", "--gbit", "1", "--delay-ms", "2", "--timeout", "60", "--", sys.executable]
    done = lab(*words, "-W", "ignore", "scripts/bench_link.py", *SHORTLY, "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["workers"], found["bytes"]) == (3, 1_000_000)
    assert {name: len(times) for name, times in found["seconds"].items()} == {
        "round_trip": 3,
        "short_round": 3,
        "long_round": 2,
    }
    assert min(found["seconds"]["round_trip"]) >= 4e-3
    assert min(found["seconds"]["short_round"]) >= 2e-3
    # 128 KiB may go at once.
    assert min(found["seconds"]["long_round"]) >= (found["bytes"] - 131072) * 8e-9 + 2e-3
    assert "| round trip |" in done.stdout


def program(*words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*start, "--nproc-per-node", "2", "scripts/bench_link.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_throttle_without_a_lab(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    done = program(*SHORTLY, "--throttle", "ethernet_1g", "--json", str(file))
    assert done.returncode == 0, done.stderr
    seconds = json.loads(file.read_text())["seconds"]
    assert min(seconds["short_round"]) >= 50e-6 + 8 * 8e-9
    assert min(seconds["long_round"]) >= 50e-6 + 1e6 * 8e-9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "start this with scripts/netlab.py run or torchrun"),
        ("--mb 0", "--mb, --rounds and --short-rounds must be above 0"),
        ("--rounds 0", "--mb, --rounds and --short-rounds must be above 0"),
        ("--throttle x", "--throttle=x is not a network; use ethernet_1g"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_link.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@in_a_lab
@pytest.mark.slow
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_run(command: str) -> None:
    words = [*shlex.split(command), *SHORTLY]
    words = [sys.executable if word == "python" else word for word in words]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "| long round |" in done.stdout
