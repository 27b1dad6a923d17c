"""What a run's summary says of where it was done."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spardl.basics.version import __version__

__all__ = ["environment", "processor"]


def environment() -> dict[str, Any]:
    """Versions, commit and machine; nothing from the environment's variables."""
    return {
        "spardl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s) per worker",
        "cpu": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",  # with torch's version, what bits depend on
    }


@cache
def processor() -> str:
    """The processor's name, as well as this system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
