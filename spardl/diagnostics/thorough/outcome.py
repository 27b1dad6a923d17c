"""Inputs and results of a thorough check, and the worker processes that several checks share."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spardl.clusters.workers.processes import run_processes
from spardl.diagnostics.doctor.board import VARIABLES, Verdict

__all__ = ["Outcome", "Place", "backend_of", "failed", "judged", "ok", "plain", "setting", "shared", "warned"]


@dataclass(frozen=True)
class Place:
    """Device and time limits of a check.

    Attributes:
        device: ``cuda`` or ``cpu``; on ``cpu``, sizes are smaller and Triton kernels run in Triton's interpreter.
        timeout: Timeout of every wait for another worker, in seconds.
        seconds: Time limit of the check; measurements use fewer repetitions if it is short.
    """

    device: str
    timeout: float
    seconds: float

    @property
    def on_gpu(self) -> bool:
        """Whether the check runs on a GPU."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device as a ``torch.device``; all workers of this machine share the first GPU."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        verdict: Whether the check passed.
        text: One line that says what was checked and where; if the check did not pass, also how to fix the problem.
        figures: All measured values, as plain data.
    """

    verdict: Verdict
    text: str
    figures: Mapping[str, Any]


ok, warned, failed = (partial(Outcome, verdict) for verdict in (Verdict.OK, Verdict.WARNING, Verdict.FAILED))


def judged(good: str, problems: list[str], fix: str, figures: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of a check: passed without ``problems``, otherwise failed with the first and their number."""
    if not problems:
        return ok(good, figures)
    more = f", and {len(problems) - 1} more problems" if problems[1:] else ""
    return failed(f"{problems[0]}{more}; {fix}", {**figures, "problems": problems})


def plain(value: Any) -> Any:
    """Converts a value to types that JSON supports; non-finite numbers become text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Workers of this machine that share one device.


T = TypeVar("T")


def backend_of(place: Place, workers: int) -> str:
    """Returns the name of the backend for a check: ``nccl`` for one worker on a GPU, otherwise ``gloo``."""
    # NCCL rejects two workers on one GPU; gloo does not.
    return "nccl" if place.on_gpu and workers == 1 else "gloo"


def setting(place: Place, workers: int) -> str:
    """Returns the workers, the backend and the device as text, for the line of an outcome."""
    return f"{workers} worker{'s' * (workers > 1)} over {backend_of(place, workers)} on {place.device}"


def shared(place: Place, workers: int, work: Callable[[torch.device], T]) -> list[T]:
    """Runs a function in new worker processes that form a process group; call it before this process uses a GPU.

    Args:
        place: Device and time limits of the check.
        workers: Number of workers.
        work: Function to run, which receives the device; its result must support pickling.

    Returns:
        The results, ordered by rank.

    Raises:
        WorkerError: If a worker ended early.
    """
    # CUDA does not survive a fork, so the workers are forked before anything uses the device.
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
            # A file rather than a pipe: results may exceed what a pipe holds.
            (folder / str(rank)).write_bytes(pickle.dumps(found))
            if dist.is_initialized():  # the check may have closed it
                dist.destroy_process_group()

        run_processes(workers, target, folder)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(workers)]
