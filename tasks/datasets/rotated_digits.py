"""Data set of rotated digits, for regression of the angle; needs no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from tasks.datasets.digits import split_scans
from tasks.datasets.images import ImageSplit, normalise
from tasks.datasets.measured_images import MeasuredImageDataset

__all__ = ["RotatedSplit", "rotated_digits"]

SMALLEST_SIZE = 8


@dataclass(frozen=True, eq=False)
class RotatedSplit:
    """Images in memory, each of which is rotated when a batch is built.

    Attributes:
        scans: Images before the rotation, with the constants that normalize them.
        angles: Rotation of each image in evaluations, in degrees in ``[-largest_angle, largest_angle)``: float32,
            shape (count,).
        largest_angle: Largest random rotation in training, in either direction, in degrees.
        size: Height and width of the rotated images, in pixels.
    """

    scans: ImageSplit
    angles: Tensor
    largest_angle: float
    size: int

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.scans)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of rotated images and their angles.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Source of random angles; ``None`` uses ``angles``.

        Returns:
            ``images``, float32, shape (batch, channels, size, size), and ``labels``, the counter-clockwise rotations in
            degrees, float32, shape (batch,).
        """
        angles = self.angles[indices] if generator is None else _draw(len(indices), self.largest_angle, generator)
        turned = _turn(self.scans.images[indices], angles, self.size)
        images = normalise(turned, self.scans.mean, self.scans.std, self.scans.scale)
        return {"images": images, "labels": angles}


def _draw(count: int, largest: float, generator: torch.Generator) -> Tensor:
    return largest * (2 * torch.rand(count, generator=generator) - 1)


def _turn(images: Tensor, degrees: Tensor, size: int) -> Tensor:
    """Rotates images counter-clockwise and enlarges them in one interpolation; new pixels are black."""
    angles = degrees.deg2rad()
    zero = torch.zeros_like(angles)
    # The rows say where in the old image a place of the new one comes from; y points down.
    rows = [torch.stack([angles.cos(), -angles.sin(), zero], 1), torch.stack([angles.sin(), angles.cos(), zero], 1)]
    shape = [*images.shape[:2], size, size]
    grid = torch.nn.functional.affine_grid(torch.stack(rows, 1), shape, align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


def rotated_digits(image_size: int = 32, largest_angle: float = 60.0, split_seed: int = 0) -> MeasuredImageDataset:
    """Makes rotated digits from the 1,797 scans of scikit-learn: 1,438 for training and 359 for tests.

    Args:
        image_size: Height and width in pixels to which the 8x8 scans are enlarged.
        largest_angle: Largest rotation in either direction, in degrees; angles are uniform.
        split_seed: Seed of the split and the test angles, which are the same in every run.

    Returns:
        Data set of single-channel images, normalized by mean and standard deviation of the training scans; labels are
        degrees.

    Raises:
        ConfigError: If an option is out of range.

    Source: see :func:`tasks.datasets.digits.load_digits`.
    """
    if image_size < SMALLEST_SIZE:
        raise ConfigError(f"dataset.image_size must be at least {SMALLEST_SIZE}, got {image_size}")
    if not 0 < largest_angle <= 180:
        raise ConfigError(f"dataset.largest_angle must be above 0 and at most 180 degrees, got {largest_angle}")
    generator = torch.Generator().manual_seed(split_seed)
    train, test = (
        RotatedSplit(scans, _draw(len(scans), largest_angle, generator), largest_angle, image_size)
        for scans in split_scans(split_seed)
    )
    return MeasuredImageDataset(
        "rotated_digits",
        train,
        test,
        typical=torch.linspace(-largest_angle, largest_angle, 1001, dtype=torch.float64),
        in_channels=1,
        image_size=image_size,
    )
