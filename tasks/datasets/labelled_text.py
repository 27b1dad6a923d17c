"""Data sets of labelled texts."""

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
    """Tokenized texts in memory, stored in flat tensors, and their labels.

    Attributes:
        tokens: Token ids of all texts, concatenated: integers, shape (tokens,).
        offsets: Start of each text in ``tokens``, and the end of the last text: int64, shape (texts + 1,). No text is
            empty.
        labels: Labels of the texts: int64, shape (texts,).
        max_tokens: Maximum number of tokens; longer texts are truncated.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"dataset.max_tokens must be at least 1, got {self.max_tokens}")

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of texts.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Not used, because nothing here is random.

        Returns:
            int64 tensors: ``tokens``, shape (batch, time), with 0 after the end of a text; ``lengths`` (numbers of
            tokens) and ``labels``, shape (batch,). ``time`` is the length of the longest text in the batch.
        """
        begin = self.offsets[indices]
        lengths = (self.offsets[indices + 1] - begin).clamp(max=self.max_tokens)
        place = torch.arange(max(lengths.tolist(), default=1))
        source = (begin.unsqueeze(1) + place).clamp(max=len(self.tokens) - 1)
        tokens = torch.where(place < lengths.unsqueeze(1), self.tokens[source].long(), PADDING)
        return {"tokens": tokens, "lengths": lengths, "labels": self.labels[indices]}


class LabelledTextDataset(Dataset):
    """Data set of texts with class labels.

    Args:
        name: Name of the data set in the configuration.
        train: Training texts: batches of ``tokens``, int64, shape (batch, time), ``lengths`` and ``labels``, int64,
            shape (batch,).
        test: Held-out texts, in the same form.
        vocab_size: Number of token ids, which are in ``[0, vocab_size)``; id 0 is the padding and every unknown word.
        num_classes: Number of classes; labels are in ``[0, num_classes)``.
        caveat: Note for readers of the results, such as that the data are placeholders.
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
    """Converts the words of texts to token ids, in tensors that can be cached. An empty text becomes an unknown word.

    Args:
        parts: Words and label of each text, by the name of the split; ``train`` must be among the splits. The iterable
            of ``train`` is read twice.
        vocab_size: Maximum number of ids. The most frequent words of the split ``train`` get an id; all other words
            share id 0.

    Returns:
        For each split, such as ``train``, three tensors: ``train.tokens`` (int32), ``train.offsets`` and
        ``train.labels`` (int64), with the shapes of :class:`LabelledTexts`.
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
    """Returns one split of the tensors that :func:`number_texts` made.

    Args:
        tensors: Result of :func:`number_texts`, of any shape.
        part: Name of the split: ``train`` or ``test``.
        max_tokens: Maximum number of tokens; longer texts are truncated.

    Raises:
        ConfigError: If ``max_tokens`` is below 1.
    """
    tokens, offsets, labels = (tensors[f"{part}.{name}"] for name in ("tokens", "offsets", "labels"))
    return LabelledTexts(tokens, offsets, labels, max_tokens)
