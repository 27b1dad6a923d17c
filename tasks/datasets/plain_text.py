"""Reads text files; any problem raises an error with a one-line message."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spardl.basics import files
from spardl.basics.errors import DataError

__all__ = ["fetch_hint", "put_hint", "read_text", "require_paths"]


def fetch_hint(name: str, folder: str) -> str:
    """What to do about missing files of a data set that can be downloaded.

    Args:
        name: the data set's name in the configuration.
        folder: what holds its files, within the data folder.
    """
    return (
        f"download it with `python train.py dataset={name} dataset.download=true`, "
        f"or set SPARDL_DATA (data_dir) to the folder that contains {folder}"
    )


def put_hint(what: str, folder: Path) -> str:
    """What to do about missing files that nothing here can download.

    Args:
        what: the files, in words.
        folder: where they belong.
    """
    return f"put {what} into {folder.absolute()}, or set SPARDL_DATA (data_dir) to another parent folder"


def require_paths(name: str, paths: Iterable[Path], hint: str) -> None:
    """Checks that files or folders are there.

    Args:
        name: the data set's, for the message.
        paths: what it needs.
        hint: the fix.

    Raises:
        DataError: one is missing.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"{name} is missing: {path.absolute()} does not exist; {hint}")


def read_text(name: str, path: Path, hint: str) -> str:
    """Reads a text in UTF-8.

    Args:
        name: the data set's, for messages.
        path: the file.
        hint: the fix if the file is missing, and where to get it again if it is damaged.

    Returns:
        The file's text, not blank.

    Raises:
        DataError: it is missing, cannot be read, holds no text or something other than text.
    """
    require_paths(name, [path], hint)
    try:
        text = files.read_text(path)
    except UnicodeDecodeError as fault:
        raise DataError(_damage(name, path, f"is not UTF-8 (byte {fault.start})", hint)) from fault
    except OSError as fault:
        raise DataError(f"{name} cannot be read from {path.absolute()} ({fault.strerror or fault}); {hint}") from fault
    if "\0" in text:
        raise DataError(_damage(name, path, "contains binary data", hint))
    if not text.strip():
        raise DataError(_damage(name, path, "is empty", hint))
    return text


def _damage(name: str, path: Path, fault: str, hint: str) -> str:
    return f"{name} is damaged: {path.absolute()} {fault}; delete it, then {hint}"
