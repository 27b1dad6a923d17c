"""Data sets of WikiText-2 with words, characters or word pieces (BERT's, or learned from the text) as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tasks.datasets.bert_text import Documents, bert_text, fetch_word_pieces, learned_text, pydocs_pieces
from tasks.datasets.cache import fingerprint
from tasks.datasets.download import Remote, fetch
from tasks.datasets.plain_text import fetch_hint, read_text, require_paths
from tasks.datasets.pydocs import pydocs_chars, pydocs_words, sentences_of
from tasks.datasets.text import TextDataset
from tasks.datasets.words import characters_of, check_held_out, read_lines, word_dataset

__all__ = ["articles_of", "wikitext2", "wikitext2_articles", "wikitext2_chars", "wikitext2_pieces"]

VOCAB_SIZE = 33_278
ADDRESS = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
FILES: Final = (
    Remote(
        f"{ADDRESS}/train.txt",
        "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "wikitext-2/train.txt",
    ),
    Remote(
        f"{ADDRESS}/valid.txt",
        "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "wikitext-2/valid.txt",
    ),
    Remote(
        f"{ADDRESS}/test.txt",
        "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        "wikitext-2/test.txt",
    ),
)
FILES_HINT = "wikitext-2/{train,valid,test}.txt"


def wikitext2(root: str, download: bool = False, held_out: str = "test", stand_in: bool = False) -> TextDataset:
    """Loads WikiText-2 with words as tokens, as usual for language models.

    There are 33,278 different words, including ``<eos>``. The training text has 2,088,628 tokens, the split ``valid``
    217,646 and the split ``test`` 245,569, including an ``<eos>`` at the end of each line, even of blank lines.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        download: Whether to fetch the files that are missing.
        held_out: Split to evaluate on: ``test`` or ``valid``.
        stand_in: Whether to use :func:`tasks.datasets.pydocs.pydocs_words` instead, as placeholder data.

    Returns:
        Data set with words as tokens; every line is a document.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched.
        ConfigError: If ``held_out`` is unknown.

    Source: Merity, Xiong, Bradbury, Socher: Pointer Sentinel Mixture Models, ICLR 2017.
    """
    check_held_out(held_out)
    if stand_in:
        return pydocs_words("wikitext2", VOCAB_SIZE)
    train, test = _lines("wikitext2", root, download, held_out)
    return word_dataset("wikitext2", train, test)


def wikitext2_chars(
    root: str, download: bool = False, held_out: str = "test", vocab_size: int = 96, stand_in: bool = False
) -> TextDataset:
    """Loads WikiText-2 with characters as tokens; the marks that its word tokenizer added, such as ``@-@``, are kept.

    The training text has 10,501,452 tokens and the split ``test`` 1,186,897, including an ``<eos>`` at the end of each
    line. The ``<unk>`` that replaces a rare word in the published text becomes a single ``<unk>`` token.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        download: Whether to fetch the files that are missing.
        held_out: Split to evaluate on: ``test`` or ``valid``.
        vocab_size: Number of token ids: the most frequent characters, ``<eos>`` and ``<unk>``. The default covers
            the characters that occur at least about a hundred times.
        stand_in: Whether to use :func:`tasks.datasets.pydocs.pydocs_chars` instead, as placeholder data.

    Returns:
        Data set with characters as tokens; every line is a document.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched.
        ConfigError: If ``held_out`` is unknown.

    Source: Merity, Xiong, Bradbury, Socher: Pointer Sentinel Mixture Models, ICLR 2017.
    """
    name = "wikitext2_chars"
    check_held_out(held_out)
    if stand_in:
        return pydocs_chars(name, vocab_size)
    train, test = (
        [characters_of(" ".join(words)) for words in lines] for lines in _lines(name, root, download, held_out)
    )
    return word_dataset(name, train, test, vocab_size)


def _lines(name: str, root: str, download: bool, held_out: str) -> list[list[list[str]]]:
    """Returns the words of the training and the held-out lines."""
    if download:
        fetch(name, FILES, Path(root))
    hint = fetch_hint(name, FILES_HINT)
    return [read_lines(name, path, hint) for path in _paths(root, held_out)]


def wikitext2_articles(
    root: str,
    cache: str,
    download: bool = False,
    held_out: str = "test",
    vocab_size: int = 30_522,
    stand_in: bool = False,
) -> TextDataset:
    """Loads WikiText-2 as 600 training and 60 test articles, in the word pieces of bert-base-uncased.

    In the published text, a hyphen, comma or point inside a word or number is written as `` @-@ ``, `` @,@ `` or
    `` @.@ ``. Here, these spaces and ``@`` are removed, and the ``<unk>`` that replaces a rare word becomes ``[UNK]``.
    Headings are omitted. Tokenization takes seconds, and its result is cached.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt`` and
            ``bert-base-uncased/vocab.txt``.
        cache: Folder in which the tokens are cached.
        download: Whether to fetch the files that are missing.
        held_out: Split to evaluate on: ``test`` or ``valid``.
        vocab_size: Number of word pieces that the vocabulary must contain.
        stand_in: Whether to use :func:`tasks.datasets.bert_text.pydocs_pieces` instead, as placeholder data.

    Returns:
        Data set whose documents are articles, divided into sentences.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched; or the cache cannot be written.
        ConfigError: If ``held_out`` is unknown.

    Source: Merity, Xiong, Bradbury, Socher: Pointer Sentinel Mixture Models, ICLR 2017.
    """
    name = "wikitext2_articles"
    check_held_out(held_out)
    if stand_in:
        return pydocs_pieces(name, vocab_size)
    if download:
        fetch_word_pieces(name, root)
    source, documents = _articles(name, root, download, held_out)
    return bert_text(name, root, cache, vocab_size, source, documents)


def wikitext2_pieces(
    root: str,
    cache: str,
    download: bool = False,
    held_out: str = "test",
    vocab_size: int = 4000,
    stand_in: bool = False,
) -> TextDataset:
    """Loads the articles of :func:`wikitext2_articles` in word pieces that are learned from the training articles.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        cache: Folder in which the tokens are cached; making them takes some seconds.
        download: Whether to fetch the files that are missing.
        held_out: Split to evaluate on: ``test`` or ``valid``.
        vocab_size: Number of token ids, at least 363 (single letters and special tokens).
        stand_in: Whether to use :func:`tasks.datasets.bert_text.pydocs_pieces` instead, as placeholder data.

    Returns:
        Data set whose documents are articles, divided into sentences.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched; or the cache cannot be written.
        ConfigError: If ``held_out`` is unknown, or the vocabulary is too small for all letters.

    Source: Merity, Xiong, Bradbury, Socher: Pointer Sentinel Mixture Models, ICLR 2017.
    """
    name = "wikitext2_pieces"
    check_held_out(held_out)
    if stand_in:
        return pydocs_pieces(name, vocab_size)
    return learned_text(name, cache, vocab_size, *_articles(name, root, download, held_out))


def _articles(name: str, root: str, download: bool, held_out: str) -> tuple[Any, Callable[[], list[Documents]]]:
    """Returns data that change with the files, and a function that reads the training and held-out articles."""
    if download:
        fetch(name, FILES, Path(root))
    hint = fetch_hint(name, FILES_HINT)
    paths = _paths(root, held_out)
    require_paths(name, paths, hint)

    def documents() -> list[Documents]:
        return [articles_of(read_text(name, path, hint).split("\n")) for path in paths]

    return [fingerprint([path]) for path in paths], documents


def _paths(root: str, held_out: str) -> list[Path]:
    return [Path(root) / "wikitext-2" / f"{part}.txt" for part in ("train", held_out)]


def articles_of(lines: Sequence[str]) -> list[list[str]]:
    """Splits the text of WikiText into articles, and the articles into sentences.

    An article begins at a line `` = Title = `` between blank lines. A few formulas look like titles, but have no blank
    lines around them.

    Args:
        lines: Lines of the file.

    Returns:
        The articles, each a list of sentences; ``<unk>`` is replaced by ``[UNK]``.
    """
    articles: list[list[str]] = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        text = line.strip()
        if _is_heading(text) and not before.strip() and not after.strip():
            if not text.startswith("= ="):
                articles.append([])
        elif text and articles:
            articles[-1].append(_join(text))
    return [sentences_of(paragraphs) for paragraphs in articles if paragraphs]


def _is_heading(text: str) -> bool:
    return text.startswith("= ") and text.endswith(" =")


def _join(text: str) -> str:
    for mark in ("-", ",", "."):
        text = text.replace(f" @{mark}@ ", mark)
    return text.replace("<unk>", "[UNK]")
