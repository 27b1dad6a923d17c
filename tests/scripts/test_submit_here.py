"""Sweeps of scripts/submit.py on this machine, in the foreground: failures, Ctrl-C, cancel, kill -9."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.submission import here as places
from scripts.submission.site import Queued
from scripts.submission.submissions import Entry, Submission, find_submission, new_submission, submitting
from spardl.basics.errors import ConfigError
from tests.support.labs import processes_with
from tests.support.slurms import ROOT, SMALL, table
from trainer.runs import new_run


@contextmanager
def here(*words: str, outputs: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A sweep in the foreground, of which nothing is left in the end."""
    command = [sys.executable, "scripts/submit.py", *words, *SMALL, "cluster=local", f"output_dir={outputs}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            for pid in processes_with(str(outputs)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def later(*words: str, outputs: Path) -> str:
    command = [sys.executable, "scripts/submit.py", *words, "--outputs", str(outputs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.mark.slow
def test_a_sweep_here_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ("-m", "optimizer.lr=1e30,0.01,0.02", "compressor=none", "training.max_steps=3", "cluster.workers=1")
    with here(*words, "site.at_once=2", outputs=tmp_path) as process:
        out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (1, "")
    assert re.search(r"^\[1/3\] \w{10}  optimizer.lr=1e\+30: failed: the loss is nan", out, flags=re.MULTILINE)
    started = [match.start() for match in re.finditer(": started", out)]
    ended = [match.start() for match in re.finditer(": (failed|finished): ", out)]
    assert len(started) == len(ended) == 3
    assert started[1] < ended[0] < started[2]
    assert [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["failed", "finished", "finished"]
    assert "error: the loss is nan" in later("logs", outputs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminal", "cancel"])
def test_the_end_of_a_sweep_here_saves_what_runs(how: str, tmp_path: Path) -> None:
    words = ("-m", "seed=1,2,3", "training.max_steps=100000", "training.epochs=100000", "cluster.workers=2")
    with here(*words, "site.at_once=1", outputs=tmp_path, start_new_session=True) as process:
        _until(lambda: any(path.read_text().count("\n") > 3 for path in tmp_path.glob("*/metrics.jsonl")))
        rows = table(later("status", outputs=tmp_path))
        assert [row[0] for row in rows.values()] == ["running", "queued", "queued"]
        if how == "terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            assert later("cancel", outputs=tmp_path) == "cancelled: 3 of 3 runs\n"
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err == "stopping: runs save a checkpoint and exit; press Ctrl-C again to end them immediately\n"
    assert ": stopped: stopped at step " in out
    rows = table(later("status", outputs=tmp_path))
    assert [row[0] for row in rows.values()] == ["stopped", "not begun", "not begun"]
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert list(folder.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_a_run_outlives_a_killed_foreground_and_can_be_cancelled(tmp_path: Path) -> None:
    words = ("training.max_steps=100000", "training.epochs=100000", "cluster.workers=1")
    with here(*words, outputs=tmp_path) as process:
        _until(lambda: any(path.read_text().count("\n") > 3 for path in tmp_path.glob("*/metrics.jsonl")))
        process.kill()
        process.wait(60)
        assert [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["running"]
        assert later("cancel", outputs=tmp_path) == "cancelled: 1 of 1 runs\n"
        _until(lambda: [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["stopped"])


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A train.py that starts a child and sleeps; what is left of it is killed in the end."""
    path = tmp_path / "sleeper.py"
    path.write_text("import os, time\nos.fork()\ntime.sleep(600)\n")
    monkeypatch.setattr(places, "TRAIN", path)
    yield path
    for pid in processes_with(str(path)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _submission(outputs: Path, *ids: str, force: bool = False) -> Submission:
    entries = [Entry((f"seed={identity}",), identity, 1) for identity in ids]
    return new_submission(outputs, "here", force, {"at_once": 1}, entries)


def _killed_after_the_start(made: Submission, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Submits, and stops where a kill -9 is worst: the run exists, and nobody has noted its process id."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> None:
        begun.append(subprocess.Popen(*arguments, **options))
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(places, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
        places.Here().submit(made)
    return begun[0]


@pytest.mark.parametrize("leader", ["alive", "killed"])
def test_cancel_finds_the_run_of_a_killed_submit(
    leader: str, sleeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _killed_after_the_start(_submission(tmp_path, "0123456789"), monkeypatch)
    here, made = places.Here(), find_submission(tmp_path, None)
    _until(lambda: len(processes_with(str(sleeper))) == 2)
    assert here.queue(made) == {"1": Queued.RUNNING}
    if leader == "killed":
        process.kill()
        process.wait(60)
        assert here.queue(made) == {"1": Queued.RUNNING}
    here.cancel(made, ["1"])
    if leader == "killed":
        _until(lambda: here.queue(made) == {})
    else:
        assert process.wait(60) == -signal.SIGTERM  # train.py itself ends its workers


@pytest.mark.parametrize("force", [False, True])
def test_two_submissions_train_a_run_once(
    force: bool, sleeper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper.write_text(f"import sys\nopen({str(tmp_path / 'trained')!r}, 'a').write(sys.argv[1] + ' ')\n")
    made = _submission(tmp_path, "a1", "b2", force=force)
    lock = os.open(made.run_lock(made.entries[0]), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run, claim = new_run(tmp_path, "x", "b2")
    os.close(claim)
    run.write_summary({"status": "finished", "metric": "loss", "final": {"loss": 0.5}})
    assert places.Here().submit(made) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\[1/2\] a1  seed=a1: skipped: another submission is running it$", out, re.MULTILINE)
    assert re.search(r"^\[2/2\] b2  seed=b2: skipped: another submission has finished it$", out, re.MULTILINE)
    assert not (tmp_path / "trained").exists()
    assert places.Here().queue(find_submission(tmp_path, None)) == {"1": Queued.RUNNING}
    os.close(lock)
    places.Here().submit(made)
    assert (tmp_path / "trained").read_text() == "seed=a1 "


def test_one_process_submits_at_a_time(tmp_path: Path) -> None:
    with submitting(tmp_path), pytest.raises(ConfigError, match="has been submitting runs"), submitting(tmp_path, 0.2):
        pass
    with submitting(tmp_path):
        pass


def _until(holds: Callable[[], Any], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.1)
