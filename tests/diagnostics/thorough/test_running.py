"""One command, a process for each check: what breaks, hangs or is killed stops no other."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spardl.clusters.workers.processes import exit_now
from spardl.diagnostics.thorough import running
from spardl.diagnostics.thorough.outcome import Place, ok, plain
from spardl.diagnostics.thorough.running import Check, all_checks
from tests.diagnostics.doctor.common import Doctor, lines


def _never(place: Place) -> Any:
    raise AssertionError("checks run in processes of their own")


INSTALLED, UNKNOWN = Check("installation", 60, _never), Check("no such check", 60, _never)


@pytest.mark.slow
def test_crashed_check_does_not_stop_the_others(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "all_checks", lambda: (UNKNOWN, INSTALLED))
    file = tmp_path / "gpu.json"
    code = doctor("--thorough", "--device", "cpu", "--json", str(file))
    said = capsys.readouterr().out
    assert code == 1
    (broken,) = lines(said, "FAILED")
    assert broken.startswith("no such check: ended with exit code 1: StopIteration; report it with the file of --json")
    (device,) = lines(said, "warning")
    assert device.startswith("device: no GPU is found or requested, so the checks run on the CPU")
    assert lines(said, "ok")[0].startswith("installation: python ")
    found = json.loads(file.read_text())
    assert (found["format"], found["device"], found["well"], found["interpreted"]) == (1, "cpu", False, True)
    assert [row["verdict"] for row in found["checks"]] == ["FAILED", "ok"]
    assert all(row["seconds"] > 0 for row in found["checks"])
    assert found["checks"][1]["figures"]["torch"]


def _rows(monkeypatch: pytest.MonkeyPatch, *checks: Check, answer: Any = None) -> list[str]:
    """The names of the checks that were begun."""
    begun = []

    def run(self: Any, check: Check, seconds: float) -> dict[str, Any]:
        begun.append(check.name)
        reported = ok("well", {})
        return answer or {"verdict": reported.verdict.value, "text": reported.text, "figures": {}}

    monkeypatch.setattr(running._Program, "run", run)
    monkeypatch.setattr(running, "all_checks", lambda: checks)
    return begun


def test_checks_beyond_the_budget_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, looks = _rows(monkeypatch, INSTALLED, UNKNOWN), itertools.count()
    # Each look at the clock takes a second: the first check begins after two of them, and the second after four more.
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    monkeypatch.setattr(running, "_BUDGET", running._TOO_FEW + 3)
    assert running.examine_thoroughly("cuda", "cuda", 30, None)
    assert begun == ["installation"]
    (left_out,) = lines(capsys.readouterr().out, "warning")
    assert left_out.startswith("no such check: skipped, because the other checks took all the time")


def test_the_exit_code_is_that_of_the_verdicts(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    for verdict, code in (("ok", 0), ("warning", 0), ("FAILED", 1)):
        _rows(monkeypatch, INSTALLED, answer={"verdict": verdict, "text": "x", "figures": {}})
        assert doctor("--thorough", "--device", "cpu") == code


def test_all_checks_together_end_in_time() -> None:
    """Those that have to be there first: how well it works is worth less than whether it does."""
    checks = all_checks()
    assert running._BUDGET < 600
    assert len({check.name for check in checks}) == len(checks)
    assert checks[0].name == "installation"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_check_that_hangs_is_ended_with_its_workers(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as stream:
        assert running._run_program([sys.executable, "-S", "-c", PARENT], dict(os.environ), stream, 4.0) is None
    child = int((tmp_path / "said").read_text())
    until = time.monotonic() + 40
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(child)
    text = running._without_result(INSTALLED, None, 2, "one\ntwo\n")["text"]
    assert text.startswith("installation: not finished after 2 s: two; stop other programs on this device")


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_killed_check_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    with (tmp_path / "said").open("wb") as stream:
        code = running._run_program(command, dict(os.environ), stream, 30.0)
    text = running._without_result(INSTALLED, code, 30, "")["text"]
    assert text.startswith("installation: killed by SIGSEGV: no output; report it with the file")


def test_non_finite_numbers_become_text() -> None:
    assert plain({1: [float("nan"), 2.0], "x": (float("inf"), None)}) == {"1": ["nan", 2.0], "x": ["inf", None]}


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ("--json x.json", {}, "--json needs --thorough; add --thorough, or remove --json"),
        ("--thorough --workers 4", {}, "--workers has no effect with --thorough"),
        ("--thorough --out x.yaml", {}, "--out has no effect with --thorough"),
        ("--thorough --interface lo", {}, "--interface has no effect with --thorough"),
        ("--thorough --timeout 0", {}, "--timeout must be from 1 to 3600 seconds, got 0"),
        ("--thorough --json .", {}, "--json . must be a file in an existing folder"),
        (
            "--thorough",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "run it once, without torchrun or srun",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: str,
    environment: dict[str, str],
    said: str,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert doctor(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


RUN_PROGRAM = running._run_program


def _run_forked(command: Sequence[str], environment: dict[str, str], stream: Any, seconds: float) -> int | None:
    """Runs a check in a process that is forked from this one, which has everything imported."""
    name = command[3]
    # Triton's interpreter must be enabled before the import, and torch's profiler may have run in this process.
    if name.startswith(("kernels", "waits")):
        return RUN_PROGRAM(command, environment, stream, seconds)
    pid = os.fork()
    if pid == 0:
        try:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
            os.environ.update(environment)
            sys.argv = ["", *command[3:]]
            runpy.run_module(command[2], run_name="__main__")
        finally:
            exit_now(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_all_checks_on_this_machine(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "_run_program", _run_forked)
    # The speed of a selection among more entries is of interest on GPUs only.
    monkeypatch.setattr(running, "_RESNET", 100_000)
    monkeypatch.setattr(running, "_BERT", 1_000_000)
    file = tmp_path / "gpu.json"
    assert doctor("--thorough", "--device", "cuda", "--json", str(file)) == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["well"]
    assert found["seconds"] < 600
    assert [row["name"] for row in found["checks"]] == [check.name for check in all_checks()]
