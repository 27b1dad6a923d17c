"""Which examples a worker sees, and when: a function of (seed, epoch, rank, P) and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.protocol.programs import Worker
from spardl.protocol.randomness import seeded_generator

__all__ = ["LaneSampler", "Sampler", "ShuffledSampler"]


class Sampler(ABC):
    """Shares of equal size: all workers take the same number of steps in an epoch.

    Args:
        examples: size of the training split.
        worker: whose shard it is.
        batch_size: examples per worker and step.
        seed: of the order and of the random choices.

    Attributes:
        steps_per_epoch: steps in which every worker passes over its share.

    Raises:
        ConfigError: if an epoch would not fill a single step.
    """

    def __init__(self, examples: int, worker: Worker, batch_size: int, seed: int) -> None:
        self.steps_per_epoch = examples // worker.size // batch_size
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"training.batch_size x accumulation = {batch_size} on {worker.size} workers needs more than the "
                f"{examples} training examples there are; lower the batch size or the number of workers"
            )
        self._worker = worker
        self._seed = seed

    @abstractmethod
    def indices(self, step: int) -> Tensor:
        """The examples of a step, counted from the beginning of training; int64, shape (batch_size,).

        What does not fill a whole step of all workers sits the epoch out.
        """

    def generator(self, step: int) -> torch.Generator:
        """The source of the random choices (augmentation, masking) of a step."""
        return seeded_generator(self._seed, "batch", step, self._worker.rank)


class ShuffledSampler(Sampler):
    """A new random order in every epoch, dealt out to the workers one by one; see :class:`Sampler`."""

    def __init__(self, examples: int, worker: Worker, batch_size: int, seed: int) -> None:
        super().__init__(examples, worker, batch_size, seed)
        self._examples = examples
        self._batch_size = batch_size
        self._epoch = -1
        self._shard = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """See :meth:`Sampler.indices`; shape (batch_size,)."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = torch.randperm(self._examples, generator=seeded_generator(self._seed, "order", epoch))
            self._epoch, self._shard = epoch, order[self._worker.rank :: self._worker.size]
        return self._shard[within * self._batch_size : (within + 1) * self._batch_size]


class LaneSampler(Sampler):
    """The examples in their order, cut into as many lanes as all workers have rows: each row follows one lane.

    Args:
        examples: size of the training split.
        worker: whose lanes these are.
        lanes: rows of a batch.
        passes: batches of a step, one after the other along the lanes.
        seed: of the random choices.

    Raises:
        ConfigError: if an epoch would not fill a single step.
    """

    def __init__(self, examples: int, worker: Worker, lanes: int, passes: int, seed: int) -> None:
        super().__init__(examples, worker, lanes * passes, seed)
        self._passes = passes
        length = self.steps_per_epoch * passes
        self._starts = (worker.rank * lanes + torch.arange(lanes)) * length

    def indices(self, step: int) -> Tensor:
        """See :meth:`Sampler.indices`; shape (batch_size,), of which the first ``lanes`` are the first batch's."""
        first = step % self.steps_per_epoch * self._passes
        return (torch.arange(first, first + self._passes).unsqueeze(1) + self._starts).flatten()
