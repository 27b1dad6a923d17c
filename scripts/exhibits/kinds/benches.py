"""Exhibits that benches of this repository measure, in one process or in some that loopback connects."""

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
# Seconds after which a bench is ended.
LIMIT = 900.0


def timed(
    script: str, runs: Sequence[Sequence[str]], floor: str, workers: int, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """A sheet for each table that a bench writes; rows of several runs are put into one if its title is the same.

    Args:
        script: of the bench, from the repository's root.
        runs: its words, each time that it runs.
        floor: the row that others are compared with.
        workers: processes that are started by torchrun; 0: one, without it.
        beside: what else the bench knows of each row.

    Raises:
        TrainingError: if it failed, or took too long.
    """
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for words in runs:
        for title, rows in _run(script, words, workers).items():
            tables.setdefault(title, []).extend(rows)
    return {"sheets": [_sheet(title, rows, floor, beside) for title, rows in tables.items()]}


def _run(script: str, words: Sequence[str], workers: int) -> Mapping[str, Any]:
    """The tables, by title."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        start = ["-m", "torch.distributed.run", *local(workers)] if workers else []
        command = [sys.executable, *start, str(ROOT / script), *words, f"--json={found}"]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"{script} took more than {LIMIT:g} s") from error
        if ended.returncode:
            raise TrainingError(complaint(ended.stderr, script, ended.returncode))
        tables: Mapping[str, Any] = json.loads(found.read_bytes())["cases"]
        return tables


def local(workers: int) -> Sequence[str]:
    """What torchrun is told to start so many processes that loopback connects."""
    return ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(workers))


def _sheet(title: str, rows: Sequence[Mapping[str, Any]], floor: str, beside: Sequence[str]) -> Mapping[str, Any]:
    """Milliseconds, and how often the floor fits in."""
    base = next(median(row["seconds"]) for row in rows if row["name"] == floor)
    columns = ("what", "median ms", "least", "most", f"x {floor}", *beside)
    figures = {row["name"]: [*_times(row["seconds"], base), *(row[name] for name in beside)] for row in rows}
    return sheet(title, columns, figures)


def _times(seconds: Sequence[float], base: float) -> list[float | str]:
    middle = median(seconds)
    return [1000 * middle, 1000 * min(seconds), 1000 * max(seconds), middle / base]


@dataclass(frozen=True)
class Timed(Computed):
    """What a bench measures; ``arguments`` are those of :func:`timed`."""

    charts: tuple[Chart, ...] = ()
    recipe: int = EDITION

    def job(self, scale: str) -> Measurement:
        """All of it."""
        arguments = at(scale, self.arguments)
        given = dict(arguments)
        start = ("torchrun", *local(given["workers"])) if given["workers"] else ("python",)
        shell = "; ".join(" ".join((*start, given["script"], *words)) for words in given["runs"])
        return Measurement(self.name, self.function, arguments, shell, self.recipe)

    def caption(self, scale: str) -> str:
        """See :meth:`Exhibit.caption`."""
        return f"{self.words} {self.job(scale).command}"
