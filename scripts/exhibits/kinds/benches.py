"""Exhibits measured by the benchmarks of this repository, in one process or in several over loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from scripts.exhibits.base import at
from scripts.exhibits.charts.sheets import Chart
from scripts.exhibits.kinds.lab import EDITION, Measurement, complaint
from scripts.exhibits.kinds.predictions import Computed, sheet
from spardl.basics.errors import TrainingError

__all__ = ["Timed", "local", "timed"]

ROOT = Path(__file__).resolve().parents[3]
# Time limit of a benchmark in seconds.
LIMIT = 900.0


def timed(
    script: str, runs: Sequence[Sequence[str]], floor: str, workers: int, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """One sheet per table of a benchmark; tables of several runs with the same title are joined.

    Args:
        script: Path of the benchmark, relative to the repository.
        runs: Options of each run.
        floor: Row that the others are compared with.
        workers: Number of processes for torchrun; 0 runs one process without it.
        beside: Names of further columns of the benchmark.

    Raises:
        TrainingError: if a run failed or took too long.
    """
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for words in runs:
        for title, rows in _run(script, words, workers).items():
            tables.setdefault(title, []).extend(rows)
    return {"sheets": [_sheet(title, rows, floor, beside) for title, rows in tables.items()]}


def _run(script: str, words: Sequence[str], workers: int) -> Mapping[str, Any]:
    """Tables by title."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        start = ["-m", "torch.distributed.run", *local(workers)] if workers else []
        command = [sys.executable, *start, str(ROOT / script), *words, f"--json={found}"]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"{script} did not end within {LIMIT:g} s; check the load of this machine") from error
        if ended.returncode:
            raise TrainingError(complaint(ended.stderr, script, ended.returncode))
        tables: Mapping[str, Any] = json.loads(found.read_bytes())["cases"]
        return tables


def local(workers: int) -> Sequence[str]:
    """Options of torchrun for processes connected by loopback."""
    return ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(workers))


def _sheet(title: str, rows: Sequence[Mapping[str, Any]], floor: str, beside: Sequence[str]) -> Mapping[str, Any]:
    """Milliseconds, and multiples of the floor."""
    base = next(median(row["seconds"]) for row in rows if row["name"] == floor)
    columns = ("what", "median ms", "least", "most", f"x {floor}", *beside)
    figures = {row["name"]: [*_times(row["seconds"], base), *(row[name] for name in beside)] for row in rows}
    return sheet(title, columns, figures)


def _times(seconds: Sequence[float], base: float) -> list[float | str]:
    middle = median(seconds)
    return [1000 * middle, 1000 * min(seconds), 1000 * max(seconds), middle / base]


@dataclass(frozen=True)
class Timed(Computed):
    """An exhibit measured by a benchmark; ``arguments`` are those of :func:`timed`."""

    charts: tuple[Chart, ...] = ()
    recipe: int = EDITION

    def job(self, scale: str) -> Measurement:
        """The measurement."""
        arguments = at(scale, self.arguments)
        given = dict(arguments)
        start = ("torchrun", *local(given["workers"])) if given["workers"] else ("python",)
        shell = "; ".join(" ".join((*start, given["script"], *words)) for words in given["runs"])
        return Measurement(self.name, self.function, arguments, shell, self.recipe)

    def caption(self, scale: str) -> str:
        return f"{self.words} {self.job(scale).command}"
