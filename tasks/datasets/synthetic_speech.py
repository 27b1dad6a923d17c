"""Generated speech, as placeholder data: each character is represented by a pair of tones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.protocol.programs import seeded_generator
from tasks.datasets.speech import ALPHABET, SAMPLE_RATE, SpeechDataset, collate, encode, spectrogram

__all__ = ["ToneSplit", "tone_speech"]

WORDS = (
    "A",
    "E",
    "I",
    "O",
    "R",
    "T",
    "X",
    "GO",
    "NO",
    "SIX",
    "TEN",
    "TWO",
    "FIVE",
    "FOUR",
    "ENTER",
    "ERASE",
    "O'CLOCK",
)
MOST_WORDS = 3
LOW = (300.0, 450.0, 600.0, 750.0, 900.0)  # hertz
HIGH = (1500.0, 1900.0, 2300.0, 2700.0, 3100.0, 3500.0)
SHORTEST, LONGEST = 960, 1920  # samples of a character: 60 to 120 ms
LOUDNESS = 0.1
NOISE = 0.005


@dataclass(frozen=True)
class ToneSplit:
    """Utterances that are generated on access, each as a function of its index.

    Attributes:
        part: Name of the split; different names give different utterances.
        count: Number of utterances.
    """

    part: str
    count: int

    def __len__(self) -> int:
        """Returns the number of utterances."""
        return self.count

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Generates a batch of utterances.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Not used, because an utterance is always the same.

        Returns:
            Batch as returned by :func:`collate`.
        """
        made = [self._utterance(index) for index in indices.tolist()]
        return collate([spectrogram(samples) for samples, _ in made], [labels for _, labels in made])

    def _utterance(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns samples and labels of an utterance."""
        generator = seeded_generator("tone speech", self.part, index)
        count = int(torch.randint(1, MOST_WORDS + 1, (), generator=generator))
        words = [WORDS[choice] for choice in torch.randint(len(WORDS), (count,), generator=generator).tolist()]
        labels = encode(" ".join(words))
        durations = torch.randint(SHORTEST, LONGEST + 1, labels.shape, generator=generator).tolist()
        clean = torch.cat([_tones(*pair) for pair in zip(labels.tolist(), durations, strict=True)])
        return clean + NOISE * torch.randn(clean.shape, generator=generator), labels


def _tones(label: int, duration: int) -> Tensor:
    """Returns the tones of a character; they rise and fall, so that two equal characters differ from a long one."""
    time = torch.arange(duration) / SAMPLE_RATE
    low, high = LOW[(label - 1) // len(HIGH)], HIGH[(label - 1) % len(HIGH)]
    envelope = torch.sin(torch.linspace(0, math.pi, duration))
    return LOUDNESS * envelope * sum(torch.sin(2 * math.pi * pitch * time) for pitch in (low, high))


def tone_speech(name: str, train: int, test: int) -> SpeechDataset:
    """Generates placeholder data for a data set of speech.

    Args:
        name: Name of the data set that is replaced.
        train: Number of training utterances.
        test: Number of test utterances.

    Returns:
        Data set whose utterances have one to three words out of 17. Alphabet and spectrograms are those of real speech.
    """
    return SpeechDataset(
        name,
        ToneSplit("train", train),
        ToneSplit("test", test),
        caveat=f"placeholder data: pairs of tones for {len(ALPHABET)} characters replace the speech of dataset={name}; "
        "results say nothing about the real one",
    )
