"""What is compiled beforehand is all that a sparse synchronization calls."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spardl.clusters import Network, SimulatedCluster
from spardl.clusters import precompile as precompiling
from spardl.clusters.precompile import precompile
from spardl.vector import kernels
from spardl.vector.layout import Layout
from tests.support.harness import spardl, topka
from tests.support.labs import ROOT

KERNELS = {
    "selection": ["add_and_list", "collect", "largest", "list_of"],
    "entries": ["add", "add_all", "add_two", "cut", "put", "put_others"],
    "codec": ["decode", "write"],
}


def compiled() -> dict[str, int]:
    """How many types each kernel has been compiled for in this process."""
    found: dict[str, int] = {}
    for module, names in KERNELS.items():
        functions: Any = importlib.import_module(f"spardl.vector.kernels.{module}")
        found.update({f"{module}.{name}": len(getattr(functions, name).signatures) for name in names})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_is_left_to_compile(dtype: torch.dtype) -> None:
    precompile(dtype)
    before = compiled()
    assert all(count > 0 for count in before.values())
    for method in (spardl(0.01), spardl(0.01, teams=2), topka(0.01)):
        cluster = SimulatedCluster(4, Network(1e-4, 1))
        states = [method.init_state(Layout.flat(20_000), dtype) for _ in range(4)]
        for _ in range(4):
            for state in states:
                method.accumulate(torch.randn(20_000, dtype=dtype), state, clear=True)
            cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
    assert compiled() == before


SEVERAL = """
import sys, time
from spardl.clusters.precompile import _compiling_once
from spardl.vector.kernels import njit
from pathlib import Path
made = []
for number in range(6):
    place = Path(sys.argv[1]) / f"kernel{number}.py"
    space = {"__name__": "__main__"}
    exec(compile(f"def kernel(x):\\n    return x + {number}\\n", str(place), "exec"), space)
    made.append(njit(cache=True)(space["kernel"]))
Path(sys.argv[1], f"ready{sys.argv[2]}").touch()
while len(list(Path(sys.argv[1]).glob("ready*"))) < 3:
    time.sleep(0.01)
with _compiling_once():
    assert [kernel(1) for kernel in made] == [1, 2, 3, 4, 5, 6]
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in made))
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"spardl-{os.getuid()}"


@pytest.mark.slow
def test_one_process_of_a_machine_compiles(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"kernel{number}.py").write_text(f"def kernel(x):\n    return x + {number}\n")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SEVERAL, str(tmp_path)]
    begun = [
        subprocess.Popen([*command, str(number)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    misses = [int(process.communicate(timeout=240)[0]) for process in begun]
    assert 6 <= sum(misses) <= 8  # 18 if each compiled for itself; who waits compiles what it asked for before


def test_compiling_process_holds_the_lock(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompiling, "_PATIENCE", 0.0)
    with precompiling._MachineLock(logs=True) as first:
        first.acquire()
        assert temporary.stat().st_mode & 0o777 == 0o700
        begun = time.monotonic()
        threading.Timer(0.5, first._release).start()
        with precompiling._MachineLock(logs=True) as second, caplog.at_level(logging.WARNING, "spardl"):
            second.acquire()
            assert time.monotonic() - begun > 0.4
            assert second._file is None
    assert caplog.messages == [
        "another process on this machine, usually another rank, is compiling the kernels; waiting for it"
    ]


def test_lock_is_abandoned_after_the_timeout(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompiling, "_LOCK_TIMEOUT", 0.2)
    with precompiling._MachineLock(logs=True) as first, precompiling._MachineLock(logs=True) as second:
        first.acquire()
        second.acquire()
        second.acquire()
    (said,) = caplog.messages
    assert said.startswith("another process has held ")
    assert str(temporary) in said


def test_progress_is_shown_while_it_compiles(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompiling, "_PATIENCE", 0.0)
    with precompiling._MachineLock(logs=False) as lock:
        lock.acquire()
        time.sleep(0.01)
        lock.count()
        lock.count()
    assert caplog.messages == ["compiling kernels, once per machine: 1 compiled in 0 s"]


def test_unwritable_cache_falls_back_to_a_temporary_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function = _of_a_read_only_installation(monkeypatch)
    kernel = kernels.njit(cache=True)(function)
    assert kernel(2) == 3
    assert list((temporary / "numba").rglob("*.nbi"))
    (said,) = caplog.messages
    assert said.startswith(
        f"neither the installation nor the home directory is writable, so the kernels are cached in {temporary}"
    )


def test_kernels_are_recompiled_without_a_writable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    kernel = kernels.njit(cache=True)(_of_a_read_only_installation(monkeypatch))
    assert kernel(2) == 3
    assert "every process compiles the kernels for itself" in caplog.messages[0]


def _of_a_read_only_installation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function whose file is in a directory that no user can write to, not even root."""
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, "/proc/nowhere")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    kernels._fallback_cache.cache_clear()
    space: dict[str, Any] = {}
    exec(compile("def kernel(x):\n    return x + 1\n", "/proc/version", "exec"), space)
    return space["kernel"]
