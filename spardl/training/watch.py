"""Whether a run is still worth saving: its losses, its weights, and whatever else a checkpoint holds are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from spardl.basics.errors import TrainingError
from spardl.clusters.base import Cluster, gather_rows
from spardl.training.checkpoint import at_step, newest_whole
from spardl.training.runs import Run

__all__ = ["Watch", "all_finite"]


class Watch:
    """Finds out that a run has diverged. All workers come to the same conclusion, and end together.

    A loss tells of the weights before its step. So a checkpoint is *proven* by a later loss that is finite, or by an
    evaluation of the same weights; one that is not may hold finite weights that are of no use.

    Args:
        cluster: the workers.
        run: whose checkpoints they are.
        step: steps done so far.
    """

    def __init__(self, cluster: Cluster, run: Run, step: int) -> None:
        self._cluster, self._run = cluster, run
        self._last = [True for _ in cluster.local_ranks]
        self._proven = step - 1

    def add(self, step: int, losses: Sequence[float]) -> None:
        """Is told the losses of the local ranks in step number ``step``, counted from 1."""
        self._last = [math.isfinite(loss) for loss in losses]
        if any(self._last):
            self._proven = max(self._proven, step - 1)

    def look(self, step: int, parts: Sequence[Mapping[str, Sequence[Tensor]]]) -> bool:
        """Looks at what a checkpoint would hold.

        Args:
            step: steps done.
            parts: tensors of any shape of each local rank, by name; all ranks' have the same names.

        Returns:
            Whether an evaluation has to show that the run goes on: no worker's last loss is finite. Such gradients may
            have been refused, and the weights be fine.

        Raises:
            TrainingError: on all workers, if something is not finite on one of them.
        """
        rows = [
            torch.tensor([last, *map(all_finite, own.values())], dtype=torch.int64)
            for last, own in zip(self._last, parts, strict=True)
        ]
        table = torch.stack(gather_rows(self._cluster, rows))
        for name, fine in zip(parts[0], table[:, 1:].all(0).tolist(), strict=True):
            if not fine:
                raise self.diverged(f"the {name} no longer finite", step)
        return not bool(table[:, 0].any())

    def evaluated(self, step: int, loss: float) -> None:
        """Is told the loss of an evaluation of the weights after ``step`` steps.

        Raises:
            TrainingError: if it is not finite.
        """
        if not math.isfinite(loss):
            raise self.diverged(f"the evaluated loss is {loss}", step)
        self._proven = step

    def diverged(self, what: str, step: int) -> TrainingError:
        """The error that says what to do; to be made by all workers at once."""
        good = self._newest_good()
        way = f"go on with start_from={good}" if good else "begin again: no checkpoint was saved before"
        return TrainingError(f"{what} at step {step}; lower optimizer.lr or set training.clip_norm, and {way}")

    def _newest_good(self) -> Path | None:
        """Rank 0 alone reads them; the others hear which one it is."""
        rows = [torch.tensor([self._proven]) for _ in self._cluster.local_ranks]
        proven = int(torch.stack(gather_rows(self._cluster, rows)).max())
        folders = [self._run.checkpoints, *([self._run.checkpoint.parent] if self._run.checkpoint else [])]
        found = [newest_whole(folder, proven) if self._cluster.leads else None for folder in folders]
        rows = [torch.tensor([-1 if step is None else step for step in found]) for _ in self._cluster.local_ranks]
        steps = gather_rows(self._cluster, rows)[0].tolist()
        return next((at_step(folder, step) for folder, step in zip(folders, steps, strict=True) if step >= 0), None)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether ``tensors``, of any shape, have no NaN and no infinity; one pass over memory, and one wait for a GPU."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return True
    # A sum of finite numbers may overflow: only then each is looked at.
    sums = torch.stack([tensor.sum().double().to(floating[0].device) for tensor in floating])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in floating)
