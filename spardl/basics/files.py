"""Atomic writes, and bounded reads of regular files."""

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
    "naming",
    "no_room",
    "open_regular",
    "own_temporary_folder",
    "read_json",
    "read_regular",
    "read_tail",
    "read_text",
    "read_yaml",
    "write_atomically",
]

# Size limits: configurations and records; texts of data sets, and metrics of long runs.
RECORD_BYTES, TEXT_BYTES = 1 << 26, 1 << 34
# A configuration of spardl has about 5 kB and 200 nodes. PyYAML parses roughly 100 kB per second.
_YAML_BYTES, _YAML_NODES = 1 << 18, 100_000


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


def open_regular(path: Path, limit: int | None = None) -> BinaryIO:
    """Opens a regular file for reading. It never waits, even if the path is a FIFO without a writer.

    Args:
        path: of the file.
        limit: largest accepted size, in bytes.

    Raises:
        OSError: if the file cannot be opened, exceeds the limit, or is a device, FIFO, socket or folder; it names the
            file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (limit is None or status.st_size <= limit):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise _too_large(path, limit)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _too_large(path: Path, limit: int | None) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))


def read_regular(path: Path, limit: int = RECORD_BYTES) -> bytes:
    """Reads a whole regular file of limited size; see :func:`open_regular`.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or exceeds the limit; it names the file.
    """
    with open_regular(path, limit) as file, naming(path):
        content = file.read(limit + 1)  # the file may grow, and files in /proc report a size of 0
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def read_text(path: Path, limit: int = TEXT_BYTES, errors: str = "strict") -> str:
    """Reads a regular file of limited size as UTF-8, with line ends as ``Path.read_text`` translates them.

    Raises:
        OSError: see :func:`read_regular`.
        UnicodeDecodeError: if the content is not UTF-8 and ``errors`` is ``strict``.
    """
    with naming(path), io.TextIOWrapper(open_regular(path, limit), encoding="utf-8", errors=errors) as file:
        return file.read()


def read_tail(path: Path, limit: int = RECORD_BYTES) -> bytes:
    """Reads at most the last ``limit`` bytes of a regular file.

    Raises:
        OSError: if the file cannot be read or is not a regular file; it names the file.
    """
    with open_regular(path) as file, naming(path):
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def read_json(path: Path, limit: int = RECORD_BYTES) -> Any:
    """Reads a regular file of limited size as JSON.

    Raises:
        OSError: see :func:`read_regular`.
        ValueError: if the content is not JSON, or is nested too deeply to be parsed.
    """
    try:
        return json.loads(read_regular(path, limit))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_yaml(path: Path) -> str:
    """The text of a regular YAML file of limited size; see :func:`bounded_yaml`.

    Raises:
        OSError: see :func:`read_regular`.
        ValueError: if the content is not UTF-8, or see :func:`bounded_yaml`.
        yaml.YAMLError: if the content is not YAML.
    """
    return bounded_yaml(read_text(path, _YAML_BYTES))


def bounded_yaml(text: str) -> str:
    """The text itself, if it is YAML whose size stays limited when its aliases are expanded.

    Raises:
        ValueError: if the text is too long or nested too deeply, or has too many nodes.
        yaml.YAMLError: if it is not YAML.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - an optional dependency

    if len(text) > _YAML_BYTES:
        raise ValueError(f"it is longer than {_YAML_BYTES:,} characters")
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        nodes = _expanded(root, {}) if root else 0
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if nodes > _YAML_NODES:
        raise ValueError(f"it has more than {_YAML_NODES:,} nodes with its aliases expanded")
    return text


def _expanded(node: Any, known: dict[int, int]) -> int:
    """The number of nodes below a YAML node, itself included, with aliases expanded."""
    if id(node) not in known:
        known[id(node)] = _YAML_NODES + 1  # what a node that contains itself finds
        children = node.value if isinstance(node.value, list) else ()
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        known[id(node)] = 1 + sum(_expanded(each, known) for pair in pairs for each in pair)
    return known[id(node)]


def own_temporary_folder() -> Path | None:
    """The user's ``spardl-UID`` folder in the temporary directory; created if missing, readable by the user alone.

    Returns:
        The folder, or ``None`` if no temporary directory is writable or another user owns the folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        folder = Path(tempfile.gettempdir()) / f"spardl-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Files in it are loaded as code: another user must not be able to place some there.
        private = stat.S_ISDIR(found.st_mode) and (
            os.name != "posix" or (found.st_uid, found.st_mode & 0o022) == (user, 0)
        )
    except OSError:
        return None
    return folder if private and os.access(folder, os.W_OK) else None
