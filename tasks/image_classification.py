"""Task: image classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.datasets.base import Dataset, require
from tasks.datasets.images import ImageDataset
from tasks.placement import place
from trainer.task import Batch, Task

__all__ = ["ImageClassification"]

FEW = 5


class ImageClassification(Task):
    """Classification with cross entropy, evaluated by accuracy.

    Classes are ranked by their logits; of classes with equal logits, the one with the lower index ranks higher. A
    prediction is correct if the right class ranks first, and correct in the top 5 if it is among the first five.

    Args:
        model: Function that builds the network from ``num_classes``, ``in_channels`` and ``image_size``.
        dataset: Data set of labelled images.

    Raises:
        ConfigError: If the data set contains no images.
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    sums: ClassVar[tuple[str, ...]] = ("loss", "correct", "top5", "count")

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset) -> None:
        self.dataset = require(dataset, ImageDataset, "image classification")
        self.model = model
        self.train = self.dataset.train
        self.test = self.dataset.test

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's images.

        Raises:
            ConfigError: If the network cannot take images of that size.
        """
        return self.model(
            num_classes=self.dataset.num_classes,
            in_channels=self.dataset.in_channels,
            image_size=self.dataset.image_size,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross entropy of a batch, in nats."""
        placed = place(batch, model)
        return F.cross_entropy(model(placed["images"]), placed["labels"])

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the sums named by ``sums``, to be added up over batches.

        Returns:
            Summed cross entropy in nats, number of correct images, number of images correct in the top 5, and number of
            all images: float64, shape (4,), on the model's device.
        """
        placed = place(batch, model)
        logits, labels = model(placed["images"]).double(), placed["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        higher = _count_higher(logits, labels)
        return torch.stack([loss, (higher < 1).sum(), (higher < FEW).sum(), loss.new_tensor(len(labels))])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of a whole split.

        Returns:
            ``loss``, the mean cross entropy in nats, and ``accuracy``, a fraction between 0 and 1. With more than five
            classes also ``top5_accuracy``, a fraction.
        """
        figures = {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}
        if self.dataset.num_classes > FEW:
            figures["top5_accuracy"] = sums["top5"] / sums["count"]
        return figures


def _count_higher(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the number of classes that count as higher than the right one: int64, shape (batch,)."""
    own = logits.gather(1, labels.unsqueeze(1))
    classes = torch.arange(logits.shape[1], device=logits.device)
    beaten = (logits < own) | ((logits == own) & (classes >= labels.unsqueeze(1)))
    # Negating the comparison makes the NaN logits of a diverged model count as wrong.
    return (~beaten).sum(dim=1)
