"""Data sets of labelled images in memory."""

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
    """Labelled images in memory. Batches are normalized and, if a generator is given, augmented.

    Attributes:
        images: Images: uint8 or float, shape (count, channels, height, width), values in ``[0, scale]``.
        labels: Labels of shape (count,): int64 classes, or float32 numbers to predict.
        mean: Per-channel mean of the images divided by ``scale``, shape (channels,).
        std: Per-channel standard deviation of the images divided by ``scale``, shape (channels,).
        scale: Largest value of a pixel.
        padding: Number of black pixels added on each side of an image before a random crop of the image's size.
        flip: Whether augmentation mirrors every image with probability 1/2.

    Raises:
        ConfigError: If ``padding`` is not a number of pixels.
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
            raise ConfigError(f"dataset.crop_padding must be an integer, at least 0, got {self.padding!r}")

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.images)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of images and labels.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Source of random crops and flips; ``None`` disables augmentation.

        Returns:
            ``images``, float32, shape (batch, channels, height, width), and ``labels``, shape (batch,), with the dtype
            of the split's labels.
        """
        pixels = self.images[indices]
        if generator is not None:
            pixels = mirror_and_crop(pixels, self.padding, self.flip, generator)
        return {"images": normalise(pixels, self.mean, self.std, self.scale), "labels": self.labels[indices]}


def normalise(pixels: Tensor, mean: Tensor, std: Tensor, scale: float) -> Tensor:
    """Normalizes pixels to mean 0 and standard deviation 1 per channel.

    Args:
        pixels: Pixels of shape (count, channels, height, width), values in ``[0, scale]``.
        mean: Mean of the pixels divided by ``scale``, shape (channels,).
        std: Standard deviation of the pixels divided by ``scale``, shape (channels,).
        scale: Largest value of a pixel.

    Returns:
        Normalized pixels: float32, of the same shape.
    """
    shape = (1, -1, 1, 1)
    return (pixels.float() / scale - mean.view(shape)) / std.view(shape)


def mirror_and_crop(pixels: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shifts each image at random by up to ``padding`` pixels in each direction, and mirrors it with probability 1/2.

    Args:
        pixels: Pixels of shape (count, channels, height, width).
        padding: Largest shift in pixels; pixels that a shift adds are black.
        flip: Whether to mirror images at all.
        generator: Source of random shifts and flips.

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
    """Data set of images with class labels.

    Args:
        name: Name of the data set in the configuration.
        train: Training images: batches of ``images``, float, shape (batch, in_channels, image_size, image_size), and
            ``labels``, int64, shape (batch,).
        test: Held-out images, in the same form.
        num_classes: Number of classes; labels are in ``[0, num_classes)``.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image, in pixels.
        caveat: Note for readers of the results, such as that the data are placeholders.
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
