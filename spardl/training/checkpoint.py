"""Checkpoints: everything that has state, one file per worker, whole or not there.

A checkpoint is a folder ``step-00000120`` with ``shared.pt`` (what is equal on all workers), ``rank-R.pt`` (what
is not: residual, random numbers, running statistics, counts) and ``manifest.json`` (checksums). It is written
under another name and renamed when all workers are done, so a crash at any moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from spardl.basics.errors import CheckpointError
from spardl.basics.files import checksum, write_atomically
from spardl.basics.messages import first_line
from spardl.clusters.base import Cluster, gather_rows

__all__ = [
    "at_step",
    "find_checkpoint",
    "list_checkpoints",
    "load_part",
    "newest_whole",
    "save_checkpoint",
    "saved_workers",
    "verify_checkpoint",
]

_MANIFEST = "manifest.json"
_AWAY = ".removed"


def save_checkpoint(
    folder: Path,
    step: int,
    cluster: Cluster,
    parts: Sequence[Callable[[], Mapping[str, Any]]],
    shared: Callable[[], Mapping[str, Any]],
    keep: int,
) -> Path:
    """Writes a checkpoint together with all other workers.

    Args:
        folder: where the run's checkpoints are.
        step: steps done.
        cluster: the workers.
        parts: what each local rank saves.
        shared: what rank 0 saves for all.
        keep: how many checkpoints are kept.

    Returns:
        The new checkpoint.
    """
    final = at_step(folder, step)
    growing = folder / f".{final.name}"
    growing.mkdir(parents=True, exist_ok=True)
    pairs = zip(cluster.local_ranks, parts, strict=True)
    own = [_save(growing / _rank_file(rank), part()) for rank, part in pairs]
    common = _save(growing / "shared.pt", shared()) if cluster.leads else b""
    # Everybody knows the checksum of what it wrote; rank 0 need not read it all while the others wait.
    rows = gather_rows(cluster, [torch.frombuffer(bytearray(digest), dtype=torch.uint8) for digest in own])
    if cluster.leads:
        sums = {_rank_file(rank): bytes(row.tolist()).hex() for rank, row in enumerate(rows)}
        _seal(growing, final, {**sums, "shared.pt": common.hex()})
        _retire(folder, final, keep)
    gather_rows(cluster, [torch.zeros(1) for _ in cluster.local_ranks])
    return final


def _save(path: Path, content: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_atomically(path, buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).digest()


def _retire(folder: Path, newest: Path, keep: int) -> None:
    """Removes old checkpoints, and those of steps that were done before the run was continued from an earlier one."""
    found = list_checkpoints(folder)
    place = found.index(newest)
    for path in [*found[: max(0, place + 1 - keep)], *found[place + 1 :]]:
        _discard(path)


def _discard(checkpoint: Path) -> None:
    """Removes a checkpoint: under another name, since one of which half is left would look like a broken one."""
    away = checkpoint.with_name(f".{checkpoint.name}{_AWAY}")
    shutil.rmtree(away, ignore_errors=True)
    checkpoint.rename(away)
    shutil.rmtree(away)


def _seal(growing: Path, final: Path, sums: Mapping[str, str]) -> None:
    # What writers that were killed have left; they may have been more.
    for rest in growing.iterdir():
        if rest.name not in sums:
            rest.unlink()
    for away in final.parent.glob(f".*{_AWAY}"):
        shutil.rmtree(away, ignore_errors=True)
    write_atomically(growing / _MANIFEST, json.dumps(sums, indent=1).encode())
    if final.exists():
        _discard(final)
    growing.rename(final)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def at_step(folder: Path, step: int) -> Path:
    """The place of the checkpoint after so many steps."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def find_checkpoint(folder: Path, workers: int | None) -> tuple[Path | None, list[CheckpointError]]:
    """The newest checkpoint that is whole, and what is wrong with those that are newer.

    Args:
        folder: where the run's checkpoints are.
        workers: how many must have saved it; ``None`` for any number.

    Raises:
        CheckpointError: if there are checkpoints, but none is whole.
    """
    faults: list[CheckpointError] = []
    for candidate in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(candidate, workers)
        except CheckpointError as fault:
            faults.append(fault)
        else:
            return candidate, faults
    if faults:
        raise CheckpointError(f"{faults[0]}; no older one can be used either: start again without resume")
    return None, []


def newest_whole(folder: Path, last: int) -> int | None:
    """The step of the newest checkpoint, of any number of workers, that is whole and not after step ``last``."""
    numbers = [path.name.removeprefix("step-") for path in list_checkpoints(folder)]
    for step in sorted((int(number) for number in numbers if number.isdecimal() and int(number) <= last), reverse=True):
        with suppress(CheckpointError):
            verify_checkpoint(at_step(folder, step), None)
            return step
    return None


def verify_checkpoint(checkpoint: Path, workers: int | None) -> None:
    """Checks that every file is there and unharmed.

    Args:
        checkpoint: its folder.
        workers: how many must have saved it; ``None`` for any number.

    Raises:
        CheckpointError: if not.
    """
    sums = _read_sums(checkpoint)
    workers = workers or _count_workers(sums)
    for name in ("shared.pt", *map(_rank_file, range(workers))):
        if name not in sums:
            raise _corrupt(checkpoint, f"it has no {name}, which a run of {workers} workers needs")
        if not (checkpoint / name).is_file() or checksum(checkpoint / name) != sums[name]:
            raise _corrupt(checkpoint, f"{name} is missing or does not match its checksum")


def saved_workers(checkpoint: Path) -> int:
    """How many workers saved a checkpoint.

    Raises:
        CheckpointError: if its manifest cannot be read.
    """
    return _count_workers(_read_sums(checkpoint))


def _read_sums(checkpoint: Path) -> dict[str, str]:
    try:
        sums: Any = json.loads((checkpoint / _MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt(checkpoint, f"{_MANIFEST} cannot be read ({error})") from error
    if not isinstance(sums, dict):
        raise _corrupt(checkpoint, f"{_MANIFEST} holds no checksums")
    return sums


def _count_workers(sums: Mapping[str, str]) -> int:
    return max(1, sum(name.startswith("rank-") for name in sums))


def _corrupt(checkpoint: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {checkpoint} cannot be used: {reason}")


def load_part(checkpoint: Path, rank: int | None, device: torch.device) -> dict[str, Any]:
    """Loads what a rank saved, or with ``None`` what is shared; never runs code from the file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    name = "shared.pt" if rank is None else _rank_file(rank)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused anyway
            content: dict[str, Any] = torch.load(checkpoint / name, map_location=device, weights_only=True)
    except UnpicklingError as error:
        # torch's own words say how to run the code in it.
        reason = "it is no file of tensors and plain data, as a run saves it; nothing in it was run"
        raise _corrupt(checkpoint, f"{name} cannot be read ({reason})") from error
    except Exception as error:
        raise _corrupt(checkpoint, f"{name} cannot be read ({first_line(error)})") from error
    return content
