"""Reads text files of data sets; missing or damaged files raise errors with one-line messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spardl.basics import files
from spardl.basics.errors import DataError

__all__ = ["fetch_hint", "put_hint", "read_text", "require_paths"]


def fetch_hint(name: str, folder: str) -> str:
    """Returns the part of an error message that tells users how to get missing files that can be downloaded.

    Args:
        name: Name of the data set in the configuration.
        folder: Folder of its files, inside the data folder.
    """
    return (
        f"download it with `python train.py dataset={name} dataset.download=true`, "
        f"or set SPARDL_DATA (data_dir) to the folder that contains {folder}"
    )


def put_hint(what: str, folder: Path) -> str:
    """Returns the part of an error message that tells users where to put missing files that cannot be downloaded.

    Args:
        what: Description of the files.
        folder: Folder that must contain the files.
    """
    return f"put {what} into {folder.absolute()}, or set SPARDL_DATA (data_dir) to another parent folder"


def require_paths(name: str, paths: Iterable[Path], hint: str) -> None:
    """Checks that files or folders exist.

    Args:
        name: Name of the data set, for error messages.
        paths: Files and folders that the data set needs.
        hint: Advice for the error message.

    Raises:
        DataError: If one of them is missing.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"{name} is missing: {path.absolute()} does not exist; {hint}")


def read_text(name: str, path: Path, hint: str) -> str:
    """Reads a text file in UTF-8.

    Args:
        name: Name of the data set, for error messages.
        path: Path of the file.
        hint: Advice for the error message if the file is missing or damaged.

    Returns:
        Content of the file, which is not blank.

    Raises:
        DataError: If the file is missing, cannot be read, or contains no text.
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
