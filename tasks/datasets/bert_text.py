"""Data sets of text in word pieces, with the vocabulary of bert-base-uncased or one trained on the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.download import Remote, fetch
from tasks.datasets.plain_text import fetch_hint, read_text
from tasks.datasets.pydocs import load_pydocs
from tasks.datasets.text import Corpus, SpecialTokens, TextDataset
from tasks.datasets.wordpiece import encode, tokenizer_of, train_wordpiece

__all__ = ["Documents", "bert_text", "fetch_word_pieces", "learned_text", "pydocs_pieces", "read_word_pieces"]

VOCABULARY: Final = Remote(
    "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt",
    "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "bert-base-uncased/vocab.txt",
)
RECIPE = 1  # to be raised whenever the same files would give other tokens

Documents = Sequence[Sequence[str]]


def fetch_word_pieces(name: str, root: str) -> None:
    """Downloads the vocabulary of bert-base-uncased if it is missing.

    Args:
        name: Name of the data set that needs it.
        root: Data folder that receives ``bert-base-uncased/vocab.txt``.

    Raises:
        DataError: If the vocabulary cannot be fetched.
    """
    fetch(name, [VOCABULARY], Path(root))


def read_word_pieces(name: str, root: str, vocab_size: int) -> dict[str, int]:
    """Reads the vocabulary of bert-base-uncased.

    Args:
        name: Name of the data set that needs the vocabulary, for error messages.
        root: Data folder with ``bert-base-uncased/vocab.txt``, which has one word piece per line, numbered from 0.
        vocab_size: Number of word pieces that the file must contain.

    Returns:
        Id of each word piece.

    Raises:
        DataError: If the file is missing, has a different number of word pieces, or lacks BERT's special tokens.
    """
    path = Path(root) / VOCABULARY.path
    hint = fetch_hint(name, VOCABULARY.path)
    pieces = read_text(name, path, hint).removesuffix("\n").split("\n")
    numbers = {piece.removesuffix("\r"): number for number, piece in enumerate(pieces)}
    if len(numbers) != vocab_size or not numbers.keys() >= set(SpecialTokens.NAMES):
        raise DataError(
            f"{name} is damaged: {path.absolute()} has {len(numbers)} distinct word pieces, expected {vocab_size} "
            f"including {' '.join(SpecialTokens.NAMES)}; delete it, then {hint}"
        )
    return numbers


def bert_text(
    name: str,
    root: str,
    cache: str,
    vocab_size: int,
    source: Any,
    documents: Callable[[], Sequence[Documents]],
) -> TextDataset:
    """Makes a data set for BERT's pre-training; the text is tokenized once, and the tokens are cached.

    All tokens are kept in memory. They take 8 bytes per word piece, and twice as much while they are read: a gigabyte
    of text fits on a common machine, but all of Wikipedia does not.

    Args:
        name: Name of the data set.
        root: Data folder that contains the vocabulary.
        cache: Folder in which the tokens are cached.
        vocab_size: Number of word pieces that the vocabulary must contain.
        source: Description of the text in JSON types, such as sizes and times of its files. If the description changes,
            the text is tokenized again.
        documents: Function that returns the training documents and the held-out documents; a document is a list of
            sentences.

    Returns:
        Data set of the text in word pieces.

    Raises:
        DataError: If the vocabulary is missing or damaged, or the cache cannot be written.
    """
    numbers = read_word_pieces(name, root, vocab_size)
    key = {"recipe": RECIPE, "source": source, "vocabulary": fingerprint([Path(root) / VOCABULARY.path])}
    found = cached(cache, name, key, lambda: _tokenize(numbers, documents()))
    special = SpecialTokens(*(numbers[piece] for piece in SpecialTokens.NAMES))
    return TextDataset(name, _corpus(found, "train"), _corpus(found, "test"), vocab_size, special)


def learned_text(
    name: str,
    cache: str,
    vocab_size: int,
    source: Any,
    documents: Callable[[], Sequence[Documents]],
) -> TextDataset:
    """Makes a data set of text in word pieces that are learned from the training documents; the tokens are cached.

    Args:
        name: Name of the data set.
        cache: Folder in which the tokens are cached.
        vocab_size: Number of token ids; some are unused if the text is small.
        source: Description of the text in JSON types, such as sizes and times of its files. If the description changes,
            the text is tokenized again.
        documents: Function that returns the training documents and the held-out documents; a document is a list of
            sentences.

    Returns:
        Data set of the text in word pieces; ``[UNK]`` is one token.

    Raises:
        ConfigError: If there are fewer ids than single letters and special tokens.
        DataError: If the cache cannot be written.
    """
    key = {"recipe": RECIPE, "source": source, "vocab_size": vocab_size}

    def make() -> dict[str, Tensor]:
        parts = documents()
        return _tokenize(_learned_pieces(parts[0], vocab_size), parts)

    found = cached(cache, name, key, make)
    return TextDataset(name, _corpus(found, "train"), _corpus(found, "test"), vocab_size, SpecialTokens())


def _learned_pieces(documents: Documents, vocab_size: int) -> dict[str, int]:
    unknown = SpecialTokens.NAMES[SpecialTokens.unk]
    # The learner would take the mark of an unknown word for three pieces of text.
    texts = [" ".join(document).replace(unknown, " ") for document in documents]
    numbers: dict[str, int] = train_wordpiece(texts, vocab_size).get_vocab()
    if len(numbers) > vocab_size:
        raise ConfigError(
            f"dataset.vocab_size must be at least {len(numbers)} (special tokens and single letters), got {vocab_size}"
        )
    return numbers


def _tokenize(numbers: dict[str, int], parts: Sequence[Documents]) -> dict[str, Tensor]:
    tokenizer = tokenizer_of(numbers)
    tensors = {}
    for part, documents in zip(("train", "test"), parts, strict=True):
        corpus = Corpus.from_documents(encode(tokenizer, documents))
        tensors[f"{part}.tokens"] = corpus.tokens.to(torch.int32)
        tensors[f"{part}.sentences"] = corpus.sentences
        tensors[f"{part}.documents"] = corpus.documents
    return tensors


def _corpus(tensors: Mapping[str, Tensor], part: str) -> Corpus:
    return Corpus(tensors[f"{part}.tokens"].long(), tensors[f"{part}.sentences"], tensors[f"{part}.documents"])


def pydocs_pieces(name: str, vocab_size: int) -> TextDataset:
    """Loads placeholder data for text in word pieces: Python's language reference, with a vocabulary trained on it.

    Args:
        name: Name of the data set that is replaced.
        vocab_size: Number of token ids of the data set that is replaced. The result has at least as many ids, even if
            some of them do not occur.

    Returns:
        The text of :func:`tasks.datasets.pydocs.load_pydocs`, with a caveat for readers of the results.
    """
    text = load_pydocs()
    note = (
        f"placeholder data: Python's language reference, in {text.vocab_size} word pieces trained on it, replaces "
        f"dataset={name}; results say nothing about the real one"
    )
    return TextDataset(name, text.train, text.test, max(vocab_size, text.vocab_size), text.special, note)
