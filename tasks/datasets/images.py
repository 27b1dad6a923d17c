"""Labelled images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from tasks.datasets.base import Dataset
from trainer.task import Split

__all__ = ["ImageDataset", "ImageSplit", "mirror_and_crop", "normalise"]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Labelled images in memory, normalised, and augmented where a generator is given.

    Attributes:
        images: uint8 or float, shape (count, channels, height, width), values in ``[0, scale]``.
        labels: shape (count,): int64 classes, or float32 numbers to predict.
        mean: per-channel mean of the images divided by ``scale``, shape (channels,).
        std: per-channel standard deviation of the same, shape (channels,).
        scale: the largest value of a pixel.
        padding: black pixels around an image before a random crop of the image's size.
        flip: whether every second image, on average, is mirrored.

    Raises:
        ConfigError: if the padding is no number of pixels.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    scale: float
    padding: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if not is_number(int, self.padding) or self.padding < 0:
            raise ConfigError(f"dataset.crop_padding must be a whole number, at least 0, got {self.padding!r}")

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Collects images and labels.

        Args:
            indices: int64, shape (batch,).
            generator: source of the crops and flips; ``None`` leaves the images as they are.

        Returns:
            ``images``, float32, shape (batch, channels, height, width), and ``labels``, shape (batch,).
        """
        pixels = self.images[indices]
        if generator is not None:
            pixels = mirror_and_crop(pixels, self.padding, self.flip, generator)
        return {"images": normalise(pixels, self.mean, self.std, self.scale), "labels": self.labels[indices]}


def normalise(pixels: Tensor, mean: Tensor, std: Tensor, scale: float) -> Tensor:
    """Brings pixels to zero mean and unit deviation.

    Args:
        pixels: shape (count, channels, height, width), values in ``[0, scale]``.
        mean: of the pixels divided by ``scale``, shape (channels,).
        std: their deviation, shape (channels,).
        scale: the largest value of a pixel.

    Returns:
        float32, of the same shape.
    """
    shape = (1, -1, 1, 1)
    return (pixels.float() / scale - mean.view(shape)) / std.view(shape)


def mirror_and_crop(pixels: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to ``padding`` pixels each way, and mirrors every second one, on average.

    Args:
        pixels: shape (count, channels, height, width).
        padding: black pixels around an image before a crop of the image's size.
        flip: whether to mirror at all.
        generator: of the shifts and mirrors.

    Returns:
        Images of the same shape and dtype.
    """
    if not (padding or flip):
        return pixels
    count, channels, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, (padding,) * 4)
    corner = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    rows = corner[0] + torch.arange(height)
    columns = corner[1] + torch.arange(width)
    if flip:
        mirrored = torch.randint(2, (count, 1), generator=generator).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    # One gather instead of a loop over images: index (image, channel, row, column), broadcast.
    image = torch.arange(count).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]


class ImageDataset(Dataset):
    """Images with labels.

    Args:
        name: its name in the configuration.
        train: the training images: batches of ``images``, float, shape (batch, in_channels, image_size,
            image_size), and ``labels``, int64, shape (batch,).
        test: the held-out images, in the same form.
        num_classes: labels are in ``[0, num_classes)``.
        in_channels: channels of an image.
        image_size: height and width of an image, in pixels.
        caveat: see :class:`Dataset`.
    """

    kind: ClassVar[str] = "images"
    examples: ClassVar[str] = "dataset=digits, cifar10 or cifar100"

    def __init__(
        self,
        name: str,
        train: Split,
        test: Split,
        num_classes: int,
        in_channels: int,
        image_size: int,
        caveat: str | None = None,
    ) -> None:
        super().__init__(name, caveat)
        self.train, self.test = train, test
        self.num_classes, self.in_channels, self.image_size = num_classes, in_channels, image_size
