"""Runs thorough checks one after the other: none can stop another, and all together end in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spardl.diagnostics.doctor.findings import Findings, Verdict
from spardl.diagnostics.thorough.checks import Check, all_checks
from spardl.diagnostics.thorough.report import write_report

__all__ = ["examine_thoroughly"]

# Seconds for all checks together, and how few are not worth beginning one.
_BUDGET, _TOO_FEW = 570.0, 5.0
_FIX = "send the file of --json with your report"


@dataclass(frozen=True)
class _Program:
    """How checks are started.

    Attributes:
        device: cuda or cpu.
        timeout: seconds that bound every wait for a worker.
    """

    device: str
    timeout: float

    def run(self, check: Check, seconds: float) -> dict[str, Any]:
        """What a check answers, or what became of its process."""
        with tempfile.TemporaryDirectory() as name:
            file, said = Path(name) / "outcome", Path(name) / "said"
            words = [check.name, self.device, str(self.timeout), str(seconds), str(file)]
            with said.open("wb") as stream:
                code = _ended([sys.executable, "-m", __package__, *words], self._environment(), stream, seconds)
            if file.exists():
                told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return told
            return _lost(check, code, seconds, said.read_text(errors="replace"))

    def _environment(self) -> dict[str, str]:
        # Triton reads this when it is imported.
        interpreted = {"TRITON_INTERPRET": "1"} if self.device == "cpu" else {}
        return {**os.environ, **interpreted}


def _ended(command: Sequence[str], environment: dict[str, str], stream: Any, seconds: float) -> int | None:
    """The exit code of a program; ``None`` if it took too long. It leaves no process of its own behind."""
    process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lost(check: Check, code: int | None, seconds: float, said: str) -> dict[str, Any]:
    """The row of a check that has no answer."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if code is None:
        text = f"{check.name}: not done after {seconds:.0f} s: {last}; see what else uses this device, and {_FIX}"
    else:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "broke off"
        text = f"{check.name}: {how}: {last}; {_FIX}"
    return {"verdict": Verdict.FAILED.value, "text": text, "figures": {"exit_code": code, "said": lines[-40:]}}


def examine_thoroughly(asked: str, device: str, timeout: float, json_file: Path | None) -> bool:
    """Runs all checks, and prints a line for each.

    Args:
        asked: the device that was asked for: auto, cpu or cuda.
        device: the one that there is: cpu or cuda.
        timeout: seconds that bound every wait for a worker.
        json_file: where all figures are written, after each check.

    Returns:
        Whether no check failed.
    """
    findings, program = Findings(True), _Program(device, timeout)
    if device == "cpu":
        findings.warn(
            "device: torch finds no GPU here, or none was asked for; the same checks run on the CPU and in Triton's "
            "interpreter, with shorter vectors; on a machine with a GPU, pass --device cuda"
        )
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for check in all_checks():
        rows.append(_row(check, program, _BUDGET - (time.monotonic() - began)))
        _say(findings, rows[-1])
        if json_file:
            write_report(json_file, asked, device, rows, time.monotonic() - began)
    told = f"; all figures are in {json_file}, which you can send" if json_file else "; --json FILE keeps all figures"
    findings.ok(f"{len(rows)} checks took {time.monotonic() - began:.0f} s, {findings.failures} failed{told}")
    return not findings.failures


def _row(check: Check, program: _Program, left: float) -> dict[str, Any]:
    began = time.monotonic()
    if left < _TOO_FEW:
        text = f"{check.name}: left out, as the other checks took all the time there was; run this with less load"
        told: dict[str, Any] = {"verdict": Verdict.WARNING.value, "text": text, "figures": {}}
    else:
        told = program.run(check, min(left, check.seconds))
    return {"name": check.name, **told, "seconds": time.monotonic() - began}


def _say(findings: Findings, row: dict[str, Any]) -> None:
    ways: dict[Verdict, Callable[[str], None]] = {
        Verdict.OK: findings.ok,
        Verdict.WARNING: findings.warn,
        Verdict.FAILED: findings.fail,
    }
    ways[Verdict(row["verdict"])](f"{row['text']} ({row['seconds']:.1f} s)")
