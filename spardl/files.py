"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["checksum", "write_atomically"]


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Writes a file so that a reader, or a crash at any moment, finds the old one or the new one.

    Raises:
        OSError: if it cannot be written; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
