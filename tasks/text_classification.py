"""Task: text classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.datasets.base import Dataset, require
from tasks.datasets.labelled_text import LabelledTextDataset
from tasks.placement import place
from tasks.scoring import score
from trainer.task import Batch, Task

__all__ = ["TextClassification"]


class TextClassification(Task):
    """Classification with cross entropy, evaluated by accuracy.

    Args:
        model: Function that builds the network from ``vocab_size`` and ``num_classes``; it maps tokens (batch, time)
            and lengths (batch,) to logits (batch, num_classes).
        dataset: Data set of labelled texts.

    Raises:
        ConfigError: If the data set contains no labelled texts.
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    sums: ClassVar[tuple[str, ...]] = ("loss", "correct", "count")

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset) -> None:
        self.dataset = require(dataset, LabelledTextDataset, "text classification")
        self.model = model
        self.train = self.dataset.train
        self.test = self.dataset.test

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's vocabulary and classes."""
        return self.model(vocab_size=self.dataset.vocab_size, num_classes=self.dataset.num_classes)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross entropy of a batch, in nats."""
        placed = place(batch, model)
        return F.cross_entropy(model(placed["tokens"], placed["lengths"]), placed["labels"])

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns summed cross entropy in nats, number of correct texts, and number of texts: float64, shape (3,)."""
        placed = place(batch, model)
        return score(model(placed["tokens"], placed["lengths"]), placed["labels"])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns ``loss``, the mean cross entropy in nats, and ``accuracy``, a fraction between 0 and 1."""
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}
