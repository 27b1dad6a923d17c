"""WikiText-2 as words, characters or word pieces (BERT's, or trained on the text)."""

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
    """Loads WikiText-2 word by word, as language models are compared on it: 33,278 words with ``<eos>``.

    2,088,628 tokens to train on, 217,646 in ``valid`` and 245,569 in ``test``, each line's ``<eos>`` included,
    blank lines' too.

    Args:
        root: folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        download: fetch the files that are missing.
        held_out: the part to evaluate on: ``test`` or ``valid``.
        stand_in: read nothing; take :func:`tasks.datasets.pydocs.pydocs_words` instead.

    Returns:
        Words as tokens; every line is a document.

    Raises:
        DataError: a file is missing, damaged, or could not be fetched.
        ConfigError: an unknown part.

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
    """Loads WikiText-2 character by character, the marks of its word tokenizer included.

    10,501,452 tokens to train on, and 1,186,897 in ``test``, each line's ``<eos>`` included. The published text's
    ``<unk>``, which stands for a rare word, is one unknown character here.

    Args:
        root: folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        download: fetch the files that are missing.
        held_out: the part to evaluate on: ``test`` or ``valid``.
        vocab_size: number of token ids: the most frequent characters, ``<eos>`` and ``<unk>``. With 96, a character
            is known that occurs some hundred times.
        stand_in: read nothing; take :func:`tasks.datasets.pydocs.pydocs_chars` instead.

    Returns:
        Characters as tokens; every line is a document.

    Raises:
        DataError: a file is missing, damaged, or could not be fetched.
        ConfigError: an unknown part.

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
    """The words of the training and the held-out lines."""
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
    """Loads WikiText-2 as 600 articles to train on, and 60 to test, in the word pieces of bert-base-uncased.

    The published text is in words, with spaces around punctuation and ``@`` around what joins numbers and compounds;
    these marks are undone as far as BERT's splitting at punctuation does not do it anyway. Rare words stay
    unknown. Headings are left out. Tokenising takes seconds and is kept in the cache.

    Args:
        root: folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt`` and
            ``bert-base-uncased/vocab.txt``.
        cache: folder for the tokens.
        download: fetch the files that are missing.
        held_out: the part to evaluate on: ``test`` or ``valid``.
        vocab_size: word pieces that the vocabulary must hold.
        stand_in: read nothing; take :func:`tasks.datasets.bert_text.pydocs_pieces` instead.

    Returns:
        Articles as documents, with sentences.

    Raises:
        DataError: a file is missing, damaged, or could not be fetched; or the cache cannot be written.
        ConfigError: an unknown part.

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
    """Loads the articles of :func:`wikitext2_articles` in few word pieces, learned from the training articles.

    Args:
        root: folder that holds (or, with ``download``, will hold) ``wikitext-2/{train,valid,test}.txt``.
        cache: folder for the tokens; making them takes some seconds.
        download: fetch the files that are missing.
        held_out: the part to evaluate on: ``test`` or ``valid``.
        vocab_size: number of token ids; the letters alone take 363.
        stand_in: read nothing; take :func:`tasks.datasets.bert_text.pydocs_pieces` instead.

    Returns:
        Articles as documents, with sentences.

    Raises:
        DataError: a file is missing, damaged, or could not be fetched; or the cache cannot be written.
        ConfigError: an unknown part, or a vocabulary too small for all letters.

    Source: Merity, Xiong, Bradbury, Socher: Pointer Sentinel Mixture Models, ICLR 2017.
    """
    name = "wikitext2_pieces"
    check_held_out(held_out)
    if stand_in:
        return pydocs_pieces(name, vocab_size)
    return learned_text(name, cache, vocab_size, *_articles(name, root, download, held_out))


def _articles(name: str, root: str, download: bool, held_out: str) -> tuple[Any, Callable[[], list[Documents]]]:
    """What tells that the files are still the same; and what reads the training and the held-out articles."""
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
    """Cuts a text of WikiText into articles' sentences.

    An article begins at a line `` = Title = `` between blank lines: a few formulas look the same but for these.

    Args:
        lines: of the file.

    Returns:
        A list of sentences per article, ``<unk>`` written as BERT does.
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
