"""Checkpoints: everything that has state, one file per worker, whole or not there.

A checkpoint is a folder ``step-00000120`` with ``shared.pt`` (what is equal on all workers), ``rank-R.pt`` (what
is not: residual, random numbers, running statistics, counts) and ``manifest.json`` (checksums). It is written
under another name and renamed when all workers are done, so a crash at any moment leaves the one before.

Every file also stores the identity of the checkpoint under the key ``checkpoint``: format version, run id, step and
number of workers; a ``.pt`` file stores its rank, too. Checkpoints without these fields, which earlier versions
saved, still load.
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
    "fitting",
    "list_checkpoints",
    "load_part",
    "newest_whole",
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
    """Writes a checkpoint together with all other workers.

    Args:
        folder: where the run's checkpoints are.
        step: steps done.
        cluster: the workers.
        parts: what each local rank saves.
        shared: what rank 0 saves for all.
        keep: how many checkpoints are kept.
        run: id of the run, which every file stores.

    Returns:
        The new checkpoint.
    """
    final = at_step(folder, step)
    identity = {"format": _FORMAT, "run": run, "step": step, "workers": cluster.size}
    growing = folder / f".{final.name}"
    growing.mkdir(parents=True, exist_ok=True)
    pairs = zip(cluster.local_ranks, parts, strict=True)
    own = [_save(growing / _rank_file(rank), part(), identity, rank) for rank, part in pairs]
    common = _save(growing / _SHARED, shared(), identity, None) if cluster.leads else b""
    # Everybody knows the checksum of what it wrote; rank 0 need not read it all while the others wait.
    rows = gather_rows(cluster, [torch.frombuffer(bytearray(digest), dtype=torch.uint8) for digest in own])
    if cluster.leads:
        sums = {_rank_file(rank): bytes(row.tolist()).hex() for rank, row in enumerate(rows)}
        _seal(growing, final, {**sums, _SHARED: common.hex()}, identity)
        _retire(folder, final, keep)
    gather_rows(cluster, [torch.zeros(1) for _ in cluster.local_ranks])
    return final


def _save(path: Path, content: Mapping[str, Any], identity: Mapping[str, Any], rank: int | None) -> bytes:
    buffer = io.BytesIO()
    torch.save({**content, _IDENTITY: {**identity, "rank": rank}}, buffer)
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


def _seal(growing: Path, final: Path, sums: Mapping[str, str], identity: Mapping[str, Any]) -> None:
    # What writers that were killed have left; they may have been more.
    for rest in growing.iterdir():
        if rest.name not in sums:
            rest.unlink()
    for away in final.parent.glob(f".*{_AWAY}"):
        shutil.rmtree(away, ignore_errors=True)
    write_atomically(growing / _MANIFEST, json.dumps({**sums, _IDENTITY: identity}, indent=1).encode())
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


def find_checkpoint(
    folder: Path, workers: int | None, run: str | None = None
) -> tuple[Path | None, list[CheckpointError]]:
    """The newest checkpoint that is whole, and what is wrong with those that are newer.

    Args:
        folder: where the run's checkpoints are.
        workers: how many must have saved it; ``None`` for any number.
        run: id of the run that must have saved it; ``None`` for any run.

    Raises:
        CheckpointError: if there are checkpoints, but none is whole; or if one that is not older than the newest whole
            one belongs to another run, another step or more workers, or has an unknown format. An older checkpoint is
            no substitute then: continuing from it would delete this one.
    """
    faults: list[CheckpointError] = []
    for candidate in reversed(list_checkpoints(folder)):
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
    _check_step(checkpoint, sums)
    workers = workers or _count_workers(sums)
    for name in (_SHARED, *map(_rank_file, range(workers))):
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


def saved_by(checkpoint: Path) -> str | None:
    """The id of the run that saved a checkpoint, or ``None`` if the checkpoint does not store it.

    Raises:
        CheckpointError: if its manifest cannot be read.
    """
    identity = _identity(checkpoint, _read_sums(checkpoint), _MANIFEST)
    return identity["run"] if identity else None


def _check_owner(checkpoint: Path, workers: int | None, run: str | None) -> None:
    """Refuses a checkpoint that another run saved; what is damaged is left to :func:`verify_checkpoint`."""
    try:
        sums = _read_sums(checkpoint)
    except CheckpointError:
        return
    _check_step(checkpoint, sums)
    identity = _identity(checkpoint, sums, _MANIFEST)
    owner, saved = identity["run"] if identity else None, _count_workers(sums)
    if None not in (run, owner) and owner != run:
        raise _corrupt(checkpoint, f"run {owner} saved it, and this is run {run}; move it back to its own folder")
    if workers is not None and (saved > workers or (identity and saved != workers)):
        raise _corrupt(checkpoint, f"it was saved by {saved} workers, and this run has {workers}; move it away")


def _check_step(checkpoint: Path, sums: Mapping[str, Any]) -> None:
    identity, number = _identity(checkpoint, sums, _MANIFEST), checkpoint.name.removeprefix("step-")
    if identity and number.isdecimal() and int(number) != identity["step"]:
        raise _corrupt(checkpoint, f"it was saved at step {identity['step']}; rename it back")


def _identity(checkpoint: Path, content: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What a file says of its checkpoint, or ``None`` if it was saved before files said it.

    Raises:
        CheckpointError: if the format is unknown, or a field is missing.
    """
    identity = content.get(_IDENTITY)
    if identity is None:
        return None
    if not isinstance(identity, dict) or identity.get("format") != _FORMAT:
        version = identity.get("format") if isinstance(identity, dict) else identity
        raise _corrupt(
            checkpoint,
            f"{name} has format {version!r}, and this version of spardl reads {_FORMAT}; use the version that saved it",
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
        raise _corrupt(checkpoint, f"{_MANIFEST} holds no checksums")
    return sums


def _count_workers(sums: Mapping[str, Any]) -> int:
    if isinstance(identity := sums.get(_IDENTITY), dict) and isinstance(count := identity.get("workers"), int):
        return count
    return max(1, sum(name.startswith("rank-") for name in sums))


def _corrupt(checkpoint: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {checkpoint} cannot be used: {reason}")


@contextmanager
def fitting(checkpoint: Path, rank: int | None) -> Iterator[None]:
    """Names the file, and the key if one is missing, when a run cannot take over what the file holds.

    Args:
        checkpoint: its folder.
        rank: whose file is taken over; ``None`` for what is shared.

    Raises:
        CheckpointError: instead of the errors of missing keys, and of values of other types and shapes.
    """
    name = _part_file(rank)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except KeyError as error:
        raise _corrupt(checkpoint, f"{name} lacks {error}; take an older checkpoint") from error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SpardlError):
            raise
        raise _corrupt(checkpoint, f"{name} does not fit this run ({first_line(error)})") from error


def load_part(checkpoint: Path, rank: int | None, device: torch.device) -> dict[str, Any]:
    """Loads what a rank saved, or with ``None`` what is shared; never runs code from the file.

    Raises:
        CheckpointError: if the file cannot be read, or belongs to another checkpoint or rank.
    """
    name = _part_file(rank)
    try:
        with warnings.catch_warnings(), open_regular(checkpoint / name) as file:
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused anyway
            content: Any = torch.load(file, map_location=device, weights_only=True)
    except UnpicklingError as error:
        # torch's own words say how to run the code in it.
        reason = "it does not hold only tensors and plain data; no code in it was executed"
        raise _corrupt(checkpoint, f"{name} cannot be read ({reason})") from error
    except Exception as error:
        raise _corrupt(checkpoint, f"{name} cannot be read ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise _corrupt(checkpoint, f"{name} holds a {type(content).__name__}, not a dict")
    found = _identity(checkpoint, content, name)
    expected = _identity(checkpoint, _read_sums(checkpoint), _MANIFEST)
    if found != (expected and {**expected, "rank": rank}):
        raise _corrupt(checkpoint, f"{name} is {_described(found)}, and {_MANIFEST} {_described(expected)}")
    content.pop(_IDENTITY, None)
    return content


def _part_file(rank: int | None) -> str:
    return _SHARED if rank is None else _rank_file(rank)


def _described(identity: Mapping[str, Any] | None) -> str:
    if identity is None:
        return "of a version that did not store run and step"
    rank = f", rank {identity['rank']}" if identity.get("rank") is not None else ""
    return f"of run {identity['run']}, step {identity['step']}, {identity['workers']} workers{rank}"


# A run that goes on with another number of workers.


class Restart:
    """From the checkpoint of one number of workers to another number.

    Args:
        before: how many saved it.
        checkpoint: its folder.
        device: where tensors go.
    """

    def __init__(self, before: int, checkpoint: Path, device: torch.device) -> None:
        self.before = before
        self._checkpoint, self._device = checkpoint, device
        self._sums: dict[int, float] = {}

    def load(self, rank: int) -> Mapping[str, Any]:
        """What an old rank saved."""
        part = load_part(self._checkpoint, rank, self._device)
        with fitting(self._checkpoint, rank):
            groups = part["synchronizer"]["groups"]
            self._sums[rank] = sum(float(group["memory"].sum(dtype=torch.float64)) for group in groups)
        return part

    def shift(self, plan: Plan, step: int, shift: int, size: int) -> int:
        """Steps done, beyond those that as many examples take with ``size`` workers.

        The data goes on where it was: examples are dealt out to all workers in one order, so what was seen of an
        epoch is a beginning of it. What does not fill a step of the new workers is seen again.

        Args:
            plan: what is trained.
            step: steps done.
            shift: as it was with the workers before.
            size: how many workers there are.
        """
        old, new = (plan.sampler(Worker(0, workers)).steps_per_epoch for workers in (self.before, size))
        epoch, within = divmod(step - shift, old)
        return step - (epoch * new + min(new, within * self.before // size))

    def figures(self, cluster: Cluster, engine: Engine) -> dict[str, float]:
        """What is logged: numbers of workers, and the sum over all residuals, before and after."""
        remembers = engine.carried.remembers
        rows = []
        for local, rank in enumerate(cluster.local_ranks):
            # An old residual counts where its first owner is.
            first = [old for old in self._sums if owners(old, self.before, cluster.size)[0] == rank]
            found = [sum(self._sums[old] for old in first), engine.carried.residual_sum(local)]
            rows.append(torch.tensor(found if remembers else [0.0, 0.0], dtype=torch.float64))
        sums = torch.stack(gather_rows(cluster, rows)).sum(0).tolist()
        return {
            "workers_before": self.before,
            "workers": cluster.size,
            **dict(zip(("residual_sum_before", "residual_sum"), sums, strict=True)),
        }
