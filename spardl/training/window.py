"""Figures between two log lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spardl.clusters.base import Cluster, gather_rows
from spardl.protocol.programs import Phase

__all__ = ["Window"]


class Window:
    """Figures between two log lines; part of a checkpoint, so that a continued run logs the same ones."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._open()

    def _open(self) -> None:
        self._steps = 0
        self._losses = [[0.0, 0.0] for _ in self._cluster.local_ranks]
        self._seconds = [{p.value: ledger.seconds[p] for p in Phase} for ledger in self._cluster.ledgers]
        self._bytes = self._cluster.ledgers[0].bytes_sent

    def add(self, losses: Sequence[float]) -> None:
        """Enters a step. A loss that is not finite counts only if there is no other: see ``refused``."""
        self._steps += 1
        for sums, loss in zip(self._losses, losses, strict=True):
            if math.isfinite(loss):
                sums[0] += loss
                sums[1] += 1

    def close(self) -> dict[str, float]:
        """The mean loss and seconds over workers and steps; bytes of the first local rank, per step."""
        rows = [torch.tensor(self._row(local), dtype=torch.float64) for local in range(len(self._losses))]
        table = torch.stack(gather_rows(self._cluster, rows))
        # Alone: in a wider table, torch may add in another order.
        loss, count = table[:, :2].contiguous().sum(0).tolist()
        seconds, steps = table[:, 2:].mean(0).tolist(), max(1, self._steps)
        values = {
            "loss": loss / count if count else math.nan,
            **{f"seconds/{phase.value}": value / steps for phase, value in zip(Phase, seconds, strict=True)},
            "bytes/sent": (self._cluster.ledgers[0].bytes_sent - self._bytes) / steps,
        }
        self._open()
        return values

    def _row(self, local: int) -> list[float]:
        before, ledger = self._seconds[local], self._cluster.ledgers[local]
        return [*self._losses[local], *(ledger.seconds[p] - before[p.value] for p in Phase)]

    def state_dict(self, local: int) -> dict[str, Any]:
        """What is known so far, as plain data."""
        return {
            "steps": self._steps,
            "losses": self._losses[local],
            "seconds": self._seconds[local],
            "bytes": self._bytes,
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from saved data."""
        self._losses[local], self._seconds[local] = values["losses"], values["seconds"]
        if local == 0:
            self._steps, self._bytes = values["steps"], values["bytes"]
