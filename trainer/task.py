"""What the trainer needs to know of a task: data, model, loss and metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Split", "Task"]

Batch = Mapping[str, Tensor]


class Split(Protocol):
    """A finite set of examples that can be addressed by position.

    A split whose batches take long to make, such as one that reads files, may set an attribute ``slow`` to true: its
    batches are then made one step ahead, in a thread of their own.
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Batch:
        """Collects examples.

        Args:
            indices: int64, shape (batch,): positions in ``[0, len(self))``.
            generator: source of every random choice (augmentation, masking). ``None`` asks for the
                examples as an evaluation sees them, a function of ``indices`` alone.

        Returns:
            Named tensors whose first dimension is the batch.
        """
        ...


class Task(ABC):
    """A model, its data, its loss and its metric.

    Attributes:
        metric: the name, in the mapping that ``summarize`` returns, of the figure a run is judged by.
        higher_is_better: the direction of that metric.
        sums: names of the entries of the vector that ``measure`` returns.
        consecutive: whether each row of a training batch goes on where it ended in the batch before, as a
            model needs that carries a state along a text; otherwise examples come in random order.
    """

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    sums: ClassVar[tuple[str, ...]]
    consecutive: bool = False

    train: Split
    test: Split

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model with weights drawn from torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean training loss of a batch, a scalar."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """What a batch adds to the evaluation: float64, shape (len(sums),); batches and workers are added up."""

    @abstractmethod
    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turns the sums over a whole split into named metrics; includes ``loss`` and ``metric``."""
