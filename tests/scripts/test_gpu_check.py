"""The program that checks and measures a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_KERNELS", "portable")


def test_selections_are_exact_and_measured_by_type() -> None:
    rows = gpu_check.select(torch.device("cpu"), 1000, turns=1)
    assert [(row["entries"], row["dtype"]) for row in rows] == [(1000, "float32"), (1000, "bfloat16")]
    assert all(row["exact"] and min(row["select"], row["topk"], row["copy"]) > 0 for row in rows)


def test_reads_count_as_waits_without_a_gpu() -> None:
    values = torch.ones(3)
    counts = gpu_check.counted(torch.device("cpu"), lambda: (values.sum().item(), values.max().item()))
    assert counts == {"launches": None, "waits": 2}


def test_a_gpu_is_judged_and_a_rehearsal_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"entries": 9, "dtype": "float32", "exact": True, "select": 3.0, "topk": 4.0, "copy": 1.0}
    for device in ("cuda", "cpu"):
        gpu_check.report_selection(gpu_check.judge_on(device), [row, {**row, "topk": 2.0}, {**row, "copy": 0.5}])
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["ok", "slow", "slow", "tried", "tried", "tried"]


def test_a_missing_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "error: --device cuda found no GPU; rehearse with --device cpu\n"


@pytest.mark.slow
def test_every_measurement_is_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All sections but the checks of the doctor, which has its own tests."""
    file = tmp_path / "found.json"
    words = ["--device", "cpu", "--entries", "1000", "--turns", "1", "--small", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--sections", "selection", "synchronization", "training"])
    assert gpu_check.main() == 0
    results = json.loads(file.read_text())["results"]
    over = [f"synchronization, {workers} over gloo on cpu" for workers in ("1 worker", "2 workers")]
    assert list(results) == ["selection", *over, "training"]
    for section in over:
        assert [row["method"] for row in results[section]] == list(gpu_check.METHODS)
    assert all(row["bytes"] > 0 for row in results[over[1]])
    assert [row["way"] for row in results["training"]] == list(gpu_check.WAYS)
    rows = [row for found in results.values() for row in found]
    assert capfd.readouterr().out.count("tried ") == len(rows)
