"""Runs the thorough checks in sequence, each in a process with a time limit, and writes the report."""

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
from spardl.diagnostics.doctor.board import Findings, Verdict, installed, nccl_version, versions
from spardl.diagnostics.thorough.kernels import check_messages, check_selection, check_triton
from spardl.diagnostics.thorough.laws import check_laws
from spardl.diagnostics.thorough.loops import check_attach, check_waits
from spardl.diagnostics.thorough.outcome import Outcome, Place, ok, plain, warned

__all__ = ["FORMAT", "Check", "all_checks", "check_installation", "examine_thoroughly", "write_report"]


# The installation, and the report file.


FORMAT = 1
"""Version of the report file."""
# Timeout of nvidia-smi in seconds.
_PATIENCE = 10.0


def check_installation(place: Place) -> Outcome:
    """Reports the versions of all packages that the checks use, and runs one operation on the GPU."""
    named: dict[str, Any] = {**versions(), **{name: installed(name) for name in ("numpy", "numba", "triton")}}
    named |= {"cuda": torch.version.cuda, "cpu": platform.machine(), "cores": os.cpu_count()}
    if place.on_gpu:
        named |= _gpu(place)
    text = f"installation: {', '.join(f'{name} {found}' for name, found in named.items() if found)}"
    missing = [name for name in ("numba", "triton") if not named[name]]
    if missing:
        return warned(f"{text}; {' and '.join(missing)} missing; pip install {' '.join(missing)}", named)
    return ok(text, named)


def _gpu(place: Place) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(place.torch_device)
    torch.ones(2, device=place.torch_device).sum().item()  # fails if the driver or the GPU is broken
    return {
        "gpu": facts.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{facts.major}.{facts.minor}",
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "nccl": nccl_version(),
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
    """Writes the results of all checks so far, as JSON.

    Args:
        path: File to write.
        asked: Device that the user requested.
        device: Device that the checks use.
        rows: Results of the checks: name, verdict, text, seconds, figures.
        seconds: Seconds since the first check started.

    Raises:
        OSError: If the file cannot be written.
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


# The list of thorough checks.


# Number of parameters of models of typical size.
_RESNET, _BERT = 14_700_000, 133_000_000


class Check(NamedTuple):
    """A thorough check.

    Attributes:
        name: Name in the report.
        seconds: Time limit in seconds.
        run: Function that performs the check.
    """

    name: str
    seconds: float
    run: Callable[[Place], Outcome]


def all_checks() -> tuple[Check, ...]:
    """Returns all thorough checks, the most important first, because there may not be time for all."""
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


# Seconds for all checks together, and the fewest remaining seconds for which a check starts.
_BUDGET, _TOO_FEW = 570.0, 5.0
_FIX = "report it with the file of --json"


@dataclass(frozen=True)
class _Program:
    """Starts the checks as processes.

    Attributes:
        device: Device of the checks: ``cuda`` or ``cpu``.
        timeout: Timeout of every wait for a worker, in seconds.
    """

    device: str
    timeout: float

    def run(self, check: Check, seconds: float) -> dict[str, Any]:
        """Runs a check in its own process; returns its outcome, or a failure that says how the process ended."""
        with tempfile.TemporaryDirectory() as name:
            file, output = Path(name) / "outcome", Path(name) / "output"
            words = [check.name, self.device, str(self.timeout), str(seconds), str(file)]
            with output.open("wb") as stream:
                code = _run_program([sys.executable, "-m", __package__, *words], self._environment(), stream, seconds)
            # The file decides, not the exit code: a process may crash in its shutdown after a completed check.
            if file.exists():
                result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return result
            return _without_result(check, code, seconds, output.read_text(errors="replace"))

    def _environment(self) -> dict[str, str]:
        # Triton reads this variable on import.
        interpreted = {"TRITON_INTERPRET": "1"} if self.device == "cpu" else {}
        return {**os.environ, **interpreted}


def _run_program(command: Sequence[str], environment: dict[str, str], stream: Any, seconds: float) -> int | None:
    """Runs a program and ends its children; returns the exit code, or ``None`` after the time limit."""
    # A new session makes the program and its workers one process group, which can be killed as a whole.
    process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # everything has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _without_result(check: Check, code: int | None, seconds: float, output: str) -> dict[str, Any]:
    """Returns the result of a check whose process wrote none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code is None:
        text = (
            f"{check.name}: not finished after {seconds:.0f} s: {last}; stop other programs on this device, or {_FIX}"
        )
    else:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = f"{check.name}: {how}: {last}; {_FIX}"
    return {"verdict": Verdict.FAILED.value, "text": text, "figures": {"exit_code": code, "said": lines[-40:]}}


def examine_thoroughly(asked: str, device: str, timeout: float, json_file: Path | None) -> bool:
    """Runs all checks and prints one line per check.

    Args:
        asked: Device that the user requested: auto, cpu or cuda.
        device: Device that the checks use: cpu or cuda.
        timeout: Timeout of every wait for a worker, in seconds.
        json_file: File for all results, written after each check; ``None`` for no file.

    Returns:
        Whether all checks passed.
    """
    findings, program = Findings(True), _Program(device, timeout)
    if device == "cpu":
        findings.warn(
            "device: no GPU is found or requested, so the checks run on the CPU and in Triton's interpreter, with "
            "shorter vectors; on a machine with a GPU, pass --device cuda"
        )
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for check in all_checks():
        rows.append(_row(check, program, _BUDGET - (time.monotonic() - began)))
        findings.report(Verdict(rows[-1]["verdict"]), f"{rows[-1]['text']} ({rows[-1]['seconds']:.1f} s)")
        if json_file:  # after every check, so that an interruption loses nothing
            write_report(json_file, asked, device, rows, time.monotonic() - began)
    result = f"; all results are in {json_file}, ready to share" if json_file else "; --json FILE saves all results"
    findings.ok(f"{len(rows)} checks took {time.monotonic() - began:.0f} s, {findings.failures} failed{result}")
    return not findings.failures


def _row(check: Check, program: _Program, left: float) -> dict[str, Any]:
    began = time.monotonic()
    if left < _TOO_FEW:
        text = f"{check.name}: skipped, because the other checks took all the time; run this again on an idle machine"
        result: dict[str, Any] = {"verdict": Verdict.WARNING.value, "text": text, "figures": {}}
    else:
        result = program.run(check, min(left, check.seconds))
    return {"name": check.name, **result, "seconds": time.monotonic() - began}
