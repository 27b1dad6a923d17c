"""Data sets of text as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tasks.datasets.base import Dataset

__all__ = ["Corpus", "SpecialTokens", "TextDataset"]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that BERT's input format adds to words.

    In a vocabulary that was not made for BERT, several of these tokens may share an id. BERT's pre-training needs five
    different ids.
    """

    pad: int = 0
    unk: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    NAMES: ClassVar[tuple[str, ...]] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

    @property
    def ids(self) -> list[int]:
        """The different ids, in increasing order."""
        return sorted(set(astuple(self)))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text with its sentences and documents, stored in flat tensors.

    Attributes:
        tokens: Token ids of all sentences, without special tokens: int64, shape (tokens,).
        sentences: Start of each sentence in ``tokens``, and the end of the last: int64, shape (sentences + 1,).
        documents: Start of each document in ``sentences``, and the end of the last: int64, shape (documents + 1,).
    """

    tokens: Tensor
    sentences: Tensor
    documents: Tensor

    @classmethod
    def from_documents(cls, documents: Iterable[Iterable[Sequence[int]]]) -> Corpus:
        """Makes a corpus from documents, which contain sentences of token ids; skips empty sentences and documents."""
        tokens, sentences, ends = array("q"), array("q", [0]), array("q", [0])
        for document in documents:
            for sentence in filter(len, document):
                tokens.extend(sentence)
                sentences.append(len(tokens))
            if len(sentences) - 1 > ends[-1]:
                ends.append(len(sentences) - 1)
        return cls(_tensor(tokens), _tensor(sentences), _tensor(ends))

    @classmethod
    def from_lines(cls, lines: Iterable[Sequence[int]]) -> Corpus:
        """Makes a corpus from lines of token ids: each line becomes a document of one sentence, even if it is empty."""
        tokens, ends = array("q"), array("q", [0])
        for line in lines:
            tokens.extend(line)
            ends.append(len(tokens))
        return cls(_tensor(tokens), _tensor(ends), torch.arange(len(ends)))


def _tensor(values: array[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))


class TextDataset(Dataset):
    """Data set of text as token ids.

    Args:
        name: Name of the data set in the configuration.
        train: Corpus of the training documents.
        test: Corpus of the held-out documents.
        vocab_size: Number of token ids, which are in ``[0, vocab_size)``.
        special: Ids of the special tokens.
        caveat: Note for readers of the results, such as that the data are placeholders.
    """

    kind: ClassVar[str] = "text"
    examples: ClassVar[str] = "dataset=pydocs"

    def __init__(
        self,
        name: str,
        train: Corpus,
        test: Corpus,
        vocab_size: int,
        special: SpecialTokens,
        caveat: str | None = None,
    ) -> None:
        super().__init__(name, caveat)
        self.train, self.test = train, test
        self.vocab_size, self.special = vocab_size, special
