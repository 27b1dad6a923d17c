from __future__ import annotations

import dataclasses

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.base import require
from tasks.datasets.images import ImageDataset
from tasks.datasets.text import Corpus, TextDataset


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels_of(split, batch):
    """Undoes the normalisation: whole pixel values again."""
    scaled = batch["images"] * split.std.view(1, -1, 1, 1) + split.mean.view(1, -1, 1, 1)
    return (scaled * split.scale).round().to(torch.uint8)


def test_without_a_generator_images_are_only_normalised(tiny_images):
    indices = torch.tensor([4, 0, 4])
    batch = tiny_images.train.batch(indices, None)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].tolist() == [1, 0, 1]
    assert torch.equal(pixels_of(tiny_images.train, batch), tiny_images.train.images[indices])
    value = tiny_images.train.images[4, 2, 1, 3].item()
    assert batch["images"][0, 2, 1, 3].item() == pytest.approx((value / 255 - 0.3) / 1.0)


def test_same_generator_state_same_batch(tiny_images):
    indices = torch.arange(6)
    first = tiny_images.train.batch(indices, seeded(1))["images"]
    assert torch.equal(first, tiny_images.train.batch(indices, seeded(1))["images"])
    assert not torch.equal(first, tiny_images.train.batch(indices, seeded(2))["images"])


def test_augmentation_leaves_the_global_generator_alone(tiny_images):
    before = torch.get_rng_state()
    tiny_images.train.batch(torch.arange(6), seeded(1))
    assert torch.equal(before, torch.get_rng_state())


def test_augmentation_only_shifts_and_mirrors(tiny_images):
    split = tiny_images.train
    indices = torch.zeros(1000, dtype=torch.long)
    drawn = {bytes(p.flatten().tolist()) for p in pixels_of(split, split.batch(indices, seeded(0)))}
    padded = torch.nn.functional.pad(split.images[0], (1, 1, 1, 1))
    crops = [padded[:, top : top + 4, left : left + 4] for top in range(3) for left in range(3)]
    crops += [crop.flip(2) for crop in crops]
    assert drawn == {bytes(crop.flatten().tolist()) for crop in crops}


def test_flip_off_only_shifts(tiny_images):
    split = dataclasses.replace(tiny_images.train, flip=False, padding=0)
    batch = split.batch(torch.arange(6), seeded(0))
    assert torch.equal(pixels_of(split, batch), split.images)


def test_no_shift_only_mirrors(tiny_images):
    split = dataclasses.replace(tiny_images.train, padding=0)
    drawn = pixels_of(split, split.batch(torch.zeros(50, dtype=torch.long), seeded(0)))
    assert {bytes(p.flatten().tolist()) for p in drawn} == {
        bytes(p.flatten().tolist()) for p in (split.images[0], split.images[0].flip(2))
    }


def test_images_of_a_batch_are_augmented_independently(tiny_images):
    images = tiny_images.train.batch(torch.zeros(50, dtype=torch.long), seeded(3))["images"]
    assert len(images.unique(dim=0)) > 5


def test_corpus_leaves_out_what_is_empty():
    corpus = Corpus.from_documents([[[7, 8], [], [9]], [], [[]], [[5]]])
    assert corpus.tokens.tolist() == [7, 8, 9, 5]
    assert corpus.sentences.tolist() == [0, 2, 3, 4]
    assert corpus.documents.tolist() == [0, 2, 3]


def test_require_returns_what_fits(tiny_images, tiny_text):
    assert require(tiny_images, ImageDataset, "x") is tiny_images
    assert require(tiny_text, TextDataset, "x") is tiny_text


def test_require_names_what_fits_in_one_line(digits):
    with pytest.raises(ConfigError) as caught:
        require(digits, TextDataset, "bert pre-training")
    assert str(caught.value) == (
        "bert pre-training needs a data set of text, but dataset=digits contains images; use dataset=pydocs"
    )
