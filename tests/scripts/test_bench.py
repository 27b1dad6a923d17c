"""scripts/bench.py: the one front of all benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench

SCRIPTS = Path(bench.__file__).parent


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    return bench.main()


def test_the_list_has_every_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert called(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem[6:] for path in SCRIPTS.glob("bench_*.py"))
    assert all(len(line.split()) > 4 for line in lines)


def test_a_benchmark_gets_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    found = tmp_path / "merge.json"
    words = ("--entries=1000", "--density=0.1", "--counts=2", "--repetitions=1", f"--json={found}")
    assert called(monkeypatch, "merge", *words) == 0
    assert found.is_file()
    assert "coalesce" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert called(monkeypatch, "mergee") == 2
    words = capsys.readouterr().err
    assert words.startswith("error: benchmark 'mergee' does not exist; choose from accuracy, ")
    assert words.count("\n") == 1


def test_the_help_of_a_benchmark_is_its_own(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, "merge", "--help")
    assert ended.value.code == 0
    assert "--counts" in capsys.readouterr().out
