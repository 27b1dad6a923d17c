"""A run that goes on with another number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spardl.clusters.base import Cluster, gather_rows
from spardl.method.elastic import owners
from spardl.protocol.programs import Worker
from spardl.schedules.engine import Engine
from spardl.training.checkpoint import fitting, load_part
from spardl.training.learner import Plan

__all__ = ["Restart"]


class Restart:
    """From the checkpoint of one number of workers to another number.

    Args:
        before: how many saved it.
        checkpoint: its folder.
        device: where tensors go.
    """

    def __init__(self, before: int, checkpoint: Path, device: torch.device) -> None:
        self.before = before
        self._checkpoint, self._device = checkpoint, device
        self._sums: dict[int, float] = {}

    def load(self, rank: int) -> Mapping[str, Any]:
        """What an old rank saved."""
        part = load_part(self._checkpoint, rank, self._device)
        with fitting(self._checkpoint, rank):
            groups = part["synchronizer"]["groups"]
            self._sums[rank] = sum(float(group["memory"].sum(dtype=torch.float64)) for group in groups)
        return part

    def shift(self, plan: Plan, step: int, shift: int, size: int) -> int:
        """Steps done, beyond those that as many examples take with ``size`` workers.

        The data goes on where it was: examples are dealt out to all workers in one order, so what was seen of an
        epoch is a beginning of it. What does not fill a step of the new workers is seen again.

        Args:
            plan: what is trained.
            step: steps done.
            shift: as it was with the workers before.
            size: how many workers there are.
        """
        old, new = (plan.sampler(Worker(0, workers)).steps_per_epoch for workers in (self.before, size))
        epoch, within = divmod(step - shift, old)
        return step - (epoch * new + min(new, within * self.before // size))

    def figures(self, cluster: Cluster, engine: Engine) -> dict[str, float]:
        """What is logged: numbers of workers, and the sum over all residuals, before and after."""
        remembers = engine.carried.remembers
        rows = []
        for local, rank in enumerate(cluster.local_ranks):
            # An old residual counts where its first owner is.
            first = [old for old in self._sums if owners(old, self.before, cluster.size)[0] == rank]
            found = [sum(self._sums[old] for old in first), engine.carried.residual_sum(local)]
            rows.append(torch.tensor(found if remembers else [0.0, 0.0], dtype=torch.float64))
        sums = torch.stack(gather_rows(cluster, rows)).sum(0).tolist()
        return {
            "workers_before": self.before,
            "workers": cluster.size,
            **dict(zip(("residual_sum_before", "residual_sum"), sums, strict=True)),
        }
