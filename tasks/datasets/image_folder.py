"""Data set of ImageNet, or of any images in one folder per class; images are decoded on access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.images import ImageDataset, normalise
from tasks.datasets.synthetic_images import class_splits, stand_in_notice

__all__ = ["Crop", "FolderSplit", "draw_crops", "imagenet"]

NAME = "imagenet"
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
LARGEST_VALUE = 255.0
# Evaluation shrinks to 256 pixels for a crop of 224.
MARGIN = 256 / 224
NUM_CLASSES, TRAIN_SIZE, TEST_SIZE = 1000, 1_281_167, 50_000
SMALLEST_AREA = 0.08
LARGEST_RATIO = 4 / 3
ATTEMPTS = 10
LAYOUT = "CLASS/PICTURE.JPEG in train and val"


class Crop(NamedTuple):
    """Random choices for a crop of a picture whose size is not known yet; see :func:`draw_crops`.

    The crop has the first pair of area and ratio that fits into the picture. If none fits, it is a center crop.

    Attributes:
        areas: Areas to try, as shares of the picture's area.
        ratios: Ratio of width to height for each of these areas.
        left: Horizontal position of the crop, from 0 (at the left border) to 1 (at the right border).
        top: Vertical position of the crop, from 0 (at the top) to 1 (at the bottom).
        mirrored: Whether left and right are swapped.
    """

    areas: Sequence[float]
    ratios: Sequence[float]
    left: float
    top: float
    mirrored: bool


def draw_crops(count: int, generator: torch.Generator) -> list[Crop]:
    """Draws random crops of pictures whose size need not be known yet.

    Args:
        count: Number of pictures.
        generator: Source of all random numbers.

    Returns:
        One crop per picture.

    Source: Szegedy et al.: Going Deeper with Convolutions, CVPR 2015, section 6: 8 to 100 per cent of the
    area, sides between 3:4 and 4:3.
    """
    areas = SMALLEST_AREA + (1 - SMALLEST_AREA) * torch.rand(count, ATTEMPTS, generator=generator)
    ratios = LARGEST_RATIO ** (2 * torch.rand(count, ATTEMPTS, generator=generator) - 1)
    place = torch.rand(count, 2, generator=generator)
    mirrored = torch.randint(2, (count,), generator=generator)
    rows = zip(areas.tolist(), ratios.tolist(), place.tolist(), mirrored.tolist(), strict=True)
    return [Crop(area, ratio, left, top, bool(mirror)) for area, ratio, (left, top), mirror in rows]


def _box(crop: Crop, width: int, height: int) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of the first attempt that fits, or of the center of the picture."""
    for area, ratio in zip(crop.areas, crop.ratios, strict=True):
        wide = round(math.sqrt(area * width * height * ratio))
        high = round(math.sqrt(area * width * height / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return round(crop.top * (height - high)), round(crop.left * (width - wide)), high, wide
    wide = min(width, round(height * LARGEST_RATIO))
    high = min(height, round(width * LARGEST_RATIO))
    return (height - high) // 2, (width - wide) // 2, high, wide


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Labelled pictures that are read from files on access.

    Attributes:
        folder: Folder that all paths are relative to.
        paths: Paths of all pictures, in UTF-8, concatenated: uint8, shape (bytes,).
        ends: End of each path in ``paths``: int64, shape (count,).
        labels: Classes of the pictures: int64, shape (count,).
        size: Height and width of the pictures in a batch, in pixels.
        threads: Number of threads that decode at the same time.
        slow: Whether batches are loaded ahead in a thread; see :class:`trainer.task.Split`.
    """

    folder: Path
    paths: Tensor
    ends: Tensor
    labels: Tensor
    size: int
    threads: int

    slow: ClassVar[bool] = True

    def __len__(self) -> int:
        """Returns the number of pictures."""
        return len(self.ends)

    def path(self, index: int) -> Path:
        """Returns the path of the picture at position ``index``."""
        start = int(self.ends[index - 1]) if index else 0
        return self.folder / self.paths[start : int(self.ends[index])].numpy().tobytes().decode()

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Reads a batch of pictures.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Source of random crops and flips; ``None`` uses the center of each picture.

        Returns:
            ``images``, float32, shape (batch, 3, size, size), and ``labels``, int64, shape (batch,).

        Raises:
            DataError: If a file is missing, or is not a complete picture.
        """
        files = [self.path(index) for index in indices.tolist()]
        crops = [None] * len(files) if generator is None else draw_crops(len(files), generator)
        with ThreadPoolExecutor(self.threads) as pool:
            pixels = torch.stack(list(pool.map(self._read, files, crops)))
        images = normalise(pixels, torch.tensor(MEAN), torch.tensor(STD), LARGEST_VALUE)
        return {"images": images, "labels": self.labels[indices]}

    def _read(self, path: Path, crop: Crop | None) -> Tensor:
        from PIL import Image  # noqa: PLC0415

        try:
            with Image.open(path) as picture:
                return _cut(picture.convert("RGB"), crop, self.size)
        except (OSError, ValueError, SyntaxError) as fault:
            reason = " ".join(str(fault).split())
            raise DataError(f"{NAME} is damaged: {path} cannot be decoded ({reason}); replace or delete it") from fault


def _cut(picture: Any, crop: Crop | None, size: int) -> Tensor:
    """Returns a crop of a picture: uint8, shape (3, size, size)."""
    from torchvision.transforms.v2 import functional  # noqa: PLC0415

    if crop is None:
        picture = functional.center_crop(functional.resize(picture, [round(MARGIN * size)]), [size, size])
    else:
        picture = functional.resized_crop(picture, *_box(crop, *picture.size), [size, size])
        picture = functional.horizontal_flip(picture) if crop.mirrored else picture
    pixels: Tensor = functional.pil_to_tensor(picture)
    return pixels


def imagenet(
    root: str,
    download: bool = False,
    cache: str = "~/.cache/spardl",
    image_size: int = 224,
    threads: int = 4,
    stand_in: bool = False,
) -> ImageDataset:
    """Opens ImageNet (ILSVRC 2012), or pictures in the same layout, from ``imagenet`` under ``root``.

    Training pictures are random crops, mirrored with probability 1/2; test pictures are center crops.

    Args:
        root: Folder that holds ``imagenet/train/CLASS/*.JPEG`` and ``imagenet/val/CLASS/*.JPEG``.
        download: Not supported; the error message states where to get the data.
        cache: Folder in which the list of files is cached, because making it takes a minute.
        image_size: Height and width of the crops, in pixels.
        threads: Number of threads per worker that decode pictures.
        stand_in: Whether to generate pictures instead, as placeholder data.

    Returns:
        Data set with one class per folder in ``train``: 1,000 classes in the complete ImageNet.

    Raises:
        ConfigError: If an option is below 1.
        DataError: If folders are missing or empty, or ``download`` is set.

    Source: Russakovsky et al.: ImageNet Large Scale Visual Recognition Challenge, IJCV 2015. Crops for training are
    those of :func:`draw_crops`; crops for tests are those of He et al., CVPR 2016.
    """
    for option, value in {"image_size": image_size, "threads": threads}.items():
        if value < 1:
            raise ConfigError(f"dataset.{option} must be at least 1, got {value}")
    if stand_in:
        made = class_splits(TRAIN_SIZE, TEST_SIZE, NUM_CLASSES, 3, image_size, flip=True)
        return ImageDataset(NAME, *made, NUM_CLASSES, 3, image_size, stand_in_notice(NAME))
    folder = Path(root).expanduser().absolute() / NAME
    classes = _classes(folder / "train", download)
    if _classes(folder / "val", download) != classes:
        raise DataError(
            f"{NAME} is damaged: {folder / 'val'} and {folder / 'train'} have different class folders; unpack both "
            "again"
        )
    train, test = (_open(folder / part, classes, cache, image_size, threads) for part in ("train", "val"))
    return ImageDataset(NAME, train, test, len(classes), in_channels=3, image_size=image_size)


def _classes(folder: Path, download: bool) -> list[str]:
    """Returns the names of the class folders, sorted."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if names:
        return names
    refused = ", and dataset.download=true cannot fetch it (image-net.org requires an account)" if download else ""
    raise DataError(
        f"{NAME} is missing: {folder} has no class folders{refused}; download ILSVRC 2012 from image-net.org, unpack "
        f"it as {LAYOUT}, and set SPARDL_DATA (data_dir) to the parent of its folder {NAME}"
    )


def _open(folder: Path, classes: Sequence[str], cache: str, size: int, threads: int) -> FolderSplit:
    # A class folder's time of change tells of every file that comes or goes.
    key = {"folder": str(folder), "classes": fingerprint(folder / name for name in classes)}
    found = cached(cache, f"{NAME}-{folder.name}", key, lambda: _list_files(folder))
    return FolderSplit(folder, found["paths"], found["ends"], found["labels"], size, threads)


def _list_files(folder: Path) -> dict[str, Tensor]:
    from torchvision.datasets import ImageFolder  # noqa: PLC0415

    try:
        samples = ImageFolder(folder).samples
    except FileNotFoundError as fault:
        reason = " ".join(str(fault).split())
        raise DataError(f"{NAME} is damaged: {folder} cannot be read ({reason}); unpack it again") from fault
    names = [Path(path).relative_to(folder).as_posix().encode() for path, _ in samples]
    return {
        "paths": torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
        "ends": torch.tensor([len(name) for name in names]).cumsum(0),
        "labels": torch.tensor([label for _, label in samples]),
    }
