"""Labs and their processes, as the tests of the network lab need them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from scripts.labs.first_process import tool

ROOT = Path(__file__).resolve().parents[2]
LAB = [sys.executable, str(ROOT / "scripts" / "netlab.py")]
BAD_INPUT, TIMED_OUT, TERMINATED = 2, 124, 143


def lab(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def run(*words: str, workers: int = 2, gbit: str = "inf") -> subprocess.CompletedProcess[str]:
    return lab("run", "--workers", str(workers), "--gbit", gbit, "--timeout", "200", *words)


@lru_cache
def missing(*options: str) -> str | None:
    """Why there can be no lab here, found without the lab: its own faults must not skip its tests."""
    programs = [name for name in ("unshare", "ip", "tc") if not tool(name)]
    if programs:
        return f"needs the programs {', '.join(programs)}"
    user = ["--user", "--map-root-user"] if options or os.geteuid() else []
    words = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None


def in_a_lab(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test, and skips it where there can be no lab."""

    @functools.wraps(test)
    def tested(*arguments: Any, **named: Any) -> Any:
        if reason := missing():
            pytest.skip(reason)
        return test(*arguments, **named)

    marked: Callable[..., Any] = pytest.mark.netlab(tested)
    return marked


def processes_with(mark: str) -> list[int]:
    """Whose command line contains a text; zombies have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def processes_in(namespace: str) -> list[str]:
    """The processes in a network namespace, as /proc names it."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if str(link.readlink()) == namespace:
                found.append(link.parts[2])
        except OSError:
            pass
    return found


def until(holds: Callable[[], object], seconds: float = 100) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


class BackgroundRun:
    """A lab whose workers tell their namespaces and then stay; its processes carry a mark of its own."""

    def __init__(self, folder: Path, *more: str, script: str) -> None:
        self.mark = str(folder)
        reported = f"readlink /proc/self/ns/net > {folder}/w$RANK.tmp; mv {folder}/w$RANK.tmp {folder}/w$RANK; {script}"
        options = ["run", "--workers", "2", "--gbit", "1", *more, "--timeout", "200", "--", "sh", "-c", reported]
        self.process = subprocess.Popen([*LAB, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        files = [folder / "w0", folder / "w1"]
        until(lambda: all(file.exists() for file in files))
        self.namespaces = [file.read_text().strip() for file in files]

    def first(self) -> int:
        """The lab's first process, as seen from here: the script inside, but not unshare in front of it."""
        (found,) = [
            process
            for process in processes_with(self.mark)
            if Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[1].endswith(b"first_process.py")
        ]
        return found

    def gone(self) -> bool:
        return not processes_with(self.mark) and not any(processes_in(name) for name in self.namespaces)


class Started:
    """Labs that a test has started, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._labs: list[BackgroundRun] = []

    def __call__(self, *options: str, script: str = "sleep 177") -> BackgroundRun:
        folder = self._folder / str(len(self._labs))
        folder.mkdir()
        self._labs.append(BackgroundRun(folder, *options, script=script))
        return self._labs[-1]

    def end(self) -> None:
        for one in self._labs:
            one.process.kill()
            one.process.wait(timeout=240)
            for process in processes_with(one.mark):
                with contextlib.suppress(ProcessLookupError):  # with the one before it
                    os.kill(process, signal.SIGKILL)
