"""Data sets of images with a numerical target, for regression."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tasks.datasets.base import Dataset
from trainer.task import Split

__all__ = ["MeasuredImageDataset"]


class MeasuredImageDataset(Dataset):
    """Data set of images, each with a number as target, such as a price or an angle.

    Args:
        name: Name of the data set in the configuration.
        train: Training images: batches of ``images``, float, shape (batch, in_channels, image_size, image_size), and
            ``labels``, float32, shape (batch,).
        test: Held-out images, in the same form.
        typical: Training labels, or numbers with the same distribution: float64, shape (count,). From these numbers, a
            task computes the scale of its outputs. If all are positive, the task may evaluate relative errors.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image, in pixels.
        caveat: Note for readers of the results, such as that the data are placeholders.
    """

    kind: ClassVar[str] = "images with numbers"
    examples: ClassVar[str] = "dataset=rotated_digits or houses"

    def __init__(
        self,
        name: str,
        train: Split,
        test: Split,
        typical: Tensor,
        in_channels: int,
        image_size: int,
        caveat: str | None = None,
    ) -> None:
        super().__init__(name, caveat)
        self.train, self.test, self.typical = train, test, typical
        self.in_channels, self.image_size = in_channels, image_size
