from __future__ import annotations

import torch

from tasks.datasets.speech import ALPHABET, NUM_BINS, decode, encode
from tasks.datasets.synthetic_speech import HIGH, LOW, WORDS, ToneSplit, tone_speech


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
