"""The batches of one worker, step by step; those that take long to read are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from spardl.training.sampler import Sampler
from spardl.training.task import Batch, Split

__all__ = ["Batches"]


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
