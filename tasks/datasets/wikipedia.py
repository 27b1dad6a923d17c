"""Data set of Wikipedia articles, or of any plain text, in BERT's word pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from spardl.basics.errors import DataError
from tasks.datasets.bert_text import bert_text, fetch_word_pieces, pydocs_pieces
from tasks.datasets.cache import fingerprint
from tasks.datasets.plain_text import put_hint, read_text
from tasks.datasets.pydocs import sentences_of, split_documents
from tasks.datasets.text import TextDataset

__all__ = ["documents_of", "wikipedia"]

NAME = "wikipedia"
WHAT = (
    "plain text from a dump of https://dumps.wikimedia.org (*.txt, also in subfolders, one paragraph per line, "
    "a blank line between articles)"
)


def wikipedia(
    root: str, cache: str, download: bool = False, vocab_size: int = 30_522, stand_in: bool = False
) -> TextDataset:
    """Loads articles in the word pieces of bert-base-uncased.

    Papers do not state which dump of Wikipedia they used, nor how they cleaned it. There is no common split, so a tenth
    of the text, in whole articles, is held out. Tokenization takes minutes, and its result is cached. See
    :func:`tasks.datasets.bert_text.bert_text` for the amount of text that fits in memory.

    Args:
        root: Data folder with ``bert-base-uncased/vocab.txt`` and ``wikipedia``, which contains ``*.txt`` in UTF-8 at
            any depth: one paragraph per line, a blank line between two articles; the end of a file also ends an
            article.
        cache: Folder in which the tokens are cached.
        download: Whether to fetch the vocabulary if it is missing; the text must exist.
        vocab_size: Number of word pieces that the vocabulary must contain.
        stand_in: Whether to use :func:`tasks.datasets.bert_text.pydocs_pieces` instead, as placeholder data.

    Returns:
        Data set whose documents are articles, divided into sentences.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched; or the cache cannot be written.

    Source: Devlin, Chang, Lee, Toutanova: BERT, NAACL 2019, section 3.1.
    """
    if stand_in:
        return pydocs_pieces(NAME, vocab_size)
    folder = Path(root) / NAME
    hint = put_hint(WHAT, folder)
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        raise DataError(f"{NAME} is missing: {folder.absolute()} has no *.txt files; {hint}")
    if download:
        fetch_word_pieces(NAME, root)

    def documents() -> list[list[list[str]]]:
        articles = [article for path in paths for article in documents_of(read_text(NAME, path, hint).split("\n"))]
        return [[sentences_of(article) for article in part] for part in split_documents(articles)]

    return bert_text(NAME, root, cache, vocab_size, fingerprint(paths), documents)


def documents_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """Groups lines into documents, which are separated by blank lines.

    Yields:
        The lines of each document. Consecutive spaces in a line are replaced by one space.
    """
    document: list[str] = []
    for line in [*lines, ""]:
        paragraph = " ".join(line.split())
        if paragraph:
            document.append(paragraph)
        elif document:
            yield document
            document = []
