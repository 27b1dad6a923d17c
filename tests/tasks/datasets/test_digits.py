from __future__ import annotations

import torch

from tasks.datasets.digits import load_digits


def rows(split) -> set[bytes]:
    return {bytes(image.to(torch.uint8).flatten().tolist()) for image in split.images}


def test_sizes_and_values(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.train.images.shape[1:] == (1, 8, 8)
    assert digits.train.images.max() == 16
    assert (digits.in_channels, digits.image_size, digits.num_classes) == (1, 8, 10)


def test_splits_are_disjoint_and_complete(digits):
    assert len(rows(digits.train) | rows(digits.test)) == 1797
    assert not rows(digits.train) & rows(digits.test)


def test_classes_are_split_evenly(digits):
    whole = digits.train.labels.bincount() + digits.test.labels.bincount()
    assert (digits.test.labels.bincount() / whole - 0.2).abs().max() < 0.005


def test_the_split_is_the_same_every_time_and_follows_the_seed(digits):
    assert torch.equal(load_digits().test.images, digits.test.images)
    assert rows(load_digits(split_seed=1).test) != rows(digits.test)


def test_training_images_are_normalised(digits):
    images = digits.train.batch(torch.arange(len(digits.train)), None)["images"]
    assert abs(images.mean().item()) < 1e-4
    assert abs(images.std().item() - 1) < 1e-4


def test_only_training_images_are_shifted(digits):
    indices = torch.arange(20)
    generator = torch.Generator().manual_seed(0)
    plain = digits.test.batch(indices, None)["images"]
    assert torch.equal(digits.test.batch(indices, generator)["images"], plain)
    assert not torch.equal(
        digits.train.batch(indices, generator)["images"], digits.train.batch(indices, None)["images"]
    )
