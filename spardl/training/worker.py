"""What belongs to one worker and not to the model: its data, its random numbers, its running statistics.

A simulated cluster has one model and P workers who take turns with it; each must find its own random state and
its own buffers (the running statistics of batch normalisation), as it would in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spardl.clusters.base import Cluster, gather_rows
from spardl.protocol.programs import Worker
from spardl.protocol.randomness import derive_seed
from spardl.training.sampler import Sampler

__all__ = ["TrainingWorker", "average_buffers"]


class TrainingWorker:
    """One worker's part of the training state.

    Args:
        worker: its rank.
        model: the model it takes turns with; its buffers are the worker's first ones.
        sampler: its share of the data.
        seed: of the run.
    """

    def __init__(self, worker: Worker, model: nn.Module, sampler: Sampler, seed: int) -> None:
        self.sampler = sampler
        self._model = model
        self._device = next(model.parameters()).device
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._random = self._fresh_random(derive_seed(seed, "worker", worker.rank))

    def _fresh_random(self, seed: int) -> list[Tensor]:
        outside = self._get_random()
        torch.manual_seed(seed)
        mine = self._get_random()
        self._set_random(outside)
        return mine

    def _get_random(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set_random(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets this worker use the model: its buffers are in place and torch draws its random numbers."""
        outside = self._get_random()
        self._set_random(self._random)
        load_buffers(self._model, self._buffers)
        try:
            yield
        finally:
            for name, buffer in self._model.named_buffers():
                self._buffers[name].copy_(buffer)
            self._random = self._get_random()
            self._set_random(outside)

    def undo_spoiled_buffers(self) -> None:
        """While active: takes back what passes did to the buffers, if that left a NaN or an infinity: it would stay."""
        floating = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
        if not all(bool(buffer.isfinite().all()) for buffer in floating):
            load_buffers(self._model, self._buffers)

    def floating_buffers(self) -> Tensor:
        """All running statistics in one vector, shape (m,)."""
        parts = [buffer.flatten() for buffer in self._buffers.values() if buffer.is_floating_point()]
        return torch.cat(parts) if parts else torch.empty(0, device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """Buffers and random state."""
        return {"buffers": self._buffers, "random": self._random}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from saved data."""
        self.load_buffers(values)
        # Random states live on the CPU, whatever device the rest was loaded to.
        self._random = [state.cpu() for state in values["random"]]

    def load_buffers(self, values: Mapping[str, Any]) -> None:
        """Continues with the buffers of saved data, and random numbers of its own."""
        for name, buffer in self._buffers.items():
            buffer.copy_(values["buffers"][name])


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copies ``buffers``, by name and of the same shapes, into those of a model."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def average_buffers(cluster: Cluster, workers: Sequence[TrainingWorker], model: nn.Module) -> None:
    """Gives the model the mean of all workers' running statistics, added up in the order of the ranks."""
    rows = gather_rows(cluster, [worker.floating_buffers() for worker in workers])
    mean = torch.stack(rows).mean(0)
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer, part in zip(floating, mean.split([buffer.numel() for buffer in floating]), strict=True):
        buffer.copy_(part.view_as(buffer))
