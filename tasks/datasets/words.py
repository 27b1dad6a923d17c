"""Text in whole words."""

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
    """Checks which part of a text is to be evaluated on.

    Raises:
        ConfigError: if it is not one of the published splits.
    """
    if held_out not in HELD_OUT:
        raise ConfigError(f"dataset.held_out must be one of {', '.join(HELD_OUT)}, got {held_out}")


def words_of(text: str) -> list[str]:
    """The words of a running text, in lower case, apostrophes within them kept and all else left out."""
    return WORD.findall(text.lower())


def characters_of(line: str) -> list[str]:
    """The characters of a line, one word each; ``<unk>`` stays whole."""
    return CHARACTER.findall(line)


def number_words(texts: Iterable[Iterable[str]], reserved: Sequence[str], size: int | None = None) -> dict[str, int]:
    """Numbers words by how often they occur; what occurs first goes first among equals.

    Args:
        texts: the training texts, as words.
        reserved: words that get the first numbers, in this order, whether they occur or not.
        size: the most numbers to hand out; rarer words get none.

    Returns:
        Word to number, from 0.
    """
    counts = Counter(word for text in texts for word in text)
    ordered = dict.fromkeys([*reserved, *(word for word, _ in counts.most_common())])
    return {word: number for number, word in enumerate(list(ordered)[:size])}


def read_lines(name: str, path: Path, hint: str) -> list[list[str]]:
    """Reads a text that is tokenised already.

    Args:
        name: the data set's, for messages.
        path: a file with one sentence or paragraph a line, and spaces between words.
        hint: the fix if it is missing.

    Returns:
        The words of each line, blank lines included.

    Raises:
        DataError: see :func:`tasks.datasets.plain_text.read_text`.
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
    """Numbers the words of lines of text.

    Args:
        name: the data set's.
        train: the training lines, as words; the vocabulary is theirs, with ``<eos>`` and ``<unk>`` as 0 and 1.
        test: the held-out lines; words that the vocabulary lacks become ``<unk>``.
        vocab_size: the vocabulary's size; rarer words become ``<unk>``, and numbers may stay unused. ``None``
            takes every word.
        caveat: see :class:`tasks.datasets.base.Dataset`.

    Returns:
        A text whose lines are documents, so that language modeling closes each with ``<eos>``, as usual. It has
        no special tokens but these two, hence no use in BERT's pre-training.
    """
    numbers = number_words(train, (END, UNKNOWN), vocab_size)
    end, unknown = numbers[END], numbers[UNKNOWN]
    known, held_out = (
        Corpus.from_lines([numbers.get(word, unknown) for word in line] for line in part) for part in (train, test)
    )
    special = SpecialTokens(pad=end, unk=unknown, cls=end, sep=end, mask=unknown)
    return TextDataset(name, known, held_out, vocab_size or len(numbers), special, caveat)
