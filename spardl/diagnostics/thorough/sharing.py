"""Workers of this machine that share one device: forked before any of them has touched it."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from spardl.clusters.workers.processes import run_processes
from spardl.diagnostics.doctor.installation import VARIABLES
from spardl.diagnostics.thorough.outcome import Place

__all__ = ["backend_of", "setting", "shared"]

T = TypeVar("T")


def backend_of(place: Place, workers: int) -> str:
    """NCCL refuses two workers on one GPU; gloo does not."""
    return "nccl" if place.on_gpu and workers == 1 else "gloo"


def setting(place: Place, workers: int) -> str:
    """Who works where, in words."""
    return f"{workers} worker{'s' * (workers > 1)} over {backend_of(place, workers)} on {place.device}"


def shared(place: Place, workers: int, work: Callable[[torch.device], T]) -> list[T]:
    """Runs something in so many processes, which are a process group; the caller must not have touched a GPU.

    Args:
        place: where.
        workers: how many.
        work: is given the device, and gives back what can be pickled.

    Returns:
        What each gave back, by rank.

    Raises:
        WorkerError: if one of them ended early.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def target(rank: int, heartbeat: object) -> None:
            os.environ.setdefault(VARIABLES["gloo"], "lo")
            torch.set_num_threads(1)
            if place.on_gpu:
                torch.cuda.set_device(place.torch_device)
            store = dist.FileStore(str(folder / "store"), workers)  # type: ignore[attr-defined]
            patience = timedelta(seconds=place.timeout)
            dist.init_process_group(
                backend_of(place, workers), store=store, rank=rank, world_size=workers, timeout=patience
            )
            found = work(place.torch_device)
            (folder / str(rank)).write_bytes(pickle.dumps(found))
            if dist.is_initialized():
                dist.destroy_process_group()

        run_processes(workers, target, folder)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(workers)]
