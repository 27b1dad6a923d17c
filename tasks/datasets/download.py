"""Downloads of public files, verified by checksum and moved into place atomically."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spardl.basics.errors import DataError

__all__ = ["Remote", "fetch"]

SILENCE = 60.0  # seconds without a byte after which a server counts as lost


class _MismatchError(Exception):
    """Raised if downloaded bytes do not match the checksum."""


# What a lost connection, a server that speaks something else, a full disk or a broken archive can raise.
FAULTS = (OSError, http.client.HTTPException, tarfile.TarError, EOFError, zlib.error, _MismatchError)


@dataclass(frozen=True)
class Remote:
    """A public file to download.

    Attributes:
        url: Address of the file.
        checksum: Expected checksum: ``md5:...`` or ``sha256:...``, in hexadecimal.
        path: Path in the data folder: of the file or, for an archive, of the folder that it contains.
    """

    url: str
    checksum: str
    path: str

    @property
    def packed(self) -> bool:
        """Whether the file is an archive."""
        return self.url.endswith((".tar.gz", ".tgz"))


def fetch(name: str, remotes: Sequence[Remote], folder: Path) -> None:
    """Downloads missing files; of several processes that call this, one downloads and the others wait.

    Args:
        name: Name of the data set, for error messages.
        remotes: Files of the data set.
        folder: Data folder that receives the files; created if it is missing.

    Raises:
        DataError: If a file cannot be fetched, or does not match its checksum. No part of that file is kept.
    """
    from filelock import FileLock  # noqa: PLC0415

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name}.lock"):
            for remote in remotes:
                if not (folder / remote.path).exists():
                    _fetch_one(remote, folder)
    except FAULTS as fault:
        reason = " ".join(str(fault).split())
        raise DataError(
            f"{name} cannot be downloaded into {folder}: {reason}; download it on another machine and set data_dir to "
            "its parent folder"
        ) from fault


def _fetch_one(remote: Remote, folder: Path) -> None:
    """Downloads a file into a temporary folder, which is moved into place at the end, or deleted on failure."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        received = Path(scratch) / "received"
        _receive(remote.url, received)
        _check(remote, received)
        unpacked = _unpack(received, Path(scratch) / "unpacked") / remote.path if remote.packed else received
        (folder / remote.path).parent.mkdir(parents=True, exist_ok=True)
        unpacked.replace(folder / remote.path)


def _receive(url: str, target: Path) -> None:
    # torch.hub's own would leave a thread behind (tqdm's), and workers are forked from this process.
    print(f"fetching {url}", file=sys.stderr, flush=True)
    with urllib.request.urlopen(url, timeout=SILENCE) as response, target.open("wb") as file:
        shutil.copyfileobj(response, file)


def _check(remote: Remote, received: Path) -> None:
    algorithm, expected = remote.checksum.split(":")
    with received.open("rb") as file:
        digest = hashlib.new(algorithm)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise _MismatchError(f"{remote.url} has {algorithm} {digest.hexdigest()}, expected {expected}")


def _unpack(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")
    return target
