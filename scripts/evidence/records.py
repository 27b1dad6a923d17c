"""A training in a small file: all that tables and figures need of it, kept in the repository."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.jobs import Outcome, Training
from spardl.basics.files import write_atomically

__all__ = ["Record", "Records", "on_record", "record"]

_KEPT = (
    "metric",
    "final",
    "best",
    "steps",
    "workers",
    "parameters",
    "wall_seconds",
    "cluster_seconds",
    "step_bytes",
    "step_bytes_dense",
    "density",
    "residual_ratio",
    "residual_age",
    "weights_sha256",
    "environment",
)


class Record(NamedTuple):
    """What a training came to.

    Attributes:
        command: that makes it again.
        figures: its summary, as far as it matters, its evaluations, and where it ran.
    """

    command: str
    figures: Mapping[str, Any]

    def final(self, metric: str) -> float:
        """A metric after the last step; infinite if it was not finite."""
        value = self.figures["final"].get(metric)
        return math.inf if value is None else float(value)

    @property
    def id(self) -> str:
        """The run's."""
        return str(self.figures["id"])

    @property
    def share(self) -> float:
        """Bytes sent by a worker, as a share of those that a dense all-reduce sends."""
        dense = self.figures["step_bytes_dense"]
        return float(self.figures["step_bytes"] / dense) if dense else 0.0


# By command.
Records: TypeAlias = Mapping[str, Record]


def record(training: Training, outcome: Outcome, folder: Path) -> Path:
    """Writes the small file of a finished training.

    Args:
        training: what was run.
        outcome: of it.
        folder: of all records.

    Returns:
        The file.
    """
    evaluations = [{key: each[key] for key in ("step", *outcome.data["final"])} for each in outcome.events("eval")]
    content = {
        "id": training.id,
        "command": training.command,
        **{key: outcome.data.get(key) for key in _KEPT},
        "evaluations": evaluations,
        "cpu": _cpu(),
    }
    path = folder / f"{training.id}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def on_record(folder: Path) -> Records:
    """All that is on record, by command; ``folder``: of the small files."""
    contents = (json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json")))
    return {content["command"]: Record(content["command"], content) for content in contents}


@cache
def _cpu() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
