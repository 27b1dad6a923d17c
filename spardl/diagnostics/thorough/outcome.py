"""What a thorough check is told, and what it answers."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spardl.clusters.workers.processes import run_processes
from spardl.diagnostics.doctor.board import VARIABLES, Verdict

__all__ = ["Outcome", "Place", "backend_of", "failed", "judged", "ok", "plain", "setting", "shared", "warned"]


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    Attributes:
        device: ``cuda``, or ``cpu`` where there is no GPU: with what takes a GPU made smaller, and Triton interpreted.
        timeout: seconds that bound every wait for another worker.
        seconds: what the check may take; those that measure do so less often if time is short.
    """

    device: str
    timeout: float
    seconds: float

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device; all workers of this machine share the first GPU."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        verdict: how good that is.
        text: what, where and, unless all is well, the fix: one line.
        figures: all that was measured; plain data.
    """

    verdict: Verdict
    text: str
    figures: Mapping[str, Any]


def ok(text: str, figures: Mapping[str, Any]) -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, text, figures)


def warned(text: str, figures: Mapping[str, Any]) -> Outcome:
    """It works, but not well."""
    return Outcome(Verdict.WARNING, text, figures)


def failed(text: str, figures: Mapping[str, Any]) -> Outcome:
    """It does not work."""
    return Outcome(Verdict.FAILED, text, figures)


def judged(good: str, problems: list[str], fix: str, figures: Mapping[str, Any]) -> Outcome:
    """All is well unless there are problems, the first of which is told with their number."""
    if not problems:
        return ok(good, figures)
    more = f", and {len(problems) - 1} more like this" if problems[1:] else ""
    return failed(f"{problems[0]}{more}; {fix}", {**figures, "problems": problems})


def plain(value: Any) -> Any:
    """Data that JSON has a form for: numbers that are none become text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Workers of this machine that share one device: forked before any of them has touched it.


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
