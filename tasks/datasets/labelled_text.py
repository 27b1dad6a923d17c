"""Labelled texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from tasks.datasets.base import Dataset
from tasks.datasets.words import UNKNOWN, number_words
from trainer.task import Split

__all__ = ["LabelledTextDataset", "LabelledTexts", "number_texts", "texts_from"]

PADDING = 0  # the same id as for unknown words


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Tokenised texts in memory, stored flat, and what each is.

    Attributes:
        tokens: integers, shape (tokens,): the texts, one after the other.
        offsets: int64, shape (texts + 1,): where each text begins, and the end; no text is empty.
        labels: int64, shape (texts,).
        max_tokens: maximum number of tokens; longer texts are truncated.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"dataset.max_tokens must be at least 1, got {self.max_tokens}")

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Collects texts.

        Args:
            indices: int64, shape (batch,).
            generator: unused, since nothing here is random.

        Returns:
            int64: ``tokens``, shape (batch, time), 0 after the end of a text, ``time`` being the longest text's;
            ``lengths`` and ``labels``, shape (batch,).
        """
        begin = self.offsets[indices]
        lengths = (self.offsets[indices + 1] - begin).clamp(max=self.max_tokens)
        place = torch.arange(max(lengths.tolist(), default=1))
        source = (begin.unsqueeze(1) + place).clamp(max=len(self.tokens) - 1)
        tokens = torch.where(place < lengths.unsqueeze(1), self.tokens[source].long(), PADDING)
        return {"tokens": tokens, "lengths": lengths, "labels": self.labels[indices]}


class LabelledTextDataset(Dataset):
    """Texts with labels.

    Args:
        name: its name in the configuration.
        train: the training texts: batches of ``tokens``, int64, shape (batch, time), ``lengths`` and ``labels``,
            int64, shape (batch,).
        test: the held-out texts, in the same form.
        vocab_size: token ids are in ``[0, vocab_size)``; 0 is padding and every unknown word.
        num_classes: labels are in ``[0, num_classes)``.
        caveat: see :class:`Dataset`.
    """

    kind: ClassVar[str] = "labelled texts"
    examples: ClassVar[str] = "dataset=docstrings or imdb"

    def __init__(
        self,
        name: str,
        train: Split,
        test: Split,
        vocab_size: int,
        num_classes: int,
        caveat: str | None = None,
    ) -> None:
        super().__init__(name, caveat)
        self.train, self.test = train, test
        self.vocab_size, self.num_classes = vocab_size, num_classes


def number_texts(parts: Mapping[str, Iterable[tuple[Sequence[str], int]]], vocab_size: int) -> dict[str, Tensor]:
    """Turns words into tokens, in the form that a cache can keep.

    Args:
        parts: ``train`` and others, each (words, label) by text; may be read twice.
        vocab_size: the most ids; those of the training part's most frequent words. An empty text becomes one
            unknown word.

    Returns:
        For each part, ``PART.tokens`` (int32), ``PART.offsets`` and ``PART.labels`` (int64), as
        :class:`LabelledTexts` takes them.
    """
    numbers = number_words((words for words, _ in parts["train"]), (UNKNOWN,), vocab_size)
    tensors = {}
    for part, texts in parts.items():
        tokens, ends, labels = array("i"), array("q", [0]), array("q")
        for words, label in texts:
            tokens.extend([numbers.get(word, PADDING) for word in words] or [PADDING])
            ends.append(len(tokens))
            labels.append(label)
        tensors[f"{part}.tokens"] = torch.from_numpy(np.array(tokens, dtype=np.int32))
        tensors[f"{part}.offsets"] = torch.from_numpy(np.array(ends, dtype=np.int64))
        tensors[f"{part}.labels"] = torch.from_numpy(np.array(labels, dtype=np.int64))
    return tensors


def texts_from(tensors: Mapping[str, Tensor], part: str, max_tokens: int) -> LabelledTexts:
    """Picks one part of what :func:`number_texts` made.

    Args:
        tensors: its result.
        part: ``train`` or ``test``.
        max_tokens: longer texts are cut.

    Raises:
        ConfigError: ``max_tokens`` is under one.
    """
    tokens, offsets, labels = (tensors[f"{part}.{name}"] for name in ("tokens", "offsets", "labels"))
    return LabelledTexts(tokens, offsets, labels, max_tokens)
