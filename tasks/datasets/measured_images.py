"""Images with a numerical target each, for regression."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tasks.datasets.base import Dataset
from trainer.task import Split

__all__ = ["MeasuredImageDataset"]


class MeasuredImageDataset(Dataset):
    """Images with a number each: a price, an angle.

    Args:
        name: its name in the configuration.
        train: the training images: batches of ``images``, float, shape (batch, in_channels, image_size,
            image_size), and ``labels``, float32, shape (batch,).
        test: the held-out images, in the same form.
        typical: training labels, or numbers spread like them: float64, shape (any,). A task takes from them
            the scale of the numbers; if all are positive, it may look at ratios.
        in_channels: channels of an image.
        image_size: height and width of an image, in pixels.
        caveat: see :class:`Dataset`.
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
