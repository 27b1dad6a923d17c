"""The interface of a task: data, model, loss and metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Split", "Task"]

Batch = Mapping[str, Tensor]


class Split(Protocol):
    """A finite set of examples that are addressed by position.

    A split whose batches take long to load, for example from files, may have an attribute ``slow`` that is true. A
    thread then loads its batches one step ahead.
    """

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Batch:
        """Returns a batch of examples.

        Args:
            indices: Positions of the examples in ``[0, len(self))``: int64, shape (batch,).
            generator: Source of all random choices (augmentation, masking); ``None`` during evaluation, when
                the batch must depend on ``indices`` alone.

        Returns:
            Named tensors whose first dimension is the batch.
        """
        ...


class Task(ABC):
    """A model, its data, its loss and its metric.

    Attributes:
        metric: Key of the main metric in the mapping that ``summarize`` returns.
        higher_is_better: Whether a higher value of the metric is better.
        sums: Names of the entries in the vector that ``measure`` returns.
        consecutive: Whether each row of a training batch continues the same row of the previous batch, for models
            that carry a state along a text; otherwise examples are shuffled.
    """

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    sums: ClassVar[tuple[str, ...]]
    consecutive: bool = False

    train: Split
    test: Split

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model; initial weights come from torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean training loss of a batch, a scalar tensor."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns a batch's contribution to the evaluation, to be summed over batches: float64, shape (len(sums),)."""

    @abstractmethod
    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Converts the sums over all batches, by name, to metrics by name, among them ``loss`` and the main metric."""
