"""Synthetic images, speech and tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.speech import ALPHABET, NUM_BINS, decode, encode
from tasks.datasets.synthetic_images import class_splits, draw_pictures, patterns, synthetic_images
from tasks.datasets.synthetic_speech import HIGH, LOW, WORDS, ToneSplit, tone_speech
from tasks.datasets.synthetic_tokens import synthetic_tokens
from tasks.sentence_pairs import SentencePairs


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


def test_the_class_is_visible_in_the_picture():
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


def texts(batch) -> list[str]:
    return [decode(row[:n].tolist()) for row, n in zip(batch["targets"], batch["target_lengths"], strict=True)]


def test_it_says_loudly_that_it_is_a_stand_in():
    dataset = tone_speech("an4", 7, 3)
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("an4", 7, 3)
    assert dataset.caveat.startswith("placeholder data: ")
    assert "\n" not in dataset.caveat


def test_an_utterance_is_a_function_of_its_index():
    split = ToneSplit("train", 948)
    before = torch.get_rng_state()
    first = split.batch(torch.tensor([5, 900]), torch.Generator().manual_seed(1))
    second = ToneSplit("train", 948).batch(torch.tensor([5, 900]), None)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(before, torch.get_rng_state())
    alone = split.batch(torch.tensor([900]), None)["spectrograms"][0]
    assert torch.equal(alone, first["spectrograms"][1, :, : alone.shape[1]])


def test_the_splits_have_nothing_in_common():
    indices = torch.arange(8)
    train, test = (ToneSplit(part, 8).batch(indices, None) for part in ("train", "test"))
    assert train["lengths"].tolist() != test["lengths"].tolist()
    assert train["lengths"].unique().numel() > 4


def test_one_to_three_known_words():
    said = [text.split() for text in texts(ToneSplit("train", 60).batch(torch.arange(60), None))]
    assert {len(words) for words in said} == {1, 2, 3}
    assert {word for words in said for word in words} == set(WORDS)


def test_every_character_can_be_heard():
    """The two loudest pitches in the middle of an utterance of one letter are the letter's own."""
    split = ToneSplit("train", 60)
    letters = {}
    for index in range(60):
        batch = split.batch(torch.tensor([index]), None)
        if batch["target_lengths"].item() == 1:
            frame = batch["spectrograms"][0, :, batch["lengths"].item() // 2]
            low, high = frame[:24].argmax(), 24 + frame[24:].argmax()
            letters[texts(batch)[0]] = (50 * low.item(), 50 * high.item())
    assert len(letters) > 2
    for letter, pitches in letters.items():
        label = encode(letter).item() - 1
        assert pitches == (LOW[label // len(HIGH)], HIGH[label % len(HIGH)])


def test_there_are_enough_pairs_of_pitches():
    assert len(LOW) * len(HIGH) >= len(ALPHABET)
    assert ToneSplit("test", 1).batch(torch.tensor([0]), None)["spectrograms"].shape[1] == NUM_BINS


def test_tokens_are_uniform_and_no_special_ones():
    text = synthetic_tokens(vocab_size=50, tokens=100_000)
    assert (text.name, text.vocab_size) == ("synthetic_tokens", 50)
    counts = text.train.tokens.bincount(minlength=50).double()
    assert len(text.train.tokens) == 100_000
    assert counts[:5].sum() == 0
    assert (counts[5:] / counts.sum() - 1 / 45).abs().max() < 0.003
    assert len(text.test.tokens) == 10_000
    assert not torch.equal(text.train.tokens[:100], text.test.tokens[:100])


def test_seed_determines_tokens():
    before = torch.get_rng_state()
    one, same, other = (synthetic_tokens(tokens=20_000, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.train.tokens, same.train.tokens)
    assert not torch.equal(one.train.tokens, other.train.tokens)


def test_it_says_that_it_is_random():
    assert "loss means nothing" in synthetic_tokens(tokens=10).caveat


def test_short_sequences_are_almost_full():
    text = synthetic_tokens(tokens=10)
    pairs = SentencePairs(text.train, text.vocab_size, text.special, seq_len=64)
    batch = pairs.batch(torch.arange(len(pairs)), None)
    assert batch["attention_mask"].double().mean() > 0.95
    assert 0.4 < batch["next_sentence_label"].double().mean() < 0.6
