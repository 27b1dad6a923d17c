"""How long a method selects, packs and merges on this machine: the part of a synchronization that is no message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import add
from statistics import median

import torch

from spardl.clusters import Ledger, Network, SimulatedCluster
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules.fusion import Linear
from spardl.vector.layout import Layout

__all__ = ["SIZES", "measure_compression"]

SIZES = (1 << 14, 1 << 17, 1 << 19)
_STEPS = 3
_LOCAL = (Phase.SELECT, Phase.PACK, Phase.MERGE)


def measure_compression(
    method: Method, workers: int, sizes: Sequence[int] = SIZES, device: torch.device | str = "cpu"
) -> tuple[Linear, list[float]]:
    """Lets simulated workers synchronize random gradients of some sizes; messages are free.

    Args:
        method: how to average.
        workers: P; the work depends on it.
        sizes: entries of the gradients, at least two different numbers.
        device: where they are.

    Returns:
        The line nearest to the seconds of one worker, and these seconds.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    seconds = [_seconds(method, workers, size, torch.device(device)) for size in sizes]
    return Linear.fit(sizes, seconds), seconds


def _seconds(method: Method, workers: int, entries: int, device: torch.device) -> float:
    """The median over the workers in the fastest step; the first, in which memory is allocated, does not count."""
    cluster = SimulatedCluster(workers, Network(alpha=0, gbit=1), device=device)
    states = [method.init_state(Layout.flat(entries), torch.float32, device) for _ in range(workers)]
    source = torch.Generator().manual_seed(1)
    found: list[float] = []
    for step in range(1 + _STEPS):
        seconds = [-_spent(ledger) for ledger in cluster.ledgers]
        for rank, state in enumerate(states):
            gradient = torch.randn(entries, generator=source).to(device)
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
