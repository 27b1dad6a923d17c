"""Measures alternatives alternately, measures the network, and formats the results, for all benchmarks."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spardl.clusters import Network, ProcessGroupCluster
from spardl.diagnostics.commands.timeline import markdown
from spardl.protocol.programs import Exchange, Program, Receive, Send, Worker
from spardl.schedules.fusion import Linear

PATHS = ("compiled", "portable")
"""Implementations in spardl.vector.kernels."""


@dataclass(frozen=True)
class Row:
    """Timings of one candidate.

    Attributes:
        name: Name of the candidate.
        seconds: Seconds of each repetition; at least one.
        figures: Further numbers or texts by column header.
    """

    name: str
    seconds: Sequence[float]
    figures: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return median(self.seconds)


def positive(word: str) -> int:
    """Parses a positive integer of the command line."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def add_repetitions(parser: argparse.ArgumentParser, default: int = 9) -> None:
    """Adds the option --repetitions."""
    parser.add_argument("--repetitions", type=positive, default=default, help="turns per candidate")


def on_path(path: str, work: Callable[[], object]) -> Callable[[], object]:
    """Wraps work so that it uses one of ``PATHS``."""

    def run() -> object:
        before = os.environ.get("SPARDL_KERNELS")
        os.environ["SPARDL_KERNELS"] = path
        try:
            return work()
        finally:
            del os.environ["SPARDL_KERNELS"]
            if before is not None:
                os.environ["SPARDL_KERNELS"] = before

    return run


def interleaved(candidates: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Times candidates in turns, so that other load affects all of them alike.

    The first turn of each candidate is not counted: it compiles code and fills caches.

    On a GPU, the time includes a synchronization of the device.
    """
    for work in candidates.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, work in candidates.items():
            _wait()
            began = time.perf_counter()
            work()
            _wait()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def rows(seconds: Mapping[str, Sequence[float]], figures: Mapping[str, Mapping[str, float | str]]) -> list[Row]:
    """Returns the rows of the timings of ``interleaved``, with further figures by name."""
    return [Row(name, found, figures.get(name, {})) for name, found in seconds.items()]


def table(found: Sequence[Row], reference: str) -> str:
    """Formats a Markdown table: median and range in milliseconds, and the ratio to the row named by ``reference``."""
    (base,) = (row.median for row in found if row.name == reference)
    headers = list(dict.fromkeys(header for row in found for header in row.figures))
    lines = [["", "median ms", "least..most", f"x {reference}", *headers]]
    for row in found:
        spread = f"{1000 * min(row.seconds):.3f}..{1000 * max(row.seconds):.3f}"
        cells = [row.name, f"{1000 * row.median:.3f}", spread, f"{row.median / base:.2f}"]
        lines.append([*cells, *(_cell(row.figures.get(header, "")) for header in headers)])
    return markdown(lines)


def _cell(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def setting_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the options of a benchmark for its file, without paths and unset options."""
    return {name: value for name, value in vars(arguments).items() if not isinstance(value, Path | None)}


def content(cases: Mapping[str, Sequence[Row]], arguments: argparse.Namespace, **further: object) -> dict[str, Any]:
    """Returns the content of the file of a benchmark: rows by title, and options with further figures."""
    figures = {
        title: [{"name": row.name, "median": row.median, "seconds": list(row.seconds), **row.figures} for row in found]
        for title, found in cases.items()
    }
    return {"setting": {**setting_of(arguments), **further}, "cases": figures}


SIZES = (1, 1 << 16, 1 << 20)  # float32 entries of a message


def measured_network(cluster: ProcessGroupCluster) -> Network:
    """Fits latency and bandwidth to rounds in which every worker sends a message to the next one."""
    seconds = []
    for size in SIZES:
        turns = 100 if size == 1 else 5
        times = [cluster.time_uncounted([_rounds(cluster.local_workers[0], size, turns)])[0] for _ in range(5)]
        seconds.append(median(times[1:]) / turns)
    line = Linear.fit(SIZES, seconds)
    return Network(alpha=seconds[0], gbit=32e-9 / line.per_entry)


def _rounds(worker: Worker, size: int, turns: int) -> Program[None]:
    after, before = (worker.rank + 1) % worker.size, (worker.rank - 1) % worker.size
    payload = torch.zeros(size)
    for _ in range(turns):
        yield Exchange([Send(after, payload, size)], [Receive(before, size, torch.float32)])
