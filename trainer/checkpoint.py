"""Checkpoints: the complete training state, one file per worker, written atomically.

A checkpoint is a folder, such as ``step-00000120``, with ``shared.pt`` (state common to all workers), ``rank-R.pt``
(residual, random state, running statistics, and counts of time and bytes of rank R) and ``manifest.json`` (checksums).
The folder has another name until all workers have written their files, so that a crash at any moment leaves the
previous checkpoint intact.

Every file also stores the identity of the checkpoint under the key ``checkpoint``: format version, run id, step and
world size; ``.pt`` files store their rank as well. Checkpoints of earlier versions without these fields still load.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from spardl.basics.errors import CheckpointError, SpardlError, first_line
from spardl.basics.files import checksum, open_regular, read_json, write_atomically
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.elastic import owners
from spardl.protocol.programs import Worker
from spardl.schedules.engine import Engine
from trainer.learner import Plan

__all__ = [
    "Restart",
    "at_step",
    "find_checkpoint",
    "list_checkpoints",
    "load_part",
    "newest_valid",
    "restoring",
    "save_checkpoint",
    "saved_by",
    "saved_workers",
    "verify_checkpoint",
]


_MANIFEST = "manifest.json"
# Key of the identity in every file, and the version of the format.
_IDENTITY, _FORMAT = "checkpoint", 1
_SHARED = "shared.pt"
_AWAY = ".removed"


def save_checkpoint(
    folder: Path,
    step: int,
    cluster: Cluster,
    parts: Sequence[Callable[[], Mapping[str, Any]]],
    shared: Callable[[], Mapping[str, Any]],
    keep: int,
    run: str | None = None,
) -> Path:
    """Writes a checkpoint and removes old ones; all workers must call this function together.

    Args:
        folder: Folder of the run's checkpoints.
        step: Number of steps done.
        cluster: Workers that save together.
        parts: For each local rank (rank of a worker in this process), a function that returns its state.
        shared: Function that returns the state common to all workers; called only by rank 0, which saves it.
        keep: Number of checkpoints to keep, including the new one.
        run: Id of the run, stored in every file.

    Returns:
        Folder of the new checkpoint.
    """
    final = at_step(folder, step)
    identity = {"format": _FORMAT, "run": run, "step": step, "workers": cluster.size}
    # Names that begin with a dot are no checkpoints to list_checkpoints.
    growing = folder / f".{final.name}"
    growing.mkdir(parents=True, exist_ok=True)
    pairs = zip(cluster.local_ranks, parts, strict=True)
    own = [_save(growing / _rank_file(rank), part(), identity, rank) for rank, part in pairs]
    common = _save(growing / _SHARED, shared(), identity, None) if cluster.leads else b""
    # Each rank sends the checksum of its file, so that rank 0 need not read all files while the others wait.
    rows = gather_rows(cluster, [torch.frombuffer(bytearray(digest), dtype=torch.uint8) for digest in own])
    if cluster.leads:
        sums = {_rank_file(rank): bytes(row.tolist()).hex() for rank, row in enumerate(rows)}
        _seal(growing, final, {**sums, _SHARED: common.hex()}, identity)
        _retire(folder, final, keep)
    # A barrier: no worker continues before the checkpoint is complete.
    gather_rows(cluster, [torch.zeros(1) for _ in cluster.local_ranks])
    return final


def _save(path: Path, content: Mapping[str, Any], identity: Mapping[str, Any], rank: int | None) -> bytes:
    # In memory first, to hash what is written without reading the file again.
    buffer = io.BytesIO()
    torch.save({**content, _IDENTITY: {**identity, "rank": rank}}, buffer)
    write_atomically(path, buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).digest()


def _retire(folder: Path, newest: Path, keep: int) -> None:
    """Removes old checkpoints, and later ones left from before the run resumed from an earlier checkpoint."""
    found = list_checkpoints(folder)
    place = found.index(newest)
    for path in [*found[: max(0, place + 1 - keep)], *found[place + 1 :]]:
        _discard(path)


def _discard(checkpoint: Path) -> None:
    # Renamed first: a crash during the removal must not leave a folder that looks like a damaged checkpoint.
    away = checkpoint.with_name(f".{checkpoint.name}{_AWAY}")
    shutil.rmtree(away, ignore_errors=True)
    checkpoint.rename(away)
    shutil.rmtree(away)


def _seal(growing: Path, final: Path, sums: Mapping[str, str], identity: Mapping[str, Any]) -> None:
    # Remove files of killed writers, which may have had a larger world size.
    for rest in growing.iterdir():
        if rest.name not in sums:
            rest.unlink()
    for away in final.parent.glob(f".*{_AWAY}"):
        shutil.rmtree(away, ignore_errors=True)
    write_atomically(growing / _MANIFEST, json.dumps({**sums, _IDENTITY: identity}, indent=1).encode())
    # A run that resumed from an earlier checkpoint reaches the same step again.
    if final.exists():
        _discard(final)
    growing.rename(final)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def at_step(folder: Path, step: int) -> Path:
    """Returns the path in ``folder`` of the checkpoint after ``step`` steps, whether or not it exists."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the paths of the checkpoints in ``folder``, in the order of their steps."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def find_checkpoint(
    folder: Path, workers: int | None, run: str | None = None
) -> tuple[Path | None, list[CheckpointError]]:
    """Finds the newest valid checkpoint of a run.

    Args:
        folder: Folder of the run's checkpoints.
        workers: Required world size; ``None`` for any.
        run: Required run id; ``None`` for any.

    Returns:
        The path of the checkpoint, or ``None`` if the folder has no checkpoints; and a list with the error of each
        newer checkpoint that is damaged.

    Raises:
        CheckpointError: If there are checkpoints, but none is valid. Also if the newest valid checkpoint, or a newer
            one, belongs to another run, step or world size, or has an unknown format: a run that continued from an
            older checkpoint would later delete it.
    """
    faults: list[CheckpointError] = []
    for candidate in reversed(list_checkpoints(folder)):
        # Outside of the try: a checkpoint of another run ends the search instead of being skipped.
        _check_owner(candidate, workers, run)
        try:
            verify_checkpoint(candidate, workers)
        except CheckpointError as fault:
            faults.append(fault)
        else:
            return candidate, faults
    if faults:
        raise CheckpointError(f"{faults[0]}; no older checkpoint can be used; start again without resume")
    return None, []


def newest_valid(folder: Path, last: int) -> int | None:
    """Returns the step of the newest valid checkpoint up to step ``last``; ``None`` if there is none."""
    numbers = [path.name.removeprefix("step-") for path in list_checkpoints(folder)]
    for step in sorted((int(number) for number in numbers if number.isdecimal() and int(number) <= last), reverse=True):
        with suppress(CheckpointError):
            verify_checkpoint(at_step(folder, step), None)
            return step
    return None


def verify_checkpoint(checkpoint: Path, workers: int | None) -> None:
    """Checks that every file of a checkpoint exists and matches its checksum.

    Args:
        checkpoint: Folder of the checkpoint.
        workers: Required world size; ``None`` for any.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    sums = _read_sums(checkpoint)
    _check_step(checkpoint, sums)
    workers = workers or _count_workers(sums)
    for name in (_SHARED, *map(_rank_file, range(workers))):
        if name not in sums:
            raise _corrupt(checkpoint, f"it has no {name}, which a run of {workers} workers needs")
        if not (checkpoint / name).is_file() or checksum(checkpoint / name) != sums[name]:
            raise _corrupt(checkpoint, f"{name} is missing or does not match its checksum")


def saved_workers(checkpoint: Path) -> int:
    """Returns the world size of a checkpoint.

    Raises:
        CheckpointError: If the manifest of the checkpoint cannot be read.
    """
    return _count_workers(_read_sums(checkpoint))


def saved_by(checkpoint: Path) -> str | None:
    """Returns the id of the run that saved a checkpoint, or ``None`` if the checkpoint does not record it.

    Raises:
        CheckpointError: If the manifest of the checkpoint cannot be read.
    """
    identity = _identity(checkpoint, _read_sums(checkpoint), _MANIFEST)
    return identity["run"] if identity else None


def _check_owner(checkpoint: Path, workers: int | None, run: str | None) -> None:
    """Raises an error for a checkpoint of another run; :func:`verify_checkpoint` reports damaged ones."""
    try:
        sums = _read_sums(checkpoint)
    except CheckpointError:
        return
    _check_step(checkpoint, sums)
    identity = _identity(checkpoint, sums, _MANIFEST)
    owner, saved = identity["run"] if identity else None, _count_workers(sums)
    if None not in (run, owner) and owner != run:
        raise _corrupt(checkpoint, f"it was saved by run {owner}, but this is run {run}; move it back to its folder")
    if workers is not None and (saved > workers or (identity and saved != workers)):
        raise _corrupt(checkpoint, f"it was saved by {saved} workers, but this run has {workers}; move it elsewhere")


def _check_step(checkpoint: Path, sums: Mapping[str, Any]) -> None:
    identity, number = _identity(checkpoint, sums, _MANIFEST), checkpoint.name.removeprefix("step-")
    if identity and number.isdecimal() and int(number) != identity["step"]:
        raise _corrupt(checkpoint, f"it was saved at step {identity['step']}; rename it back")


def _identity(checkpoint: Path, content: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the identity that a file stores, or ``None`` for files of earlier versions.

    Raises:
        CheckpointError: If the format is unknown, or a field is missing.
    """
    identity = content.get(_IDENTITY)
    if identity is None:
        return None
    if not isinstance(identity, dict) or identity.get("format") != _FORMAT:
        version = identity.get("format") if isinstance(identity, dict) else identity
        raise _corrupt(
            checkpoint,
            f"{name} has format {version!r}, but this version of spardl reads {_FORMAT}; use the version that saved it",
        )
    kinds: Mapping[str, Any] = {"run": (str, type(None)), "step": int, "workers": int}
    wrong = [key for key, kind in kinds.items() if not isinstance(identity.get(key, ()), kind)]
    if wrong:
        raise _corrupt(checkpoint, f"{name} has no {_IDENTITY}.{wrong[0]}")
    return identity


def _read_sums(checkpoint: Path) -> dict[str, Any]:
    try:
        sums: Any = read_json(checkpoint / _MANIFEST)
    except (OSError, ValueError) as error:
        raise _corrupt(checkpoint, f"{_MANIFEST} cannot be read ({error})") from error
    if not isinstance(sums, dict):
        raise _corrupt(checkpoint, f"{_MANIFEST} contains no checksums")
    return sums


def _count_workers(sums: Mapping[str, Any]) -> int:
    if isinstance(identity := sums.get(_IDENTITY), dict) and isinstance(count := identity.get("workers"), int):
        return count
    # A manifest of an earlier version: count its files.
    return max(1, sum(name.startswith("rank-") for name in sums))


def _corrupt(checkpoint: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {checkpoint} cannot be used: {reason}")


@contextmanager
def restoring(checkpoint: Path, rank: int | None) -> Iterator[None]:
    """Converts errors in the ``with`` block to errors that name a file of a checkpoint.

    The block must restore the content of this file, which :func:`load_part` has returned.

    Args:
        checkpoint: Folder of the checkpoint.
        rank: Rank whose file is restored; ``None`` for the file of the common state.

    Raises:
        CheckpointError: If the block fails, because a key is missing or a value has a wrong type or shape.
    """
    name = _part_file(rank)
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError, but no fault of the file
        raise
    except KeyError as error:
        raise _corrupt(checkpoint, f"{name} has no {error}; use an older checkpoint") from error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SpardlError):
            raise
        raise _corrupt(checkpoint, f"{name} does not fit this run ({first_line(error)})") from error


def load_part(checkpoint: Path, rank: int | None, device: torch.device) -> dict[str, Any]:
    """Loads one file of a checkpoint, without executing code from it.

    Args:
        checkpoint: Folder of the checkpoint.
        rank: Rank whose state to load; ``None`` for the state common to all workers.
        device: Device of the loaded tensors.

    Returns:
        The state that was saved, by name.

    Raises:
        CheckpointError: If the file cannot be read, or belongs to another checkpoint or rank.
    """
    name = _part_file(rank)
    try:
        with warnings.catch_warnings(), open_regular(checkpoint / name) as file:
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the file is refused in any case
            content: Any = torch.load(file, map_location=device, weights_only=True)
    except UnpicklingError as error:
        # torch's message would explain how to execute the code in the file.
        reason = "it contains objects other than tensors and plain data; no code in it was executed"
        raise _corrupt(checkpoint, f"{name} cannot be read ({reason})") from error
    except Exception as error:
        raise _corrupt(checkpoint, f"{name} cannot be read ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise _corrupt(checkpoint, f"{name} must contain a dict, got {type(content).__name__}")
    # Checksums cannot detect a file that was copied from another checkpoint together with its manifest line.
    found = _identity(checkpoint, content, name)
    expected = _identity(checkpoint, _read_sums(checkpoint), _MANIFEST)
    if found != (expected and {**expected, "rank": rank}):
        raise _corrupt(checkpoint, f"{name} is {_described(found)}, but {_MANIFEST} is {_described(expected)}")
    content.pop(_IDENTITY, None)
    return content


def _part_file(rank: int | None) -> str:
    return _SHARED if rank is None else _rank_file(rank)


def _described(identity: Mapping[str, Any] | None) -> str:
    if identity is None:
        return "of a version that did not store run and step"
    rank = f", rank {identity['rank']}" if identity.get("rank") is not None else ""
    return f"of run {identity['run']}, step {identity['step']}, {identity['workers']} workers{rank}"


class Restart:
    """Resumes a run from a checkpoint of another world size.

    Args:
        before: World size at which the checkpoint was saved.
        checkpoint: Folder of the checkpoint.
        device: Device of the loaded tensors.
    """

    def __init__(self, before: int, checkpoint: Path, device: torch.device) -> None:
        self.before = before
        self._checkpoint, self._device = checkpoint, device
        self._sums: dict[int, float] = {}

    def load(self, rank: int) -> Mapping[str, Any]:
        """Loads the state that ``rank`` saved, and remembers the sum of its residual for :meth:`figures`."""
        part = load_part(self._checkpoint, rank, self._device)
        with restoring(self._checkpoint, rank):
            groups = part["synchronizer"]["groups"]
            self._sums[rank] = sum(float(group["memory"].sum(dtype=torch.float64)) for group in groups)
        return part

    def shift(self, plan: Plan, step: int, shift: int, size: int) -> int:
        """Returns the number of steps done, minus the number of steps for the same examples at the new world size.

        Training continues at the same place in the data, because the order of the examples does not depend on the
        world size. Examples that do not fill a step at the new world size are repeated.

        Args:
            plan: Plan of the training.
            step: Number of steps done when the checkpoint was saved.
            shift: The same difference as stored in the checkpoint; 0 unless the run changed its world size before.
            size: New world size.

        Returns:
            The difference in steps; negative if the new world size needs more steps for the same examples.
        """
        old, new = (plan.sampler(Worker(0, workers)).steps_per_epoch for workers in (self.before, size))
        # `step - shift` counts the steps as if the whole run had had the old world size.
        epoch, within = divmod(step - shift, old)
        return step - (epoch * new + min(new, within * self.before // size))

    def figures(self, cluster: Cluster, engine: Engine) -> dict[str, float]:
        """Returns metrics by name: world size and sum of all residuals, each before and after the restart.

        All workers must call it together.
        """
        remembers = engine.gradient_state.remembers
        rows = []
        for local, rank in enumerate(cluster.local_ranks):
            # Count each old residual once, on the first rank that takes over a part of it.
            first = [old for old in self._sums if owners(old, self.before, cluster.size)[0] == rank]
            found = [sum(self._sums[old] for old in first), engine.gradient_state.residual_sum(local)]
            rows.append(torch.tensor(found if remembers else [0.0, 0.0], dtype=torch.float64))
        sums = torch.stack(gather_rows(cluster, rows)).sum(0).tolist()
        return {
            "workers_before": self.before,
            "workers": cluster.size,
            **dict(zip(("residual_sum_before", "residual_sum"), sums, strict=True)),
        }
