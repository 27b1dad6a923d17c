"""What tests of the doctor share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

import pytest

from spardl.clusters.workers.membership import Membership
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands.doctor import doctor as command
from tests.support.driver import STARTED_BY
from tests.support.labs import ROOT

LATER = (
    "correctness.check_spardl",
    "correctness.check_methods",
    "correctness.check_pace",
    "links.check_all_reduce",
)
Doctor: TypeAlias = Callable[..., int]


def examined(*words: str) -> int:
    """The exit code of the doctor's command line, in this process."""
    return run(command, words, "spardl doctor")


def lines(text: str, verdict: str) -> list[str]:
    """What a verdict was said of."""
    return [line.removeprefix(verdict).strip() for line in text.splitlines() if line.startswith(f"{verdict} ")]


def local(doctor: Doctor, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Two workers of this machine: the exit code, and what was printed."""
    code = doctor("--workers", "2", "--device", "cpu", *words)
    return code, capfd.readouterr().out


def member(rank: int, size: int = 2) -> Membership:
    return Membership(rank, size, rank, size, "127.0.0.1", 1)


def script(*words: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


class Collected:
    """Findings that keep their lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures = 0

    def ok(self, text: str) -> None:
        self.lines.append(f"ok {text}")

    def warn(self, text: str) -> None:
        self.lines.append(f"warning {text}")

    def fail(self, text: str) -> None:
        self.failures += 1
        self.lines.append(f"FAILED {text}")

    def progress(self, text: str) -> None:
        self.lines.append(f"progress {text}")

    def judge(self, good: bool, text: str, fix: str) -> None:
        (self.ok if good else self.fail)(text if good else f"{text}; {fix}")
