"""Atomic writes and size-limited reads of regular files."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "RECORD_BYTES",
    "TEXT_BYTES",
    "bounded_yaml",
    "checksum",
    "disk_full_message",
    "naming_errors",
    "open_regular",
    "private_temporary_folder",
    "read_json",
    "read_regular",
    "read_tail",
    "read_text",
    "read_yaml",
    "write_atomically",
]

# Size limits in bytes: for configurations and records; for text data sets and metrics of long runs.
RECORD_BYTES, TEXT_BYTES = 1 << 26, 1 << 34
# A spardl configuration has about 5 kB and 200 nodes; PyYAML parses about 100 kB per second.
_YAML_BYTES, _YAML_NODES = 1 << 18, 100_000


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Writes a file atomically: readers find the old or the new content, even after a crash.

    Raises:
        OSError: If the file cannot be written. The error names the file, and no temporary file remains.
    """
    # The process id keeps concurrent writers of the same file apart.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                # Before the rename: after a power failure, the new name must not refer to an empty file.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Context manager that adds the name of ``path`` to an ``OSError``, because errors of ``write`` lack the name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def disk_full_message(error: OSError) -> str | None:
    """Returns the message for a full disk or an exceeded quota; ``None`` for any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"cannot write {error.filename or 'a file'}: {error.strerror}; free some space"


def checksum(path: Path) -> str:
    """Returns the SHA-256 digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def open_regular(path: Path, limit: int | None = None) -> BinaryIO:
    """Opens a regular file for reading, without blocking.

    Args:
        path: Path of the file.
        limit: Maximum accepted size, in bytes.

    Raises:
        OSError: If the file cannot be opened, exceeds the limit, or is a device, FIFO, socket or folder. The error
            names the file.
    """
    # O_NONBLOCK: opening a FIFO without a writer would block otherwise.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (limit is None or status.st_size <= limit):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise _too_large(path, limit)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _too_large(path: Path, limit: int | None) -> OSError:
    return OSError(errno.EFBIG, f"file is larger than {limit:,} bytes", str(path))


def read_regular(path: Path, limit: int = RECORD_BYTES) -> bytes:
    """Reads a whole regular file of limited size.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or exceeds the limit. The error names the file.
    """
    with open_regular(path, limit) as file, naming_errors(path):
        # Read past the limit: the file may grow, and files in /proc report a size of 0.
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def read_text(path: Path, limit: int = TEXT_BYTES, errors: str = "strict") -> str:
    """Reads a regular file of limited size as UTF-8; converts line ends to newlines, like ``Path.read_text``.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or exceeds the limit.
        UnicodeDecodeError: If the content is not UTF-8 and ``errors`` is ``strict``.
    """
    with naming_errors(path), io.TextIOWrapper(open_regular(path, limit), encoding="utf-8", errors=errors) as file:
        return file.read()


def read_tail(path: Path, limit: int = RECORD_BYTES) -> bytes:
    """Reads at most the last ``limit`` bytes of a regular file.

    Raises:
        OSError: If the file cannot be read or is not a regular file. The error names the file.
    """
    with open_regular(path) as file, naming_errors(path):
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def read_json(path: Path, limit: int = RECORD_BYTES) -> Any:
    """Reads a regular file of limited size as JSON.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or exceeds the limit.
        ValueError: If the content is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_regular(path, limit))
    except RecursionError:
        raise ValueError("content is nested too deeply") from None


def read_yaml(path: Path) -> str:
    """Reads a regular YAML file; rejects one that becomes too large when its aliases are expanded.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or exceeds the limit.
        ValueError: If the content is not UTF-8, is nested too deeply, or has too many nodes.
        yaml.YAMLError: If the content is not YAML.
    """
    return bounded_yaml(read_text(path, _YAML_BYTES))


def bounded_yaml(text: str) -> str:
    """Returns ``text`` unchanged if it is YAML that stays small enough when its aliases are expanded.

    Raises:
        ValueError: If the text is too long, is nested too deeply, or has too many nodes.
        yaml.YAMLError: If the text is not YAML.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - an optional dependency

    if len(text) > _YAML_BYTES:
        raise ValueError(f"text is longer than {_YAML_BYTES:,} characters")
    try:
        # Composing does not expand aliases, so nested aliases cannot exhaust the memory here.
        root = yaml.compose(text, yaml.SafeLoader)
        nodes = _expanded(root, {}) if root else 0
    except RecursionError:
        raise ValueError("content is nested too deeply") from None
    if nodes > _YAML_NODES:
        raise ValueError(f"aliases expand to more than {_YAML_NODES:,} nodes")
    return text


def _expanded(node: Any, known: dict[int, int]) -> int:
    """Returns the number of nodes of a YAML tree, including its root, after alias expansion."""
    if id(node) not in known:
        # A node that contains itself finds this value, which exceeds the limit.
        known[id(node)] = _YAML_NODES + 1
        children = node.value if isinstance(node.value, list) else ()
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        known[id(node)] = 1 + sum(_expanded(each, known) for pair in pairs for each in pair)
    return known[id(node)]


def private_temporary_folder() -> Path | None:
    """Returns the user's private folder ``spardl-UID`` in the temporary directory; creates it if it is missing.

    Returns:
        The folder, or ``None`` if no temporary directory is writable or another user owns the folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        folder = Path(tempfile.gettempdir()) / f"spardl-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Files in the folder are loaded as code, so no other user may be able to write to it.
        private = stat.S_ISDIR(found.st_mode) and (
            os.name != "posix" or (found.st_uid, found.st_mode & 0o022) == (user, 0)
        )
    except OSError:
        return None
    return folder if private and os.access(folder, os.W_OK) else None
