"""Data sets CIFAR-10 and CIFAR-100, read by torchvision and held in memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from spardl.basics.errors import DataError
from tasks.datasets.images import ImageDataset, ImageSplit
from tasks.datasets.synthetic_images import class_splits, stand_in_notice

__all__ = ["cifar10", "cifar100"]

MEAN = (0.491, 0.482, 0.447)
STD = (0.247, 0.243, 0.262)
LARGEST_VALUE = 255.0
IMAGE_SIZE = 32
TRAIN_SIZE, TEST_SIZE = 50_000, 10_000
# What torchvision lets through when files are missing, cut short, not pickles or of another shape.
FAULTS = (RuntimeError, OSError, EOFError, ValueError, KeyError, ImportError, pickle.UnpicklingError)


def cifar10(
    root: str, download: bool = False, crop_padding: int = 4, flip: bool = True, stand_in: bool = False
) -> ImageDataset:
    """Loads CIFAR-10: 50,000 training and 10,000 test images, 3x32x32, ten classes.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``cifar-10-batches-py``.
        download: Whether to fetch the files if they are missing; one process at a time.
        crop_padding: Number of pixels by which a training image may be shifted each way.
        flip: Whether to mirror every second training image, on average.
        stand_in: Whether to generate images instead, as placeholder data.

    Returns:
        Data set of the images; batches are normalized by the usual mean and standard deviation per channel.

    Raises:
        DataError: If the files are missing, damaged, or could not be fetched.

    Source: Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    if stand_in:
        return _stand_in("cifar10", 10, crop_padding, flip)
    from torchvision.datasets import CIFAR10  # noqa: PLC0415

    return _load(CIFAR10, "cifar10", 10, root, download, crop_padding, flip)


def cifar100(
    root: str, download: bool = False, crop_padding: int = 4, flip: bool = True, stand_in: bool = False
) -> ImageDataset:
    """Loads CIFAR-100: like :func:`cifar10`, from ``cifar-100-python``, with a hundred classes.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``cifar-100-python``.
        download: Whether to fetch the files if they are missing; one process at a time.
        crop_padding: Number of pixels by which a training image may be shifted each way.
        flip: Whether to mirror every second training image, on average.
        stand_in: Whether to generate images instead, as placeholder data.

    Returns:
        Data set of the images; batches are normalized by the usual mean and standard deviation per channel.

    Raises:
        DataError: If the files are missing, damaged, or could not be fetched.

    Source: Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    if stand_in:
        return _stand_in("cifar100", 100, crop_padding, flip)
    from torchvision.datasets import CIFAR100  # noqa: PLC0415

    return _load(CIFAR100, "cifar100", 100, root, download, crop_padding, flip)


def _stand_in(name: str, num_classes: int, crop_padding: int, flip: bool) -> ImageDataset:
    train, test = class_splits(TRAIN_SIZE, TEST_SIZE, num_classes, 3, IMAGE_SIZE, crop_padding, flip)
    return ImageDataset(name, train, test, num_classes, 3, IMAGE_SIZE, stand_in_notice(name))


def _load(
    source: Any, name: str, num_classes: int, root: str, download: bool, crop_padding: int, flip: bool
) -> ImageDataset:
    try:
        train = _split(source(root, train=True, download=download), crop_padding, flip)
        test = _split(source(root, train=False, download=False), padding=0, flip=False)
    except FAULTS as fault:
        raise DataError(_explain(Path(root) / source.base_folder, name, download, fault)) from fault
    return ImageDataset(name, train, test, num_classes, in_channels=3, image_size=IMAGE_SIZE)


def _split(raw: Any, padding: int, flip: bool) -> ImageSplit:
    images = torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(raw.targets, dtype=torch.int64)
    return ImageSplit(images, labels, torch.tensor(MEAN), torch.tensor(STD), LARGEST_VALUE, padding, flip)


def _explain(folder: Path, name: str, download: bool, fault: Exception) -> str:
    if download:
        reason = " ".join(str(fault).split())
        return (
            f"{name} cannot be downloaded into {folder}: {reason}; download it on another machine and set data_dir to "
            "its parent folder"
        )
    where, damaged = folder.absolute(), folder.exists()
    state = (
        f"damaged: {where} has missing or wrong files; delete it, then"
        if damaged
        else f"missing: {where} does not exist;"
    )
    return (
        f"{name} is {state} download it with `python train.py dataset={name} dataset.download=true`, or set "
        "SPARDL_DATA (data_dir) to its parent folder"
    )
