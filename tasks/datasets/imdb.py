"""Data set of IMDB film reviews, for sentiment classification."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torch import Tensor

from spardl.basics.errors import DataError
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.docstrings import docstrings
from tasks.datasets.download import Remote, fetch
from tasks.datasets.labelled_text import LabelledTextDataset, number_texts, texts_from
from tasks.datasets.plain_text import fetch_hint, read_text, require_paths
from tasks.datasets.words import words_of

__all__ = ["imdb"]

ARCHIVE: Final = Remote(
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    "md5:7c2ac02c03563afcf9b574c7e56c153a",
    "aclImdb",
)
PARTS = ("train", "test")
CLASSES = ("neg", "pos")
RECIPE = 1  # to be raised whenever the same files would give other tokens
REVIEWS_PER_FOLDER = 12_500


def imdb(
    root: str,
    cache: str,
    download: bool = False,
    max_tokens: int = 200,
    vocab_size: int = 50_001,
    reviews_per_folder: int = REVIEWS_PER_FOLDER,
    stand_in: bool = False,
) -> LabelledTextDataset:
    """Loads 25,000 training and 25,000 test reviews, of which one half is positive (1) and one half negative (0).

    Words are in lower case. The 50,000 words that are most frequent in the training reviews get one token id each; id 0
    stands for all other words and for the padding. Tokenization takes half a minute, and its result is cached.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``aclImdb``.
        cache: Folder in which the tokens are cached.
        download: Whether to fetch the files if they are missing.
        max_tokens: Maximum number of words; longer reviews are truncated.
        vocab_size: Maximum number of token ids, including id 0.
        reviews_per_folder: Number of reviews that each of the folders ``{train,test}/{pos,neg}`` must contain.
        stand_in: Whether to use two classes of :func:`tasks.datasets.docstrings.docstrings` instead, as placeholder
            data.

    Returns:
        Data set with two classes of texts.

    Raises:
        DataError: If files are missing, damaged, or could not be fetched; or the cache cannot be written.
        ConfigError: If ``max_tokens`` is below 1.

    Source: Maas, Daly, Pham, Huang, Ng, Potts: Learning Word Vectors for Sentiment Analysis, ACL 2011.
    """
    if stand_in:
        return _stand_in(cache, max_tokens, vocab_size)
    if download:
        fetch("imdb", [ARCHIVE], Path(root))
    files = _find(Path(root), reviews_per_folder)
    key = {
        "recipe": RECIPE,
        "vocab_size": vocab_size,
        "files": [fingerprint(paths) for paths in files.values()],
    }
    found = cached(cache, "imdb", key, lambda: _tokenize(files, vocab_size))
    train, test = (texts_from(found, part, max_tokens) for part in PARTS)
    return LabelledTextDataset("imdb", train, test, vocab_size, len(CLASSES))


def _find(root: Path, wanted: int) -> dict[tuple[str, int], list[Path]]:
    """Returns the files of each split and label, sorted by name."""
    hint = fetch_hint("imdb", ARCHIVE.path)
    files = {}
    for part in PARTS:
        for label, folder in enumerate(root / ARCHIVE.path / part / name for name in CLASSES):
            require_paths("imdb", [folder], hint)
            found = sorted(folder.glob("*.txt"))
            if len(found) != wanted:
                raise DataError(
                    f"imdb is incomplete: {folder.absolute()} has {len(found)} of {wanted} reviews; "
                    f"delete {(root / ARCHIVE.path).absolute()}, then {hint}"
                )
            files[part, label] = found
    return files


def _tokenize(files: dict[tuple[str, int], list[Path]], vocab_size: int) -> dict[str, Tensor]:
    hint = fetch_hint("imdb", ARCHIVE.path)
    texts: dict[str, list[tuple[list[str], int]]] = {part: [] for part in PARTS}
    for (part, label), paths in files.items():
        for path in paths:
            text = read_text("imdb", path, hint).replace("<br />", " ")
            texts[part].append((words_of(text), label))
    return number_texts(texts, vocab_size)


def _stand_in(cache: str, max_tokens: int, vocab_size: int) -> LabelledTextDataset:
    texts = docstrings(cache, max_tokens, vocab_size, classes=len(CLASSES))
    note = (
        "placeholder data: docstrings of Python's standard library, labelled by subject, replace dataset=imdb; "
        "results say nothing about the real one"
    )
    return LabelledTextDataset("imdb", texts.train, texts.test, vocab_size, len(CLASSES), note)
