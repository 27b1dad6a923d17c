"""Sending runs to W&B that were logged offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import wandb_sync
from tests.support.driver import events, here, only_run, summary
from tests.trainer.test_loggers import wandb_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def logged(folder: Path, sent: bool = False) -> Path:
    run = folder / "wandb" / "offline-run-20260101_000000-abc"
    run.mkdir(parents=True)
    (run / "run-abc.wandb").write_bytes(b"")
    if sent:
        (run / "run-abc.wandb.synced").write_bytes(b"")
    return run


class Sending:
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


def test_each_run_is_sent_once(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sending = Sending()
    monkeypatch.setattr(subprocess, "run", sending)
    new, _ = logged(tmp_path / "new"), logged(tmp_path / "old", sent=True)
    assert program("wandb_sync", tmp_path, tmp_path / "new") == (0, f"[1/1] {new}: sent\n", "")
    assert program("wandb_sync", tmp_path) == (0, "0 runs to send\n", "")
    assert sending.sent == [new]


def test_what_fails_is_told_and_the_rest_is_sent(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", Sending())
    for name in ("bad", "good", "silent"):
        logged(tmp_path / name)
    done = program("wandb_sync", tmp_path, "--timeout=5")
    assert done.code == 1
    bad, good, silent = done.out.splitlines()
    assert bad.endswith(": failed: no such project")
    assert good.endswith(": sent")
    assert silent.endswith(": failed: no answer within 5 s (--timeout)")


def test_a_dry_run_sends_nothing(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.delenv("WANDB_API_KEY")
    run = logged(tmp_path / "new")
    assert program("wandb_sync", tmp_path, "--dry-run") == (0, f"{run}\n1 runs to send\n", "")


def test_a_lost_run_is_rebuilt(tmp_path: Path) -> None:
    words = ("cluster=simulated", "cluster.workers=2", "training.max_steps=3", "training.eval_examples=8")
    assert here(*words, f"output_dir={tmp_path / 'out'}") == 0
    folder = only_run(tmp_path / "out")
    trained = summary(folder)
    trained["environment"]["commit"] = "0" * 40
    (folder / "summary.json").write_text(json.dumps(trained))
    done = rebuild(folder)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert done.stdout == f"{folder}: rebuilt in {file.parent}\n"
    # W&B joins what has the same step.
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    runs = [record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run"]
    assert [run.git.commit for run in runs] == ["0" * 40]
    wanted = events(folder)
    for kind in ("train", "eval"):
        found = [(row["step"], row[f"{kind}/loss"]) for row in rows if f"{kind}/loss" in row]
        assert found == [(event["step"], event["loss"]) for event in wanted if event["kind"] == kind]
    times = {event["step"]: event["time"] for event in wanted}
    assert {row["step"]: row["_timestamp"] for row in rows} == {step: pytest.approx(at) for step, at in times.items()}


def test_what_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    done = rebuild(tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: no metrics.jsonl in {tmp_path}; give run folders or folders of them\n"
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done = rebuild(tmp_path)
    assert (done.returncode, done.stdout) == (1, f"{tmp_path}: failed: 'id'\n")


def rebuild(folder: Path) -> subprocess.CompletedProcess[str]:
    """In a separate process: W&B's service outlives a run."""
    command = [sys.executable, "scripts/wandb_sync.py", str(folder), "--rebuild"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_sweep_file_starts_a_run(tmp_path: Path) -> None:
    """As W&B's agent does: with one value of each parameter, and its own id."""
    sweep = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())
    chosen = {"compressor": "topka", "optimizer.lr": 0.05, "training.epochs": 5}
    assert set(chosen) == set(sweep["parameters"])
    assert chosen["compressor"] in sweep["parameters"]["compressor"]["values"]
    settings = [f"{name}={value}" for name, value in chosen.items()]
    parts = {"${env}": [], "${program}": [sweep["program"]], "${args_no_hyphens}": settings, "python": [sys.executable]}
    typed = [word for part in sweep["command"] for word in parts[part]]
    more = ["cluster=simulated", "training.max_steps=2", "logger.mode=offline", f"output_dir={tmp_path}"]
    environment = {**os.environ, "WANDB_RUN_ID": "chosen", "WANDB_SWEEP_ID": "swept"}
    done = subprocess.run(
        [*typed, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    (file,) = folder.glob("wandb/offline-run-*-chosen/*.wandb")
    rows = [record for record in wandb_records(file) if record.WhichOneof("record_type") == "history"]
    names = {".".join(item.nested_key) or item.key for row in rows for item in row.history.item}
    assert sweep["metric"]["name"] in names


def test_what_is_missing_is_said(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = program("wandb_sync", tmp_path / "nowhere")
    assert done.code == 2
    assert done.err.startswith(f"error: folder {tmp_path / 'nowhere'} does not exist; ")
    logged(tmp_path / "new")
    monkeypatch.setattr(wandb_sync, "logged_in", lambda: False)
    reason = "error: not logged in to W&B; run wandb login, or set WANDB_API_KEY\n"
    assert program("wandb_sync", tmp_path) == (2, "", reason)
