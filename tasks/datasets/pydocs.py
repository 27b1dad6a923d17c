"""Data sets of Python's language reference, as shown by ``help()``: English text that needs no download."""

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
    """Loads the topics of Python's language reference, about 340,000 characters, in word pieces.

    Each topic is a document. Many topics repeat paragraphs of others; every paragraph is kept only once, so that no
    test paragraph is in the training text. The vocabulary is learned from the training documents. The text depends on
    the version of Python, so only results of equal versions can be compared.

    Args:
        vocab_size: Maximum number of token ids; more than about 5,500 are never used.

    Returns:
        Data set with about 90% of the text for training and the rest for tests; the split is always the same.

    Raises:
        DataError: If this Python was packaged without ``pydoc_data``.

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
    """Loads the text of :func:`load_pydocs` with characters as tokens; about 300,000 tokens are for training.

    The split into training and test text is that of :func:`load_pydocs`. The text depends on the version of Python, so
    only results of equal versions can be compared.

    Args:
        vocab_size: Number of token ids: the most frequent characters, ``<eos>`` (the end of a paragraph) and ``<unk>``.
            The default covers the characters that occur at least about ten times.

    Returns:
        Data set with characters as tokens; every paragraph is a document.

    Raises:
        DataError: If this Python was packaged without ``pydoc_data``.

    Source: see :func:`load_pydocs`.
    """
    return _characters("pydocs_chars", vocab_size)


def pydocs_chars(name: str, vocab_size: int) -> TextDataset:
    """Loads placeholder data for text in characters: Python's language reference.

    Args:
        name: Name of the data set that is replaced.
        vocab_size: Number of token ids.

    Returns:
        The text of :func:`load_pydocs_chars`, with a caveat for readers of the results.
    """
    return _characters(name, vocab_size, _note(name))


def _characters(name: str, vocab_size: int, caveat: str | None = None) -> TextDataset:
    train, test = (
        [characters_of(paragraph) for document in part for paragraph in document]
        for part in split_documents(paragraphs_of(_topics()))
    )
    return word_dataset(name, train, test, vocab_size, caveat)


def pydocs_words(name: str, vocab_size: int) -> TextDataset:
    """Loads placeholder data for text in words: the text of :func:`load_pydocs` in lower case, a sentence per line.

    Args:
        name: Name of the data set that is replaced.
        vocab_size: Number of token ids. The text has about 3,500 different words, so some ids may be unused.

    Returns:
        Data set with words and punctuation marks as tokens.

    Raises:
        DataError: If this Python was packaged without ``pydoc_data``.
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
    """Splits topics into paragraphs of one line each, and drops repeated paragraphs.

    Args:
        topics: Text of each topic, by name.

    Returns:
        One document per topic, sorted by name: a list of the paragraphs that do not occur in an earlier document.
        Topics with less than 200 characters of such paragraphs are omitted.
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
    """Assigns each document to training or test, so that the test documents have just under a tenth of the text.

    Args:
        documents: Documents, each a list of paragraphs.

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
    """Splits a document's paragraphs into sentences: at ``.``, ``!``, ``?``, ``:`` or ``;`` before a capital letter."""
    return [sentence for paragraph in document for sentence in SENTENCE_END.split(paragraph)]
