"""Which examples a worker sees, and when: a function of (seed, epoch, rank, P) and nothing else."""

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
                f"{examples} training examples; lower the batch size or the number of workers"
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


# The batches of one worker, step by step; those that take long to read are read ahead.


class Batches:
    """What a worker's backward passes are given.

    If the split has an attribute ``slow`` that is true, the batches of the next step are made in a thread of their
    own while the present ones are computed with. They are the same either way: a batch is a function of its indices
    and its step's generator.

    Args:
        split: of the training examples.
        sampler: the worker's share of them.
        size: examples of a batch.
        total_steps: of the run; nothing is read beyond.
    """

    def __init__(self, split: Split, sampler: Sampler, size: int, total_steps: int) -> None:
        self._split, self._sampler, self._size, self._total = split, sampler, size, total_steps
        self._reads_ahead = bool(getattr(split, "slow", False))
        self._ahead: _Ahead | None = None

    def of(self, step: int) -> Iterator[Batch]:
        """The batches of a step, one after the other; to be taken before the next step's."""
        if not self._reads_ahead:
            yield from self._make(step)
            return
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
    """The batches of one step, being made in a thread that does not keep the process alive."""

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
        """Waits for them.

        Raises:
            Exception: what went wrong while they were made.
        """
        self._thread.join()
        if self._fault:
            raise self._fault
        return self._found


# What belongs to one worker and not to the model: its data, its random numbers, its running statistics.
#
# A simulated cluster has one model and P workers who take turns with it; each must find its own random state and its
# own buffers (the running statistics of batch normalisation), as it would in a process of its own.


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
