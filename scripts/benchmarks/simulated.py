"""Measures time and memory of a SparDL synchronization with many simulated workers in one process.

python scripts/bench.py simulated --workers 16,64,256 --entries 1000000
python scripts/bench.py simulated --workers 256 --entries 1000000 --settle 5
python scripts/bench.py simulated --workers 1024 --entries 100000

Seconds are those of all workers together on one core. Memory is the peak of the process: libraries, residuals and
gradients of all workers, and messages in flight.
"""

from __future__ import annotations

import argparse
import resource
import time
from statistics import median
from typing import Any

import torch

from scripts.benchmarks.timing import Row, add_repetitions, content, positive, table
from spardl.clusters import Network, SimulatedCluster
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.vector.layout import Layout

PER_WORKER, MEMORY = "ms per worker", "GB at most"


def synchronize(workers: int, length: int, density: float, steps: int, settle: int) -> list[float]:
    """Seconds of each of some steps, after ``settle`` others: in the first, nothing is known of the last."""
    method, cluster = Method(TopK(density), SparDL(), GlobalResidual()), SimulatedCluster(workers, Network(1e-4, 1))
    states = [method.init_state(Layout.flat(length), torch.float32) for _ in range(workers)]
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(settle + steps):
        began = time.perf_counter()
        for rank, state in enumerate(states):
            method.accumulate(gradient.roll(rank), state)
        cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
        seconds.append(time.perf_counter() - began)
    return seconds[settle:]


def measured(workers: int, arguments: argparse.Namespace) -> Row:
    """Measures one row, for a number of workers."""
    seconds = synchronize(workers, arguments.entries, arguments.density, arguments.repetitions, arguments.settle)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    figures = {PER_WORKER: 1000 * median(seconds) / workers, MEMORY: peak}
    return Row(f"{workers} workers, {arguments.entries:,} entries", seconds, figures)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", default="16,64,256", help="comma-separated numbers of workers, increasing")
    parser.add_argument("--entries", type=positive, default=1_000_000, help="length of the gradient (n)")
    parser.add_argument("--density", type=float, default=0.01, help="density (k / n)")
    parser.add_argument("--settle", type=positive, default=1, help="steps before the first timed one")
    add_repetitions(parser, 5)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    found = [measured(workers, arguments) for workers in map(positive, arguments.workers.split(","))]
    title = f"SparDL at {arguments.density:.2%}, all workers in one process"
    print(f"{title}\n{table(found, found[0].name)}")
    return content({title: found}, arguments)
