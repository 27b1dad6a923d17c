"""Evaluation of a split, shared out between the workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spardl.clusters.base import Cluster, gather_rows
from spardl.training.settings import Precision
from spardl.training.task import Task
from spardl.training.worker import TrainingWorker, average_buffers

__all__ = ["autocast", "evaluate"]


def autocast(device: torch.device, formats: Precision) -> torch.autocast:
    """The context that matrix products run in."""
    return torch.autocast(device.type, dtype=formats.autocast, enabled=formats.autocast is not None)


def evaluate(
    task: Task,
    model: nn.Module,
    cluster: Cluster,
    workers: Sequence[TrainingWorker],
    batch_size: int,
    formats: Precision,
) -> dict[str, float]:
    """Measures the test split with the workers' averaged running statistics.

    Every rank takes every P-th example, and the sums are added up in the order of the ranks, so a simulated
    cluster finds the same figures to the last bit.
    """
    average_buffers(cluster, workers, model)
    model.eval()
    with torch.no_grad():
        rows = [
            _measure(task, model, torch.arange(rank, len(task.test), cluster.size), batch_size, formats)
            for rank in cluster.local_ranks
        ]
    model.train()
    total = torch.stack(gather_rows(cluster, rows)).sum(0)
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


def _measure(task: Task, model: nn.Module, indices: Tensor, batch_size: int, formats: Precision) -> Tensor:
    device = next(model.parameters()).device
    sums = torch.zeros(len(task.sums), dtype=torch.float64, device=device)
    for part in indices.split(batch_size) if indices.numel() else ():
        with autocast(device, formats):
            sums += task.measure(model, task.test.batch(part, None))
    return sums
