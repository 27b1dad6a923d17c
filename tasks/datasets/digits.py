"""Data set of scikit-learn's handwritten digits; needs no download."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.datasets.images import ImageDataset, ImageSplit

__all__ = ["load_digits", "split_scans"]

LARGEST_VALUE = 16.0
NUM_CLASSES = 10
TEST_FRACTION = 0.2


def load_digits(crop_padding: int = 1, split_seed: int = 0) -> ImageDataset:
    """Loads the 1,797 scans of handwritten digits, 8x8 pixels with values 0 to 16: 1,438 for training, 359 for tests.

    Args:
        crop_padding: Number of pixels by which a training image may be shifted each way.
        split_seed: Seed of the random split. It is not the seed of a run, so all runs have the same split. Both parts
            have nearly the same share of each class.

    Returns:
        Data set of ten classes of single-channel images, normalized by mean and standard deviation of the training
        images.

    Source: Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    train, test = split_scans(split_seed, crop_padding)
    return ImageDataset("digits", train, test, NUM_CLASSES, in_channels=1, image_size=train.images.shape[-1])


def split_scans(split_seed: int = 0, crop_padding: int = 0) -> tuple[ImageSplit, ImageSplit]:
    """Returns the training split and the test split of the scans; arguments are those of :func:`load_digits`."""
    # Imported late: scikit-learn takes a second, and only these data need it.
    from sklearn import datasets  # noqa: PLC0415

    raw = datasets.load_digits()
    images = torch.from_numpy(raw.images).float().unsqueeze(1)
    labels = torch.from_numpy(raw.target).long()
    test = _stratified(labels, split_seed)
    training = images[~test] / LARGEST_VALUE
    mean, std = training.mean().view(1), training.std().view(1)
    return (
        ImageSplit(images[~test], labels[~test], mean, std, LARGEST_VALUE, padding=crop_padding),
        ImageSplit(images[test], labels[test], mean, std, LARGEST_VALUE),
    )


def _stratified(labels: Tensor, seed: int) -> Tensor:
    """Marks the test examples: the same fraction of every class, chosen at random."""
    generator = torch.Generator().manual_seed(seed)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(NUM_CLASSES):
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        test[members[order[: round(TEST_FRACTION * len(members))]]] = True
    return test
