"""Functions for data sets of text whose tokens are words or characters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from spardl.basics.errors import ConfigError
from tasks.datasets.plain_text import read_text
from tasks.datasets.text import Corpus, SpecialTokens, TextDataset

__all__ = ["UNKNOWN", "characters_of", "check_held_out", "number_words", "read_lines", "word_dataset", "words_of"]

END, UNKNOWN = "<eos>", "<unk>"
HELD_OUT = ("test", "valid")
WORD = re.compile(r"\w+(?:'\w+)*")
CHARACTER = re.compile(f"{UNKNOWN}|.")


def check_held_out(held_out: str) -> None:
    """Checks the name of the split to evaluate on.

    Raises:
        ConfigError: If it is neither ``test`` nor ``valid``.
    """
    if held_out not in HELD_OUT:
        raise ConfigError(f"dataset.held_out must be one of {', '.join(HELD_OUT)}, got {held_out}")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation; apostrophes inside words are kept."""
    return WORD.findall(text.lower())


def characters_of(line: str) -> list[str]:
    """Returns the characters of a line as tokens; ``<unk>`` is one token."""
    return CHARACTER.findall(line)


def number_words(texts: Iterable[Iterable[str]], reserved: Sequence[str], size: int | None = None) -> dict[str, int]:
    """Numbers words by frequency, the most frequent first; of equally frequent words, the one that occurs first.

    Args:
        texts: Training texts, each a sequence of words.
        reserved: Words that get the first numbers, in this order, even if they do not occur in the texts.
        size: Maximum number of words to number; rarer words are omitted. ``None`` for no limit.

    Returns:
        Number of each word, from 0.
    """
    counts = Counter(word for text in texts for word in text)
    ordered = dict.fromkeys([*reserved, *(word for word, _ in counts.most_common())])
    return {word: number for number, word in enumerate(list(ordered)[:size])}


def read_lines(name: str, path: Path, hint: str) -> list[list[str]]:
    """Reads a text that is already tokenized.

    Args:
        name: Name of the data set, for error messages.
        path: File with one sentence or paragraph per line, and spaces between words.
        hint: Advice for the error message if the file is missing.

    Returns:
        The list of words of each line; empty for a blank line.

    Raises:
        DataError: If the file is missing, cannot be read, or contains no text.
    """
    # Not splitlines(): Unicode has line ends that are no line ends in these files.
    return [line.split() for line in read_text(name, path, hint).removesuffix("\n").split("\n")]


def word_dataset(
    name: str,
    train: Sequence[Sequence[str]],
    test: Sequence[Sequence[str]],
    vocab_size: int | None = None,
    caveat: str | None = None,
) -> TextDataset:
    """Makes a data set from lines of text whose tokens are words.

    Args:
        name: Name of the data set.
        train: Training lines, each a sequence of words. They determine the vocabulary, in which ``<eos>`` has id 0 and
            ``<unk>`` 1.
        test: Held-out lines, each a sequence of words; unknown words become ``<unk>``.
        vocab_size: Number of token ids. Words that are too rare for an id become ``<unk>``; if there are fewer words
            than ids, some ids are unused. ``None`` gives an id to every word.
        caveat: Note for readers of the results, such as that the data are placeholders.

    Returns:
        Data set in which each line is a document, so that language modeling appends ``<eos>`` to each line, as usual.
        Its only special tokens are ``<eos>`` and ``<unk>``, so BERT's pre-training cannot use it.
    """
    numbers = number_words(train, (END, UNKNOWN), vocab_size)
    end, unknown = numbers[END], numbers[UNKNOWN]
    known, held_out = (
        Corpus.from_lines([numbers.get(word, unknown) for word in line] for line in part) for part in (train, test)
    )
    special = SpecialTokens(pad=end, unk=unknown, cls=end, sep=end, mask=unknown)
    return TextDataset(name, known, held_out, vocab_size or len(numbers), special, caveat)
