"""Cache of prepared data on disk: one process writes it, atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spardl.basics.errors import DataError
from spardl.basics.files import write_atomically

__all__ = ["cached", "fingerprint"]

# Preparing a large text takes minutes; a process that waits longer than this waits for a dead one.
PATIENCE = 3600.0


def fingerprint(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Returns name, size in bytes and modification time in nanoseconds of each file, in the order of their paths.

    If one of them changes, data that were made from the files and cached are out of date.

    Raises:
        OSError: If a file is missing.
    """
    found = ((path.name, path.stat()) for path in sorted(paths))
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def cached(
    folder: str | Path, name: str, key: Mapping[str, Any], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Reads tensors from the cache, or makes and caches them.

    If several processes request the same tensors, on one machine or on a shared file system with locks, one makes them
    and the others wait. A truncated or changed file is detected by its checksum, and made again.

    Args:
        folder: Folder of the cache; created if it is missing.
        name: Beginning of the name of the cached file.
        key: Everything that the tensors depend on, in JSON types: sources, options, version of the code.
        make: Function that returns the tensors by name; no two of them may share memory.

    Returns:
        The tensors by name, of any shape; bitwise equal whether they are made or read.

    Raises:
        DataError: If the folder cannot be written, or another process has held it for an hour.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(folder).expanduser() / f"{name}-{digest}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=PATIENCE):
            found = _read(path)
            if found is None:
                found = make()
                _write(path, found)
            return found
    except Timeout as fault:
        raise DataError(
            f"{name} cannot be prepared: another process has been writing {path} for an hour; stop that process and "
            "start again"
        ) from fault
    except OSError as fault:
        raise DataError(
            f"{name} cannot be cached in {path.parent}: {fault.strerror or fault}; set cache_dir (SPARDL_CACHE) to a "
            "writable folder with enough space"
        ) from fault


def _read(path: Path) -> dict[str, Tensor] | None:
    """Returns the tensors of a cache file, or ``None`` if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors if (file.metadata() or {}).get("sha256") == _checksum(tensors) else None
    except SafetensorError:
        return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save  # noqa: PLC0415

    write_atomically(path, save(dict(tensors), metadata={"sha256": _checksum(tensors)}))


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).numpy().data)
    return digest.hexdigest()
