"""Data sets of speech: spectrograms and transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.datasets.base import Dataset
from trainer.task import Split

__all__ = [
    "ALPHABET",
    "BLANK",
    "NUM_BINS",
    "NUM_LABELS",
    "SAMPLE_RATE",
    "SHORTEST",
    "SpeechDataset",
    "SpeechSplit",
    "collate",
    "decode",
    "encode",
    "spectrogram",
]

SAMPLE_RATE = 16_000
WINDOW = 320  # samples: 20 ms
STRIDE = 160  # samples: 10 ms
NUM_BINS = WINDOW // 2 + 1
SHORTEST = WINDOW  # samples; less is no speech, and the reflected edges need more than half a window

BLANK = 0
ALPHABET = "'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # label 1, 2, ...
NUM_LABELS = 1 + len(ALPHABET)


def encode(text: str) -> Tensor:
    """Converts a text to labels, the positions of its characters in ``ALPHABET`` plus 1: int64, shape (characters,).

    Raises:
        ValueError: If a character is not in the alphabet.
    """
    return torch.tensor([ALPHABET.index(character) + 1 for character in text], dtype=torch.int64)


def decode(labels: Iterable[int]) -> str:
    """Converts labels to text, the inverse of :func:`encode`; no label may be ``BLANK``."""
    return "".join(ALPHABET[label - 1] for label in labels)


def spectrogram(samples: Tensor) -> Tensor:
    """Computes the spectrogram ``log(1 + magnitude)``, normalized to mean 0 and standard deviation 1 per utterance.

    Args:
        samples: At least ``SHORTEST`` audio samples, ``SAMPLE_RATE`` per second: float32, shape (samples,).

    Returns:
        Spectrogram, float32, shape (frames, NUM_BINS). A frame is a Hamming window of 20 ms; there is one every 10 ms,
        centered, and the audio is reflected at its edges.

    Source: Amodei et al.: Deep Speech 2, ICML 2016.
    """
    window = torch.hamming_window(WINDOW)
    magnitude = torch.stft(samples, WINDOW, STRIDE, window=window, return_complex=True).abs()
    loudness = magnitude.log1p()
    return ((loudness - loudness.mean()) / loudness.std().clamp(min=1e-5)).t().contiguous()


def collate(spectrograms: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Combines utterances into a batch, padded with zeros to the longest.

    Args:
        spectrograms: Spectrogram of each utterance: float, shape (frames, NUM_BINS).
        labels: Labels of each utterance: integers, shape (characters,).

    Returns:
        ``spectrograms``, float32, shape (batch, NUM_BINS, frames); ``lengths``, their numbers of frames, int64, shape
        (batch,); ``targets``, the labels, int64, shape (batch, characters); ``target_lengths``, their numbers of
        characters, int64, shape (batch,).
    """
    return {
        "spectrograms": pad_sequence([item.float() for item in spectrograms], batch_first=True).transpose(1, 2),
        "lengths": torch.tensor([len(item) for item in spectrograms]),
        "targets": pad_sequence([item.long() for item in labels], batch_first=True),
        "target_lengths": torch.tensor([len(item) for item in labels]),
    }


@dataclass(frozen=True, eq=False)
class SpeechSplit:
    """Utterances in memory, with all spectrograms concatenated in one tensor.

    Attributes:
        frames: Frames of all spectrograms: float, shape (frames, NUM_BINS).
        starts: Start of each utterance in ``frames``, and the end of the last one: int64, shape (utterances + 1,).
        labels: Labels of each utterance: int64, shape (characters,).
    """

    frames: Tensor
    starts: Tensor
    labels: Sequence[Tensor]

    def __len__(self) -> int:
        """Returns the number of utterances."""
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of utterances.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Not used, because nothing here is random.

        Returns:
            Batch as returned by :func:`collate`.
        """
        chosen = indices.tolist()
        spectrograms = [self.frames[self.starts[i] : self.starts[i + 1]] for i in chosen]
        return collate(spectrograms, [self.labels[i] for i in chosen])


class SpeechDataset(Dataset):
    """Data set of speech with transcripts.

    Args:
        name: Name of the data set in the configuration.
        train: Training utterances, in batches as returned by :func:`collate`.
        test: Held-out utterances, in the same form.
        caveat: Note for readers of the results, such as that the data are placeholders.
    """

    kind: ClassVar[str] = "speech"
    examples: ClassVar[str] = "dataset=an4 or synthetic_an4"

    def __init__(self, name: str, train: Split, test: Split, caveat: str | None = None) -> None:
        super().__init__(name, caveat)
        self.train, self.test = train, test
        self.num_bins, self.num_labels = NUM_BINS, NUM_LABELS
