"""Data set for text classification: docstrings of Python's standard library, by subject; needs no download."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from torch import Tensor

from spardl.basics.errors import ConfigError, DataError
from spardl.basics.files import read_text
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.labelled_text import LabelledTextDataset, number_texts, texts_from
from tasks.datasets.words import words_of

__all__ = ["SUBJECTS", "docstrings", "docstrings_of"]

# Modules and packages that CPython has had from 3.10 on, and that no distribution of it leaves out.
SUBJECTS: Final = MappingProxyType(
    {
        "internet": "email http urllib xmlrpc wsgiref imaplib smtplib ftplib socketserver ssl mailbox ipaddress",
        "testing": "unittest pdb bdb traceback tracemalloc logging inspect warnings",
        "concurrency": "asyncio multiprocessing threading queue sched selectors",
        "files": "tarfile zipfile pathlib shutil tempfile os _pyio gzip bz2 lzma fileinput",
        "numbers": "_pydecimal fractions statistics random numbers calendar datetime _pydatetime",
        "markup": "xml json csv configparser difflib textwrap codecs",
    }
)
FEWEST_WORDS = 5
TEST_SHARE = 0.2
RECIPE = 1  # to be raised whenever the same files would give other tokens


def docstrings(
    cache: str, max_tokens: int = 100, vocab_size: int = 5_001, classes: int = len(SUBJECTS)
) -> LabelledTextDataset:
    """Collects the docstrings of modules, classes and functions in Python's standard library, by subject.

    The sources of about 50 modules are parsed, not imported; they have about 3,600 docstrings of 37 words on average.
    The classes are the subjects of :data:`SUBJECTS`, in the order of their size: internet, testing and debugging,
    concurrency, files, numbers, text formats. The first has 30% of the texts. Of several texts with the same words,
    only one is used. A fifth of the texts, chosen by their hashes, is held out for tests. The texts depend on the
    version of Python, so only results of equal versions can be compared.

    Args:
        cache: Folder in which the tokens are cached, since parsing takes more than a second.
        max_tokens: Maximum number of words; longer texts are truncated.
        vocab_size: Maximum number of token ids. Id 0 stands for the padding and for all words that are too rare.
        classes: Number of subjects to use, beginning with the largest.

    Returns:
        Data set of texts, labelled with the number of their subject.

    Raises:
        ConfigError: If ``classes`` is below 2 or above the number of subjects, or ``max_tokens`` is below 1.
        DataError: If this Python was packaged without its sources; or the cache cannot be written.

    Source: CPython's standard library (PSF licence).
    """
    if not 2 <= classes <= len(SUBJECTS):
        raise ConfigError(f"dataset.classes must be from 2 to {len(SUBJECTS)}, got {classes}")
    library = Path(sysconfig.get_path("stdlib"))
    files = [_files(library, modules) for modules in list(SUBJECTS.values())[:classes]]
    key = {"recipe": RECIPE, "vocab_size": vocab_size, "files": [fingerprint(paths) for paths in files]}
    found = cached(cache, "docstrings", key, lambda: _tokenize(files, vocab_size))
    train, test = (texts_from(found, part, max_tokens) for part in ("train", "test"))
    return LabelledTextDataset("docstrings", train, test, vocab_size, classes)


def _files(library: Path, modules: str) -> list[Path]:
    found = []
    for module in modules.split():
        found += [path for path in (library / f"{module}.py",) if path.is_file()]
        # Python 3.13 and earlier install the tests of some packages within them.
        found += [path for path in sorted((library / module).rglob("*.py")) if "test" not in path.parts]
    if not found:
        raise DataError(
            f"dataset=docstrings needs the source files of Python's standard library, but {library} lacks them; "
            "install the complete standard library, or use another Python"
        )
    return found


def _tokenize(files: list[list[Path]], vocab_size: int) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[list[str], int]]] = {"train": [], "test": []}
    seen: set[str] = set()
    for label, paths in enumerate(files):
        for words in (words_of(text) for path in paths for text in docstrings_of(read_text(path, errors="replace"))):
            text = " ".join(words)
            if len(words) >= FEWEST_WORDS and text not in seen:
                seen.add(text)
                parts["test" if _is_held_out(text) else "train"].append((words, label))
    return number_texts(parts, vocab_size)


def docstrings_of(source: str) -> Iterator[str]:
    """Yields the docstrings of a module, of its classes and of its functions; none if ``source`` cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield text


def _is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 256 * TEST_SHARE
