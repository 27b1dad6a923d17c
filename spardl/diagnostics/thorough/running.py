"""Runs thorough checks one after the other: none can stop another, and all together end in time."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spardl.basics.files import write_atomically
from spardl.diagnostics.doctor.board import Findings, Verdict, installed, versions
from spardl.diagnostics.thorough.laws import check_laws
from spardl.diagnostics.thorough.loops import check_attach, check_waits
from spardl.diagnostics.thorough.outcome import Outcome, Place, ok, plain, warned
from spardl.diagnostics.thorough.twins import check_messages, check_selection, check_triton

__all__ = ["FORMAT", "Check", "all_checks", "check_installation", "examine_thoroughly", "write_report"]


# What is installed, and the file that can be sent to others.


FORMAT = 1
"""Of the file."""
_PATIENCE = 10.0


def check_installation(place: Place) -> Outcome:
    """Names the versions of all that has a part in the other checks, and tries the GPU a little."""
    named: dict[str, Any] = {**versions(), **{name: installed(name) for name in ("numpy", "numba", "triton")}}
    named |= {"cuda": torch.version.cuda, "cpu": platform.machine(), "cores": os.cpu_count()}
    if place.on_gpu:
        named |= _gpu(place)
    text = f"installation: {', '.join(f'{name} {found}' for name, found in named.items() if found)}"
    missing = [name for name in ("numba", "triton") if not named[name]]
    if missing:
        return warned(f"{text}; without {' and '.join(missing)}; pip install {' '.join(missing)}", named)
    return ok(text, named)


def _gpu(place: Place) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(place.torch_device)
    torch.ones(2, device=place.torch_device).sum().item()
    return {
        "gpu": facts.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{facts.major}.{facts.minor}",
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "driver": _driver(),
    }


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def write_report(path: Path, asked: str, device: str, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Writes all that is known so far.

    Args:
        path: of the file.
        asked: the device that was asked for.
        device: the one that was used.
        rows: of the checks: name, verdict, text, seconds, figures.
        seconds: since the first one began.

    Raises:
        OSError: if it cannot be written.
    """
    content = {
        "format": FORMAT,
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "device": device,
        "asked": asked,
        "interpreted": device == "cpu",
        "well": all(row["verdict"] != Verdict.FAILED.value for row in rows),
        "seconds": seconds,
        "checks": rows,
    }
    write_atomically(path, (json.dumps(plain(content), indent=1, allow_nan=False) + "\n").encode())


# All thorough checks, in their order.


_RESNET, _BERT = 14_700_000, 133_000_000


class Check(NamedTuple):
    """One check.

    Attributes:
        name: for the report.
        seconds: that it may take.
        run: what it does.
    """

    name: str
    seconds: float
    run: Callable[[Place], Outcome]


def all_checks() -> tuple[Check, ...]:
    """Those that matter most first: together they may take longer than there is time."""
    return (
        Check("installation", 60, check_installation),
        Check("attach, 1 worker", 60, check_attach(1)),
        Check("attach, 2 workers", 60, check_attach(2)),
        Check("laws, 1 worker", 90, check_laws(1)),
        Check("laws, 2 workers", 120, check_laws(2)),
        Check("kernels, float32", 120, check_triton(torch.float32)),
        Check("messages", 90, check_messages),
        Check("selection, 14.7 million entries", 60, check_selection(_RESNET)),
        Check("waits in the backward pass", 60, check_waits),
        Check("laws, 4 workers", 150, check_laws(4)),
        Check("selection, 133 million entries", 90, check_selection(_BERT)),
        Check("kernels, bfloat16", 120, check_triton(torch.bfloat16)),
        Check("kernels, float64", 120, check_triton(torch.float64)),
    )


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
