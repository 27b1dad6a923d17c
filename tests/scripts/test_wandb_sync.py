"""Sending runs to W&B that were logged offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import wandb_sync

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return wandb_sync


def logged(folder: Path, sent: bool = False) -> Path:
    run = folder / "wandb" / "offline-run-20260101_000000-abc"
    run.mkdir(parents=True)
    (run / "run-abc.wandb").write_bytes(b"")
    if sent:
        (run / "run-abc.wandb.synced").write_bytes(b"")
    return run


class Program:
    """Stands in for W&B's: marks what it sends, but for runs in folders named ``bad`` and ``silent``."""

    def __init__(self) -> None:
        self.sent: list[Path] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "wandb", "sync"]
        run = Path(command[-1])
        if run.parent.parent.name == "silent":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        self.sent.append(run)
        if run.parent.parent.name == "bad":
            return subprocess.CompletedProcess(command, 0, "found 1 file\n", "no such project\n\n")
        (run / "run-abc.wandb.synced").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "done\n", "")


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["wandb_sync.py", *words])
    code: int = script.main()
    return code


def test_each_run_is_sent_once(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    program = Program()
    monkeypatch.setattr(subprocess, "run", program)
    new, _ = logged(tmp_path / "new"), logged(tmp_path / "old", sent=True)
    assert call(script, monkeypatch, str(tmp_path), str(tmp_path / "new")) == 0
    assert program.sent == [new]
    assert capsys.readouterr().out == f"[1/1] {new}: sent\n"
    assert call(script, monkeypatch, str(tmp_path)) == 0
    assert program.sent == [new]
    assert capsys.readouterr().out == "\n0 runs to send\n".lstrip()


def test_what_fails_is_told_and_the_rest_is_sent(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(subprocess, "run", Program())
    for name in ("bad", "good", "silent"):
        logged(tmp_path / name)
    assert call(script, monkeypatch, str(tmp_path), "--timeout=5") == 1
    bad, good, silent = capsys.readouterr().out.splitlines()
    assert bad.endswith(": failed: no such project")
    assert good.endswith(": sent")
    assert silent.endswith(": failed: no answer within 5 s (--timeout)")


def test_a_dry_run_sends_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.delenv("WANDB_API_KEY")
    run = logged(tmp_path / "new")
    assert call(script, monkeypatch, str(tmp_path), "--dry-run") == 0
    assert capsys.readouterr().out == f"{run}\n1 runs to send\n"


def test_what_is_missing_is_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    assert call(script, monkeypatch, str(tmp_path / "nowhere")) == 2
    assert capsys.readouterr().err.startswith(f"error: folder {tmp_path / 'nowhere'} does not exist; ")
    logged(tmp_path / "new")
    monkeypatch.setattr(script, "logged_in", lambda: False)
    assert call(script, monkeypatch, str(tmp_path)) == 2
    assert capsys.readouterr().err == "error: not logged in to W&B; run wandb login, or set WANDB_API_KEY\n"
