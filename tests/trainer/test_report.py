"""The report of a run, and its environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import report
from trainer.report import print_report, rows
from trainer.runs import Run

SUMMARY: dict[str, Any] = {
    "metric": "accuracy",
    "final": {"loss": 0.25, "accuracy": 0.9},
    "best": 0.95,
    "wall_seconds": 12.34,
    "cluster_seconds": 3.21,
    "evaluation_seconds": 0.5,
    "step_seconds": {"compute": 0.02, "pack": 0.0, "communicate": 1.5},
    "step_seconds_beside": {"compute": 0.0, "communicate": 0.0},
    "step_bytes": 12_345.0,
    "step_bytes_dense": 1_234_500.0,
    "step_rounds": 4.0,
    "density": 0.0123,
    "parameters": 269_434,
    "replica_checks": 7,
    "samples_per_second": 1234.5,
    "break_even_gbit": 1.234,
    "peak_memory_bytes": 2.5e9,
}


def test_report_rows() -> None:
    found = dict(rows(SUMMARY, simulated=False))
    assert found["accuracy"] == "0.9 (best 0.95)"
    assert found["wall time"] == "12.3 s, evaluation 500 ms"
    assert found["samples per second"] == "1234 of all workers"
    assert found["step time"] == "1.5 s: compute 20 ms, communicate 1.5 s"
    assert "overlapped time" not in found
    overlapped = {**SUMMARY, "step_seconds_beside": {"select": 0.5, "communicate": 1.5}}
    assert dict(rows(overlapped, simulated=False))["overlapped time"] == "2.0 s: select 500 ms, communicate 1.5 s"
    assert found["sent per worker and step"] == "12.3 kB in 4 rounds; dense 1.23 MB (1.00% of dense)"
    assert found["entries of the average"] == "1.230% of 269,434"
    assert found["break-even bandwidth"] == "saves time on networks slower than 1.23 Gbit/s per worker"
    assert found["peak memory"] == "2.5 GB in the largest process"


def test_the_virtual_clock_and_one_worker() -> None:
    alone = {**SUMMARY, "step_bytes": 0.0, "step_bytes_dense": 0.0, "break_even_gbit": None, "samples_per_second": None}
    found = dict(rows(alone, simulated=True))
    assert found["wall time"] == "12.3 s, evaluation 500 ms, 3.2 s on the virtual clock"
    assert found["sent per worker and step"] == "0 B in 4 rounds; dense 0 B"
    assert found["break-even bandwidth"] == "none: no bytes are saved"
    assert found["samples per second"].startswith("too few steps")
    assert dict(rows(SUMMARY, simulated=True))["samples per second"] == "1234 of all workers, on the virtual clock"


def test_lines_are_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(SUMMARY, Run("abc", Path("outputs/x")), simulated=True, caveats=["invented data"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "run abc" in out
    assert "12.3 kB in 4 rounds; dense 1.23 MB (1.00% of dense)" in out
    assert out.endswith("beware: invented data\nresults: outputs/x\n")


def test_records_of_other_jobs_are_no_changes_of_the_code(tmp_path: Path) -> None:
    """A plan of many jobs adds records to the clone in which it runs."""

    def git(*words: str) -> str:
        settings = ("-c", "user.name=tester", "-c", "user.email=tester@example.com")
        return subprocess.run(
            ["git", *settings, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert report._commit(tmp_path) is None
    records, code = tmp_path / "docs" / "results" / "laptop.jsonl", tmp_path / "trainer" / "code.py"
    for path in (records, code):
        path.parent.mkdir(parents=True)
        path.write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()[:12]
    records.write_text("{}\n")
    assert report._commit(code.parent) == commit
    code.write_text("pass\n")
    assert report._commit(code.parent) == f"{commit}-dirty"


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.environment()["torch"] == torch.__version__
    assert report.environment()["cpu"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")

    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert report.environment()["commit"] is None
