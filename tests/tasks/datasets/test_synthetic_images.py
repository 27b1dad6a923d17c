from __future__ import annotations

import dataclasses

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.synthetic_images import class_splits, draw_pictures, patterns, synthetic_images


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def split():
    return class_splits(100, 40, num_classes=7, channels=3, size=16, padding=2, flip=True)[0]


def test_a_picture_is_a_function_of_its_index(split):
    together = split.batch(torch.tensor([3, 50, 3]), None)
    alone = split.batch(torch.tensor([3]), None)
    assert torch.equal(together["images"][0], alone["images"][0])
    assert torch.equal(together["images"][0], together["images"][2])
    assert together["labels"].tolist() == [3, 1, 3]
    again = class_splits(100, 40, num_classes=7, channels=3, size=16)[0].batch(torch.tensor([3]), None)
    assert torch.equal(again["images"], alone["images"])


def test_pictures_of_a_class_differ(split):
    images = split.batch(torch.tensor([3, 10, 17]), None)["images"]
    assert not torch.equal(images[0], images[1])


def test_test_pictures_have_noise_of_their_own():
    train, test = class_splits(10, 10, num_classes=2, channels=1, size=8)
    index = torch.tensor([4])
    assert not torch.equal(train.batch(index, None)["images"], test.batch(index, None)["images"])
    assert torch.equal(train.coarse, test.coarse)


def test_chance_comes_from_the_generator_only(split):
    before = torch.get_rng_state()
    indices = torch.arange(20)
    first = split.batch(indices, seeded(1))["images"]
    assert torch.equal(first, split.batch(indices, seeded(1))["images"])
    assert not torch.equal(first, split.batch(indices, seeded(2))["images"])
    assert not torch.equal(first, split.batch(indices, None)["images"])
    assert torch.equal(before, torch.get_rng_state())


def test_training_pictures_without_augmentation(split):
    plain = dataclasses.replace(split, padding=0, flip=False)
    indices = torch.arange(20)
    assert torch.equal(plain.batch(indices, seeded(1))["images"], split.batch(indices, None)["images"])


def test_pictures_are_normalised():
    images = class_splits(500, 1, num_classes=50, channels=3, size=16)[0].batch(torch.arange(500), None)["images"]
    assert images.shape == (500, 3, 16, 16)
    assert images.dtype == torch.float32
    assert abs(images.mean().item()) < 0.1
    assert abs(images.std().item() - 1) < 0.1


def test_pictures_are_pattern_plus_noise():
    coarse = patterns(2, channels=1)
    noise = draw_pictures(torch.zeros_like(coarse), 8, seed=5, indices=torch.tensor([6, 7]))
    pictures = draw_pictures(coarse, 8, seed=5, indices=torch.tensor([6, 7]))
    assert noise.max() < 128
    enlarged = coarse.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    assert torch.equal(pictures, enlarged + noise)
    other = draw_pictures(torch.zeros_like(coarse), 8, seed=6, indices=torch.tensor([6, 7]))
    assert not torch.equal(noise, other)


def test_the_class_can_be_told_from_the_picture():
    train, test = class_splits(700, 70, num_classes=7, channels=3, size=16)
    seen, asked = train.batch(torch.arange(700), None), test.batch(torch.arange(70), None)
    means = torch.stack([seen["images"][seen["labels"] == label].mean(0) for label in range(7)])
    distances = torch.cdist(asked["images"].flatten(1), means.flatten(1))
    assert torch.equal(distances.argmin(1), asked["labels"])


def test_training_pictures_repeat():
    dataset = synthetic_images(image_size=8, num_classes=3, distinct=5)
    batch = dataset.train.batch(torch.tensor([0, 4, 5, 9, 12]), seeded(0))
    assert batch["labels"].tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(batch["images"][0], batch["images"][2])
    assert torch.equal(batch["images"][1], batch["images"][3])
    assert not torch.equal(batch["images"][0], batch["images"][1])


@pytest.mark.parametrize(("size", "channels", "classes"), [(224, 3, 1000), (299, 3, 1000), (9, 1, 2)])
def test_any_shape(size, channels, classes):
    dataset = synthetic_images(image_size=size, num_classes=classes, in_channels=channels)
    batch = dataset.train.batch(torch.tensor([1, 2]), seeded(0))
    assert batch["images"].shape == (2, channels, size, size)
    assert (dataset.image_size, dataset.in_channels, dataset.num_classes) == (size, channels, classes)
    assert (len(dataset.train), len(dataset.test)) == (50_000, 1_000)


@pytest.mark.parametrize("option", ["image_size", "num_classes", "in_channels", "train_size", "test_size", "distinct"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=f"dataset.{option} must be at least 1, got 0"):
        synthetic_images(**{option: 0})
