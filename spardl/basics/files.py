"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["checksum", "naming", "no_room", "write_atomically"]


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Writes a file so that a reader, or a crash at any moment, finds the old one or the new one.

    Raises:
        OSError: if it cannot be written; it names the file, and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an ``OSError`` from inside name the file; those of writing have only a number and its meaning."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def no_room(error: OSError) -> str | None:
    """What to say of a disk, or a quota, that is full; ``None`` if that is not what went wrong."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"cannot write {error.filename or 'a file'}: {error.strerror}; make room there"


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
