"""Data sets of generated images, to measure speed and as placeholder data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from tasks.datasets.images import ImageDataset, mirror_and_crop, normalise

__all__ = [
    "RepeatedSplit",
    "SyntheticSplit",
    "class_splits",
    "draw_pictures",
    "patterns",
    "stand_in_notice",
    "synthetic_images",
]

GRID = 4  # a pattern is this many squares wide and high
HALF = 128  # patterns and noise have values in [0, HALF), so that their sum is a byte
LARGEST_VALUE = 255.0
# What uniform noise plus uniform patterns come to.
MEAN = 0.5
STD = 0.2
TRAIN_SEED, TEST_SEED = 1, 2


def stand_in_notice(name: str, instead: str = "generated patterns with noise") -> str:
    """Returns one sentence that warns the user of placeholder data.

    Args:
        name: Name of the data set that is replaced.
        instead: Description of the data that replace it.
    """
    return f"placeholder data: {instead} replace dataset={name}; results say nothing about the real one"


def patterns(count: int, channels: int, seed: int = 0) -> Tensor:
    """Returns random patterns of GRID x GRID squares: uint8, shape (count, channels, GRID, GRID), in ``[0, HALF)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(HALF, (count, channels, GRID, GRID), generator=generator).to(torch.uint8)


def draw_pictures(coarse: Tensor, size: int, seed: int, indices: Tensor) -> Tensor:
    """Enlarges patterns to pictures, and adds independent noise to each.

    Args:
        coarse: Patterns: uint8, shape (count, channels, GRID, GRID), values in ``[0, HALF)``.
        size: Height and width of the pictures, in pixels.
        seed: Seed of the noise.
        indices: Indices of the pictures, shape (count,); the noise of a picture depends only on ``seed`` and its index.

    Returns:
        uint8, shape (count, channels, size, size).
    """
    pictures = torch.nn.functional.interpolate(coarse, size=(size, size))
    shape = pictures.shape[1:]
    # numpy and not torch: a torch generator is 10x slower for the noise of a large picture.
    noise = np.stack(
        [
            np.frombuffer(np.random.default_rng((seed, index)).bytes(shape.numel()), np.uint8)
            for index in indices.tolist()
        ]
    )
    return pictures + torch.from_numpy(noise % HALF).view_as(pictures)


@dataclass(frozen=True, eq=False)
class SyntheticSplit:
    """Labelled pictures, generated on access: the pattern of the class plus noise.

    Attributes:
        count: Number of pictures; picture ``i`` is of class ``i mod num_classes``.
        coarse: Pattern of each class: uint8, shape (num_classes, channels, GRID, GRID).
        size: Height and width of a picture, in pixels.
        seed: Seed of the noise.
        padding: Number of pixels by which a training picture may be shifted in each direction.
        flip: Whether every training picture is mirrored with probability 1/2.
    """

    count: int
    coarse: Tensor
    size: int
    seed: int
    padding: int = 0
    flip: bool = False

    def __len__(self) -> int:
        """Returns the number of pictures."""
        return self.count

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Generates a batch of pictures.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Source of random shifts and flips; ``None`` disables augmentation.

        Returns:
            ``images``, float32, shape (batch, channels, size, size), and ``labels``, int64, shape (batch,).
        """
        labels = indices % len(self.coarse)
        pixels = draw_pictures(self.coarse[labels], self.size, self.seed, indices)
        if generator is not None:
            pixels = mirror_and_crop(pixels, self.padding, self.flip, generator)
        images = normalise(pixels, torch.tensor([MEAN]), torch.tensor([STD]), LARGEST_VALUE)
        return {"images": images, "labels": labels}


def class_splits(
    train_size: int, test_size: int, num_classes: int, channels: int, size: int, padding: int = 0, flip: bool = False
) -> tuple[SyntheticSplit, SyntheticSplit]:
    """Returns a training split and a test split of pictures with the same class patterns, but independent noise."""
    coarse = patterns(num_classes, channels)
    return (
        SyntheticSplit(train_size, coarse, size, TRAIN_SEED, padding, flip),
        SyntheticSplit(test_size, coarse, size, TEST_SEED),
    )


@dataclass(frozen=True, eq=False)
class RepeatedSplit:
    """A few normalized pictures in memory that are used repeatedly, so that loading a batch takes almost no time.

    Attributes:
        images: Normalized pictures: float32, shape (distinct, channels, size, size).
        labels: Classes of the pictures: int64, shape (distinct,).
        count: Number of examples, including repetitions: example ``i`` is picture ``i mod distinct``.
    """

    images: Tensor
    labels: Tensor
    count: int

    def __len__(self) -> int:
        """Returns the number of pictures, including repetitions."""
        return self.count

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of pictures.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Not used, because nothing here is random.

        Returns:
            ``images``, float32, shape (batch, channels, size, size), and ``labels``, int64, shape (batch,).
        """
        chosen = indices % len(self.images)
        return {"images": self.images[chosen], "labels": self.labels[chosen]}


def synthetic_images(
    image_size: int = 224,
    num_classes: int = 1000,
    in_channels: int = 3,
    train_size: int = 50_000,
    test_size: int = 1_000,
    distinct: int = 64,
) -> ImageDataset:
    """Generates pictures to measure speed: each is the pattern of its class plus noise.

    Args:
        image_size: Height and width of a picture, in pixels.
        num_classes: Number of classes; picture ``i`` is of class ``i mod num_classes``.
        in_channels: Number of channels of a picture.
        train_size: Number of training pictures.
        test_size: Number of test pictures, which are generated on access.
        distinct: Number of different training pictures; they are kept in memory and repeated, so that the time to make
            them is not measured.

    Raises:
        ConfigError: If an option is below 1.

    Source: Zhang et al.: Decoupling the All-Reduce Primitive for Accelerating Distributed Deep Learning,
    ICDCS 2023. Its published scripts measure with random pictures of 3x224x224. It is not known whether they repeat
    the same pictures.
    """
    options = {
        "image_size": image_size,
        "num_classes": num_classes,
        "in_channels": in_channels,
        "train_size": train_size,
        "test_size": test_size,
        "distinct": distinct,
    }
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"dataset.{name} must be at least 1, got {value}")
    made, test = class_splits(train_size, test_size, num_classes, in_channels, image_size)
    train = RepeatedSplit(**made.batch(torch.arange(distinct), None), count=train_size)
    caveat = "dataset=synthetic_images is generated: use the run to measure speed, as its accuracy means nothing"
    return ImageDataset("synthetic_images", train, test, num_classes, in_channels, image_size, caveat)
