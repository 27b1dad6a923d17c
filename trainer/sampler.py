"""Training data of one worker (samplers and batches), and its random state and buffers.

The examples of a step are a function of seed, epoch, rank and world size alone, so runs are reproducible.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster, gather_rows
from spardl.protocol.programs import Worker, derive_seed, seeded_generator
from trainer.task import Batch, Split

__all__ = ["Batches", "LaneSampler", "Sampler", "ShuffledSampler", "TrainingWorker", "average_buffers"]


class Sampler(ABC):
    """Selects one worker's share of the training examples, step by step.

    All workers have equal shares, and therefore the same number of steps per epoch.

    Args:
        examples: Number of training examples.
        worker: Rank of the worker that reads the share, and number of workers.
        batch_size: Number of examples per worker and step.
        seed: Seed of the order of examples and of other random choices.

    Attributes:
        steps_per_epoch: Number of steps per epoch.

    Raises:
        ConfigError: If there are too few examples for one step.
    """

    def __init__(self, examples: int, worker: Worker, batch_size: int, seed: int) -> None:
        self.steps_per_epoch = examples // worker.size // batch_size
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"training.batch_size x accumulation = {batch_size} on {worker.size} workers needs more than the "
                f"{examples} training examples; lower the batch size or the number of workers"
            )
        self._worker = worker
        self._seed = seed

    @abstractmethod
    def indices(self, step: int) -> Tensor:
        """Returns the positions of this worker's examples in a step.

        At the end of an epoch, examples that are too few for a step of all workers are skipped.

        Args:
            step: Number of steps before this one, since the start of training.

        Returns:
            int64, shape (batch_size,).
        """

    def generator(self, step: int) -> torch.Generator:
        """Returns the random generator for this worker's choices in a step, such as augmentation and masking."""
        return seeded_generator(self._seed, "batch", step, self._worker.rank)


class ShuffledSampler(Sampler):
    """Shuffles the examples in every epoch; each of P workers reads every P-th example of that order."""

    def __init__(self, examples: int, worker: Worker, batch_size: int, seed: int) -> None:
        super().__init__(examples, worker, batch_size, seed)
        self._examples = examples
        self._batch_size = batch_size
        self._epoch = -1
        self._shard = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """Returns the positions of this worker's examples in a step: int64, shape (batch_size,)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        # Computed once per epoch; every worker draws the same permutation.
        if epoch != self._epoch:
            order = torch.randperm(self._examples, generator=seeded_generator(self._seed, "order", epoch))
            self._epoch, self._shard = epoch, order[self._worker.rank :: self._worker.size]
        return self._shard[within * self._batch_size : (within + 1) * self._batch_size]


class LaneSampler(Sampler):
    """Cuts the examples, in their order, into lanes: contiguous parts of equal length, one per row of a batch.

    Row ``i`` of a worker's batch continues its lane where row ``i`` of the previous batch ended. This is for models
    that carry a state along a text. The batches of different workers have different lanes.

    Args:
        examples: Number of training examples.
        worker: Rank of the worker that reads the lanes, and number of workers.
        lanes: Number of rows of a batch.
        passes: Number of consecutive batches in a step.
        seed: Seed of the random choices, such as masking.

    Raises:
        ConfigError: If there are too few examples for one step.
    """

    def __init__(self, examples: int, worker: Worker, lanes: int, passes: int, seed: int) -> None:
        super().__init__(examples, worker, lanes * passes, seed)
        self._passes = passes
        length = self.steps_per_epoch * passes
        # The first example of each lane of this worker.
        self._starts = (worker.rank * lanes + torch.arange(lanes)) * length

    def indices(self, step: int) -> Tensor:
        """Returns the positions of this worker's examples in a step: int64, shape (lanes * passes,).

        They consist of ``passes`` batches, one after the other, each with one example per lane.
        """
        first = step % self.steps_per_epoch * self._passes
        return (torch.arange(first, first + self._passes).unsqueeze(1) + self._starts).flatten()


class Batches:
    """The batches of one worker, step by step.

    If the split has a true attribute ``slow``, a thread loads the batches of the next step during the current step.
    This does not change the batches: each depends only on its indices and on the random generator of its step.

    Args:
        split: Training examples.
        sampler: Sampler that selects the worker's share of the examples.
        size: Number of examples in a batch.
        total_steps: Number of steps of the run; no later batch is loaded.
    """

    def __init__(self, split: Split, sampler: Sampler, size: int, total_steps: int) -> None:
        self._split, self._sampler, self._size, self._total = split, sampler, size, total_steps
        self._reads_ahead = bool(getattr(split, "slow", False))
        self._ahead: _Ahead | None = None

    def of(self, step: int) -> Iterator[Batch]:
        """Yields the batches of a step, one per backward pass; called for each step in order."""
        if not self._reads_ahead:
            yield from self._make(step)
            return
        # A resumed run, or a repeated step, does not match the batches that were loaded ahead.
        ahead, self._ahead = self._ahead, None
        found = ahead.batches() if ahead and ahead.step == step else list(self._make(step))
        if step + 1 < self._total:
            self._ahead = _Ahead(step + 1, self._make)
        yield from found

    def _make(self, step: int) -> Iterator[Batch]:
        generator = self._sampler.generator(step)
        for indices in self._sampler.indices(step).split(self._size):
            yield self._split.batch(indices, generator)


class _Ahead:
    """Loads the batches of one step in a daemon thread."""

    def __init__(self, step: int, make: Callable[[int], Iterator[Batch]]) -> None:
        self.step, self._make = step, make
        self._found: list[Batch] = []
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = list(self._make(self.step))
        except Exception as fault:
            self._fault = fault

    def batches(self) -> list[Batch]:
        """Waits until the batches are loaded, and returns them.

        Raises:
            Exception: Any exception of the loading thread.
        """
        self._thread.join()
        if self._fault:
            raise self._fault
        return self._found


class TrainingWorker:
    """Training state of one worker: data share, random state and buffers.

    In a simulated cluster, P workers share one model. Each keeps its own random state and its own buffers (running
    statistics of batch normalization), as if it had its own process.

    Args:
        worker: Rank of the worker, and world size.
        model: Model that the local workers share; provides the initial buffers.
        sampler: Sampler that selects the worker's share of the data.
        seed: Seed of the run.
    """

    def __init__(self, worker: Worker, model: nn.Module, sampler: Sampler, seed: int) -> None:
        self.sampler = sampler
        self._model = model
        self._device = next(model.parameters()).device
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._random = self._fresh_random(derive_seed(seed, "worker", worker.rank))

    def _fresh_random(self, seed: int) -> list[Tensor]:
        # torch only seeds its global generators, so their states are set aside meanwhile.
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
        """Loads this worker's buffers into the model, and its random state into torch, during the ``with`` block."""
        outside = self._get_random()
        self._set_random(self._random)
        load_buffers(self._model, self._buffers)
        try:
            yield
        finally:
            # Forward passes update running statistics in place.
            for name, buffer in self._model.named_buffers():
                self._buffers[name].copy_(buffer)
            self._random = self._get_random()
            self._set_random(outside)

    def undo_spoiled_buffers(self) -> None:
        """Restores the buffers of an active worker if a pass made them non-finite: running averages never recover."""
        floating = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
        if not all(bool(buffer.isfinite().all()) for buffer in floating):
            load_buffers(self._model, self._buffers)

    def floating_buffers(self) -> Tensor:
        """Returns all floating-point buffers, concatenated to one vector of shape (entries,)."""
        parts = [buffer.flatten() for buffer in self._buffers.values() if buffer.is_floating_point()]
        return torch.cat(parts) if parts else torch.empty(0, device=self._device)

    def state_dict(self) -> dict[str, Any]:
        """Returns buffers and random state."""
        return {"buffers": self._buffers, "random": self._random}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores buffers and random state from the result of ``state_dict``."""
        self.load_buffers(values)
        # torch expects random states on the CPU, whichever device the checkpoint was loaded to.
        self._random = [state.cpu() for state in values["random"]]

    def load_buffers(self, values: Mapping[str, Any]) -> None:
        """Restores only the buffers from the result of ``state_dict``."""
        for name, buffer in self._buffers.items():
            buffer.copy_(values["buffers"][name])


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copies ``buffers`` into the buffers of a model that have the same names; shapes must match."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def average_buffers(cluster: Cluster, workers: Sequence[TrainingWorker], model: nn.Module) -> None:
    """Sets the model's floating-point buffers to their mean over all workers; all workers must call it together."""
    rows = gather_rows(cluster, [worker.floating_buffers() for worker in workers])
    mean = torch.stack(rows).mean(0)
    # Integer buffers, such as the number of tracked batches, are equal on all workers.
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer, part in zip(floating, mean.split([buffer.numel() for buffer in floating]), strict=True):
        buffer.copy_(part.view_as(buffer))
