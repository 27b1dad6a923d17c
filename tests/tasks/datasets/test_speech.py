from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.datasets.speech import (
    ALPHABET,
    BLANK,
    NUM_BINS,
    NUM_LABELS,
    SpeechSplit,
    collate,
    decode,
    encode,
    spectrogram,
)


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(text):
    labels = encode(text)
    assert labels.dtype == torch.int64
    assert BLANK not in labels
    assert decode(labels.tolist()) == text


def test_the_labels_are_blank_apostrophe_letters_space():
    assert NUM_LABELS == 29
    assert encode("'AZ ").tolist() == [1, 2, 27, 28]
    with pytest.raises(ValueError, match="substring"):
        encode("a")


def test_a_tone_is_loudest_in_its_bin():
    tone = 0.5 * torch.sin(2 * math.pi * 1000 * torch.arange(3200) / 16000)
    frames = spectrogram(tone)
    assert frames.shape == (1 + 3200 // 160, NUM_BINS)
    assert frames.dtype == torch.float32
    assert (frames[2:-2].argmax(dim=1) == 1000 // 50).all()


def test_a_frame_by_hand():
    samples = torch.randn(1600)
    # Frame 3 is centred on sample 480: a periodic Hamming window over samples 320 to 639.
    ramp = torch.arange(320).double()
    window = 0.54 - 0.46 * torch.cos(2 * math.pi * ramp / 320)
    angles = 2 * math.pi * torch.outer(torch.arange(NUM_BINS).double(), ramp) / 320
    parts = [wave(angles) @ (window * samples[320:640]) for wave in (torch.cos, torch.sin)]
    expected = torch.hypot(*parts).log1p()
    frame = spectrogram(samples)[3].double()
    # Normalised, so equal up to a scale and a shift.
    scale = frame.std() / expected.std()
    torch.testing.assert_close(frame - frame.mean(), scale * (expected - expected.mean()), rtol=0, atol=1e-4)


def test_an_utterance_has_mean_zero_and_deviation_one():
    frames = spectrogram(0.01 * torch.randn(8000))
    assert frames.mean().item() == pytest.approx(0, abs=1e-4)
    assert frames.std().item() == pytest.approx(1, rel=1e-4)


def test_silence_is_no_fault():
    assert (spectrogram(torch.zeros(1600)) == 0).all()


def test_utterances_are_padded_to_the_longest():
    batch = collate([torch.ones(3, 2), 2 * torch.ones(5, 2)], [torch.tensor([4, 5]), torch.tensor([6])])
    assert batch["spectrograms"].shape == (2, 2, 5)
    assert batch["spectrograms"].sum(dim=1).tolist() == [[2, 2, 2, 0, 0], [4, 4, 4, 4, 4]]
    assert batch["lengths"].tolist() == [3, 5]
    assert batch["targets"].tolist() == [[4, 5], [6, 0]]
    assert batch["target_lengths"].tolist() == [2, 1]


@pytest.fixture
def split() -> SpeechSplit:
    """Three utterances of 4, 2 and 7 frames."""
    starts = torch.tensor([0, 4, 6, 13])
    return SpeechSplit(torch.randn(13, NUM_BINS).half(), starts, [encode(text) for text in ("YES", "NO", "GO ON")])


def test_a_split_hands_out_what_was_asked_for(split):
    batch = split.batch(torch.tensor([2, 1]), None)
    assert len(split) == 3
    assert batch["spectrograms"].dtype == torch.float32
    assert torch.equal(batch["spectrograms"][0].t(), split.frames[6:13].float())
    assert torch.equal(batch["spectrograms"][1].t()[:2], split.frames[4:6].float())
    assert batch["lengths"].tolist() == [7, 2]
    assert [decode(row[:n].tolist()) for row, n in zip(batch["targets"], batch["target_lengths"], strict=True)] == [
        "GO ON",
        "NO",
    ]


def test_a_batch_is_a_function_of_its_indices(split):
    before = torch.get_rng_state()
    first = split.batch(torch.tensor([0, 2]), torch.Generator().manual_seed(1))
    second = split.batch(torch.tensor([0, 2]), None)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(before, torch.get_rng_state())
