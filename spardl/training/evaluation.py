"""Evaluation of a split, shared out between the workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spardl.clusters.base import Cluster, gather_rows
from spardl.training.settings import Precision, Settings
from spardl.training.task import Task
from spardl.training.worker import TrainingWorker, average_buffers

__all__ = ["autocast", "evaluate", "evenly_spread"]


def autocast(device: torch.device, formats: Precision) -> torch.autocast:
    """The context that matrix products run in."""
    return torch.autocast(device.type, dtype=formats.autocast, enabled=formats.autocast is not None)


def evaluate(
    task: Task,
    model: nn.Module,
    cluster: Cluster,
    workers: Sequence[TrainingWorker],
    settings: Settings,
) -> dict[str, float]:
    """Measures the test split, or an evenly spread part of it, with the workers' averaged running statistics.

    Every rank takes every P-th example, and the sums are added up in the order of the ranks, so a simulated
    cluster finds the same figures to the last bit.
    """
    average_buffers(cluster, workers, model)
    model.eval()
    chosen = evenly_spread(len(task.test), settings.eval_examples)
    with torch.no_grad():
        rows = [_measure(task, model, chosen[rank :: cluster.size], settings) for rank in cluster.local_ranks]
    model.train()
    total = torch.stack(gather_rows(cluster, rows)).sum(0)
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


def evenly_spread(available: int, wanted: int | None) -> Tensor:
    """Positions in a split: all, or so many at equal distances, since neighbours are often alike.

    Args:
        available: examples of the split.
        wanted: how many at most; ``None``: all.

    Returns:
        int64, shape (count,), increasing.
    """
    count = available if wanted is None else min(wanted, available)
    return torch.arange(count) * available // max(1, count)


def _measure(task: Task, model: nn.Module, indices: Tensor, settings: Settings) -> Tensor:
    device = next(model.parameters()).device
    sums = torch.zeros(len(task.sums), dtype=torch.float64, device=device)
    for part in indices.split(settings.eval_batch_size) if indices.numel() else ():
        with autocast(device, settings.formats):
            sums += task.measure(model, task.test.batch(part, None))
    return sums
