"""Sweeps of scripts/submit.py on this machine, in the foreground: failures, Ctrl-C, cancel, kill -9."""

from __future__ import annotations

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
from typing import Any

import pytest

from tests.labs import processes_with
from tests.slurms import ROOT, SMALL, table


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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_a_sweep_here_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ("-m", "optimizer.lr=1e30,0.01,0.02", "compressor=none", "training.max_steps=3", "cluster.workers=1")
    with here(*words, "site.at_once=2", outputs=tmp_path) as process:
        out, err = process.communicate(timeout=120)
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
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "stopping: runs save a checkpoint and leave; Ctrl-C again ends them at once\n"
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
        process.wait(10)
        assert [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["running"]
        assert later("cancel", outputs=tmp_path) == "cancelled: 1 of 1 runs\n"
        _until(lambda: [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["stopped"])


def _until(holds: Callable[[], Any], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.1)
