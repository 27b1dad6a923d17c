"""Measures rounds of messages between the running workers, to fit the alpha-beta model of their network."""

from __future__ import annotations

from statistics import median

import torch

from spardl.clusters import Network, ProcessGroupCluster
from spardl.protocol.programs import Exchange, Program, Receive, Send, Worker
from spardl.schedules.fusion import Linear

__all__ = ["measured_network"]

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
