"""Naming what a picture shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.training.task import Batch, Task
from tasks.datasets.base import Dataset, ImageDataset, require
from tasks.placement import place

__all__ = ["ImageClassification"]


class ImageClassification(Task):
    """Cross entropy over classes, judged by the fraction of test images named right.

    Args:
        model: builds the network from ``num_classes``, ``in_channels`` and ``image_size``.
        dataset: labelled images.

    Raises:
        ConfigError: the data set holds no images.
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    sums: ClassVar[tuple[str, ...]] = ("loss", "correct", "count")

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset) -> None:
        self.dataset = require(dataset, ImageDataset, "image classification")
        self.model = model
        self.train = self.dataset.train
        self.test = self.dataset.test

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's images.

        Raises:
            ConfigError: the network cannot take images of that size.
        """
        return self.model(
            num_classes=self.dataset.num_classes,
            in_channels=self.dataset.in_channels,
            image_size=self.dataset.image_size,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of a batch, in nats."""
        placed = place(batch, model)
        return F.cross_entropy(model(placed["images"]), placed["labels"])

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed cross entropy, images named right, images: float64, shape (3,), on the model's device."""
        placed = place(batch, model)
        logits, labels = model(placed["images"]).double(), placed["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        return torch.stack([loss, correct.double(), loss.new_tensor(len(labels))])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """``loss``: mean cross entropy in nats; ``accuracy``: a fraction between 0 and 1."""
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}
