"""Figures between two log lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spardl.clusters.base import Cluster, gather_rows
from spardl.programs import Phase

__all__ = ["Window"]


class Window:
    """Figures between two log lines; part of a checkpoint, so that a continued run logs the same ones."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._open()

    def _open(self) -> None:
        ledger = self._cluster.ledgers[0]
        self._steps = 0
        self._losses = [[0.0, 0.0] for _ in self._cluster.local_ranks]
        self._seconds = {phase.value: ledger.seconds[phase] for phase in Phase}
        self._bytes = ledger.bytes_sent

    def add(self, losses: Sequence[float]) -> None:
        """Enters a step. A loss that is not finite counts only if there is no other: see ``refused``."""
        self._steps += 1
        for sums, loss in zip(self._losses, losses, strict=True):
            if math.isfinite(loss):
                sums[0] += loss
                sums[1] += 1

    def close(self) -> dict[str, float]:
        """The mean loss over workers and steps; seconds and bytes of the first local rank, per step."""
        rows = [torch.tensor(sums, dtype=torch.float64) for sums in self._losses]
        loss, count = torch.stack(gather_rows(self._cluster, rows)).sum(0).tolist()
        ledger, steps = self._cluster.ledgers[0], max(1, self._steps)
        values = {
            "loss": loss / count if count else math.nan,
            **{f"seconds/{p.value}": (ledger.seconds[p] - self._seconds[p.value]) / steps for p in Phase},
            "bytes/sent": (ledger.bytes_sent - self._bytes) / steps,
        }
        self._open()
        return values

    def state_dict(self, local: int) -> dict[str, Any]:
        """What is known so far, as plain data."""
        return {
            "steps": self._steps,
            "losses": self._losses[local],
            "seconds": self._seconds,
            "bytes": self._bytes,
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from saved data."""
        self._losses[local] = values["losses"]
        if local == 0:
            self._steps, self._seconds, self._bytes = values["steps"], values["seconds"], values["bytes"]
