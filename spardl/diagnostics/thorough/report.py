"""What is installed, and the file that can be sent to others."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spardl.basics.files import write_atomically
from spardl.diagnostics.doctor.findings import Verdict
from spardl.diagnostics.doctor.installation import installed, versions
from spardl.diagnostics.thorough.outcome import Outcome, Place, ok, plain, warned

__all__ = ["FORMAT", "check_installation", "write_report"]

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
