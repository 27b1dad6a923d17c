"""Python's language reference, which ``help()`` shows: English text without a download."""

from __future__ import annotations

import re
from collections.abc import Mapping

from spardl.basics.errors import DataError
from tasks.datasets.text import Corpus, SpecialTokens, TextDataset
from tasks.datasets.wordpiece import encode, train_wordpiece
from tasks.datasets.words import characters_of, word_dataset

__all__ = [
    "load_pydocs",
    "load_pydocs_chars",
    "paragraphs_of",
    "pydocs_chars",
    "pydocs_words",
    "sentences_of",
    "split_documents",
]

TEST_FRACTION = 0.1
SHORTEST_DOCUMENT = 200
PARAGRAPH_END = re.compile(r"\n\s*\n")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[\"“(*]?[A-Z])")
WORD = re.compile(r"\w+|[^\w\s]")
RULER = re.compile(r"([*=\-^~])\1{3,}")


def load_pydocs(vocab_size: int = 4000) -> TextDataset:
    """Tokenises the topics of Python's language reference, about 340,000 characters of text.

    Each topic is a document. Many topics repeat others whole; every paragraph is kept once only, so
    that no test paragraph was trained on. The vocabulary is learned from the training documents.
    The text is part of the interpreter: results compare only between equal Python versions.

    Args:
        vocab_size: the most token ids; the text has no use for more than about 5,500.

    Returns:
        About 90% of the text to train on, the rest to test, split by document, always the same way.

    Raises:
        DataError: this Python was packaged without ``pydoc_data``.

    Source: ``pydoc_data.topics`` of CPython's standard library (PSF licence).
    """
    train, test = split_documents(paragraphs_of(_topics()))
    tokenizer = train_wordpiece([" ".join(document) for document in train], vocab_size)
    return TextDataset(
        name="pydocs",
        train=Corpus.from_documents(encode(tokenizer, map(sentences_of, train))),
        test=Corpus.from_documents(encode(tokenizer, map(sentences_of, test))),
        vocab_size=tokenizer.get_vocab_size(),
        special=SpecialTokens(),
    )


def load_pydocs_chars(vocab_size: int = 96) -> TextDataset:
    """The same topics, split in the same way, character by character: a paragraph a line, about 300,000 to train on.

    The text is part of the interpreter: results compare only between equal Python versions.

    Args:
        vocab_size: number of token ids: the most frequent characters, ``<eos>`` after every line, and ``<unk>``. With
            96, a character is known that occurs some ten times.

    Returns:
        Characters as tokens; every paragraph is a document.

    Raises:
        DataError: this Python was packaged without ``pydoc_data``.

    Source: see :func:`load_pydocs`.
    """
    return _characters("pydocs_chars", vocab_size)


def pydocs_chars(name: str, vocab_size: int) -> TextDataset:
    """Placeholder for text in characters: what :func:`load_pydocs_chars` returns, with a caveat.

    Args:
        name: of the data set whose place it takes.
        vocab_size: number of token ids.
    """
    return _characters(name, vocab_size, _note(name))


def _characters(name: str, vocab_size: int, caveat: str | None = None) -> TextDataset:
    train, test = (
        [characters_of(paragraph) for document in part for paragraph in document]
        for part in split_documents(paragraphs_of(_topics()))
    )
    return word_dataset(name, train, test, vocab_size, caveat)


def pydocs_words(name: str, vocab_size: int) -> TextDataset:
    """Placeholder for text in whole words: the same topics, a sentence a line, lower case.

    Args:
        name: of the data set whose place it takes.
        vocab_size: declared; the text itself has about 3,500 words.

    Returns:
        Words and single punctuation marks as tokens.

    Raises:
        DataError: this Python was packaged without ``pydoc_data``.
    """
    train, test = (
        [WORD.findall(sentence.lower()) for document in part for sentence in sentences_of(document)]
        for part in split_documents(paragraphs_of(_topics()))
    )
    return word_dataset(name, train, test, vocab_size, _note(name))


def _note(name: str) -> str:
    return (
        f"placeholder data: Python's language reference replaces dataset={name}; results say nothing about the real one"
    )


def _topics() -> Mapping[str, str]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415
    except ImportError as fault:
        raise DataError(
            "dataset=pydocs needs the module pydoc_data.topics, but this Python lacks it; install the complete "
            "standard library, or use another Python"
        ) from fault
    found: Mapping[str, str] = topics
    return found


def paragraphs_of(topics: Mapping[str, str]) -> list[list[str]]:
    """Cuts topics, in the order of their names, into paragraphs on one line each; repetitions are dropped.

    Args:
        topics: name to text.

    Returns:
        The documents of which enough is left, each a list of paragraphs that occur nowhere else.
    """
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        flat = (_flatten(paragraph) for paragraph in PARAGRAPH_END.split(topics[name]))
        fresh = [paragraph for paragraph in dict.fromkeys(flat) if paragraph and paragraph not in seen]
        seen.update(fresh)
        if sum(map(len, fresh)) >= SHORTEST_DOCUMENT:
            documents.append(fresh)
    return documents


def _flatten(paragraph: str) -> str:
    return " ".join(RULER.sub(" ", paragraph).split())


def split_documents(documents: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Deals whole documents out, in order, such that the test part stays just under a tenth of the text.

    Args:
        documents: lists of paragraphs.

    Returns:
        The training and the test documents.
    """
    train: list[list[str]] = []
    test: list[list[str]] = []
    dealt = tested = 0
    for document in documents:
        size = sum(map(len, document))
        dealt += size
        if tested + size <= TEST_FRACTION * dealt:
            tested += size
            test.append(document)
        else:
            train.append(document)
    return train, test


def sentences_of(document: list[str]) -> list[str]:
    """Splits a document's paragraphs into sentences, at a stop followed by a capital letter."""
    return [sentence for paragraph in document for sentence in SENTENCE_END.split(paragraph)]
