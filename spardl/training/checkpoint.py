"""Checkpoints: everything that has state, one file per worker, whole or not there.

A checkpoint is a folder ``step-00000120`` with ``shared.pt`` (what is equal on all workers), ``rank-R.pt`` (what
is not: residual, random numbers, running statistics, counts) and ``manifest.json`` (checksums). It is written
under another name and renamed when all workers are done, so a crash at any moment leaves the one before.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spardl.clusters.base import Cluster, gather_rows
from spardl.errors import CheckpointError
from spardl.files import checksum, write_atomically
from spardl.training.messages import first_line

__all__ = ["find_checkpoint", "list_checkpoints", "load_part", "save_checkpoint", "verify_checkpoint"]

_MANIFEST = "manifest.json"


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
    final = folder / f"step-{step:08d}"
    growing = folder / f".{final.name}"
    growing.mkdir(parents=True, exist_ok=True)
    for rank, part in zip(cluster.local_ranks, parts, strict=True):
        _save(growing / _rank_file(rank), part())
    if cluster.leads:
        _save(growing / "shared.pt", shared())
    _wait_for_all(cluster)
    if cluster.leads:
        _seal(growing, final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    _wait_for_all(cluster)
    return final


def _save(path: Path, content: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_atomically(path, buffer.getbuffer())


def _wait_for_all(cluster: Cluster) -> None:
    gather_rows(cluster, [torch.zeros(1) for _ in cluster.local_ranks])


def _seal(growing: Path, final: Path) -> None:
    for rest in growing.glob(".*.tmp"):  # of a writer that was killed
        rest.unlink()
    sums = {path.name: checksum(path) for path in sorted(growing.glob("*.pt"))}
    write_atomically(growing / _MANIFEST, json.dumps(sums, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)
    growing.rename(final)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def find_checkpoint(folder: Path, workers: int) -> tuple[Path | None, list[CheckpointError]]:
    """The newest checkpoint that is whole, and what is wrong with those that are newer.

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


def verify_checkpoint(checkpoint: Path, workers: int) -> None:
    """Checks that every file is there and unharmed.

    Raises:
        CheckpointError: if not.
    """
    try:
        sums: dict[str, str] = json.loads((checkpoint / _MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise _corrupt(checkpoint, f"{_MANIFEST} cannot be read ({error})") from error
    for name in ("shared.pt", *map(_rank_file, range(workers))):
        if name not in sums:
            raise _corrupt(checkpoint, f"it has no {name}, which a run of {workers} workers needs")
        if not (checkpoint / name).is_file() or checksum(checkpoint / name) != sums[name]:
            raise _corrupt(checkpoint, f"{name} is missing or does not match its checksum")


def _corrupt(checkpoint: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {checkpoint} cannot be used: {reason}")


def load_part(checkpoint: Path, rank: int | None, device: torch.device) -> dict[str, Any]:
    """Loads what a rank saved, or with ``None`` what is shared; never runs code from the file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    name = "shared.pt" if rank is None else _rank_file(rank)
    try:
        content: dict[str, Any] = torch.load(checkpoint / name, map_location=device, weights_only=True)
    except Exception as error:
        raise _corrupt(checkpoint, f"{name} cannot be read ({first_line(error)})") from error
    return content
