"""How long a method selects, packs and merges on this machine: the part of a synchronization that is no message."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from operator import add
from pathlib import Path
from statistics import median

import torch

from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json
from spardl.clusters import Ledger, Network, SimulatedCluster
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules.linear import Linear
from spardl.vector.layout import Layout

__all__ = ["SIZES", "measure_compression", "read_compression"]

SIZES = (1 << 14, 1 << 17, 1 << 19)
_STEPS = 3
_LOCAL = (Phase.SELECT, Phase.PACK, Phase.MERGE)


def measure_compression(
    method: Method,
    workers: int,
    sizes: Sequence[int] = SIZES,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
) -> tuple[Linear, list[float]]:
    """Lets simulated workers synchronize random gradients of some sizes; messages are free.

    Args:
        method: how to average.
        workers: P; the work depends on it.
        sizes: entries of the gradients, at least two different numbers.
        device: where they are.
        layout: the tensors of which they have the first ones, again and again; ``None`` for a vector.

    Returns:
        The line nearest to the seconds of one worker, and these seconds.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    layouts = [_beginning(layout, size) if layout else Layout.flat(size) for size in sizes]
    seconds = [_seconds(method, workers, each, torch.device(device)) for each in layouts]
    return Linear.fit(sizes, seconds), seconds


def read_compression(path: Path, workers: int) -> Mapping[str, Linear]:
    """What scripts/compression.py measured, by method.

    Args:
        path: of the file.
        workers: P, for which it must hold.

    Raises:
        ConfigError: if the file cannot be read, or holds for another number of workers.
    """
    try:
        plain = read_json(path)
        found = {name: Linear(line["fixed"], line["per_entry"]) for name, line in plain["methods"].items()}
        measured = plain["workers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no file of compression times ({error!r}); scripts/compression.py makes one"
        ) from error
    if measured != workers:
        raise ConfigError(
            f"{path} was measured with {measured} workers, not {workers}; make one with scripts/compression.py"
        )
    return found


def _beginning(layout: Layout, entries: int) -> Layout:
    """The first tensors with so many entries in all; the last one has fewer rows, or is cut to a vector."""
    shapes: list[tuple[int, ...]] = []
    left = entries
    for shape in cycle(shape for shape in layout.shapes if math.prod(shape)):
        row = math.prod(shape[1:])
        rows = min(shape[0] if shape else 1, left // row)
        shapes.append((rows, *shape[1:]) if rows else (left,))
        left -= math.prod(shapes[-1])
        if not left:
            return Layout.of(shapes)
    raise ConfigError("a model without entries has nothing to compress")


def _seconds(method: Method, workers: int, layout: Layout, device: torch.device) -> float:
    """The median over the workers in the fastest step; the first, in which memory is allocated, does not count."""
    cluster = SimulatedCluster(workers, Network(alpha=0, gbit=1), device=device)
    states = [method.init_state(layout, torch.float32, device) for _ in range(workers)]
    source = torch.Generator().manual_seed(1)
    found: list[float] = []
    for step in range(1 + _STEPS):
        seconds = [-_spent(ledger) for ledger in cluster.ledgers]
        for rank, state in enumerate(states):
            gradient = torch.randn(layout.length, generator=source).to(device)
            _settle(device)
            started = time.perf_counter()
            method.accumulate(gradient, state)
            _settle(device)
            seconds[rank] += time.perf_counter() - started
        cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
        if step:
            found.append(median(map(add, seconds, map(_spent, cluster.ledgers))))
    return min(found)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spent(ledger: Ledger) -> float:
    return sum(ledger.seconds[phase] for phase in _LOCAL)
