"""Compiles the kernels of a method before training starts, so that the first step is not delayed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from spardl.basics.files import private_temporary_folder
from spardl.clusters.network import Network
from spardl.clusters.simulated import SimulatedCluster
from spardl.communicators.allgather import AllGather
from spardl.communicators.spardl import SparDL
from spardl.compressors.base import SparseCompressor
from spardl.compressors.topk import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.method.warmup import Warmup
from spardl.vector import kernels
from spardl.vector.candidates import Candidates
from spardl.vector.flat import write
from spardl.vector.kernels import compiled
from spardl.vector.layout import Layout, Range

__all__ = ["precompile", "prepare"]

# Entries and steps of a trial synchronization: enough to reach lists, merges and messages of several entries.
_LENGTH, _STEPS = 300, 2
# Some kernels fall back to torch for short vectors: one long matrix and one short vector reach both paths.
_SHAPES = ((100, 200), (50,))
# More workers than this call no further kernels.
_ENOUGH = 8
# Delay before progress is logged, in seconds.
_PATIENCE = 1.0
# Seconds to wait for another process of this machine that compiles, and seconds between two attempts to lock.
_LOCK_TIMEOUT, _LOCK_INTERVAL = 600.0, 0.1
# Seconds between two progress messages.
_PROGRESS = 10.0
# Threads of one process compile in sequence: a thread that waits for the lock file holds numba's global lock, so the
# thread that holds the file could not finish.
_IN_PROCESS = threading.RLock()


def precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    """Compiles the kernels for a dtype: runs several methods on small vectors, with simulated workers.

    Takes about a second, and longer the first time on a machine: later processes load the compiled functions from
    numba's cache. One process per machine compiles, and the others wait for it, as in :func:`prepare`.

    Args:
        dtype: Dtype of the gradients to compile for.
        methods: Further methods whose kernels are compiled, besides the usual ones.
    """
    with _compiling_once():
        _precompile(dtype, methods)


def _precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    # Merging two vectors and merging three use different kernels.
    for communicator, workers in ((SparDL(), 3), (AllGather(), 2), (AllGather(), 3)):
        _synchronize(Method(TopK(0.05), communicator, GlobalResidual()), workers, dtype, Layout.flat(_LENGTH))
    _apply_threshold(dtype)
    for method in methods:
        _synchronize(method, 2, dtype, Layout.flat(_LENGTH))


def prepare(method: Method, workers: int, parts: Iterable[torch.Tensor], *, logs: bool = True) -> None:
    """Compiles the kernels of a method before training, so that no worker compiles in the first step.

    The first time on a machine, this takes more than a second, and progress is logged to the logger ``spardl``; later
    processes load the kernels from numba's cache. One process per machine compiles, and the others wait for it for at
    most ten minutes. ``spardl precompile`` fills the cache in advance. If a part of the method (compressor,
    communicator, residual or momentum) comes from another package, nothing is compiled here, but on first use.

    Args:
        method: Method used for training.
        workers: Number of workers.
        parts: Tensors with the dtypes and devices of the gradients, of any shape.
        logs: Whether this process logs that it waits, and how long it took; the process that compiles always logs
            progress.

    Raises:
        ConfigError: If the method does not support this number of workers.
    """
    method.communicator.check_workers(workers)
    # A part of another package may have side effects, so it is never run before training.
    pieces = (method.compressor, method.communicator, method.residual, method.momentum)
    if not all(type(piece).__module__.startswith("spardl.") for piece in pieces):
        return
    begun = time.perf_counter()
    dtypes = sorted({part.dtype for part in parts if compiled(part)}, key=str)
    if not dtypes:
        return
    with _compiling_once(logs=logs):
        for dtype in dtypes:
            _run(method, _representative(method, workers), dtype)
    seconds = time.perf_counter() - begun
    if logs and seconds > _PATIENCE:
        logging.getLogger("spardl").warning(
            "compiling the kernels of %s, or loading them from numba's cache, delayed training by %.1f s",
            method.compressor.name,
            seconds,
        )


@contextmanager
def _compiling_once(*, logs: bool = True) -> Iterator[None]:
    """Makes other processes of this user and machine wait while this process compiles."""
    if not compiled(torch.empty(0)):
        yield
        return
    from numba.core import event  # noqa: PLC0415 - numba is optional

    with _IN_PROCESS, _MachineLock(logs) as lock:

        class Compilation(event.Listener):  # type: ignore[misc]
            """Listener for functions that are missing from numba's cache."""

            def on_start(self, event: Any) -> None:
                lock.acquire()

            def on_end(self, event: Any) -> None:
                lock.count()

        with event.install_listener("numba:compile", Compilation()):
            yield


def _cache_name() -> str:
    # Different installations and caches do not wait for one another.
    place = f"{kernels.__file__} {os.environ.get('NUMBA_CACHE_DIR')}"
    return f"{crc32(place.encode()):08x}"


class _MachineLock:
    """A lock file that the first process to compile holds until it has compiled everything.

    A process that finds the file locked waits, compiles the function that it requested, and loads the others from
    numba's cache. The kernel releases the lock of a process however it ends.

    Args:
        logs: Whether to log that this process waits; the process that compiles always logs progress.
    """

    def __init__(self, logs: bool) -> None:
        self._logs, self._thread = logs, threading.get_ident()
        self._file: int | None = None
        self._done, self._begun, self._logged_at = 0, 0.0, 0.0
        self._logger = logging.getLogger("spardl")
        self._gave_up = False

    def __enter__(self) -> _MachineLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def acquire(self) -> None:
        """Waits until no other process of this machine compiles, at most ten minutes."""
        if self._file is not None or self._gave_up or threading.get_ident() != self._thread:
            return
        folder = private_temporary_folder()
        if folder is None or not self._lock(folder / f"compiling-{_cache_name()}.lock"):
            self._release()
        self._begun = self._logged_at = time.monotonic()

    def count(self) -> None:
        """Counts a compiled function and logs progress."""
        if threading.get_ident() != self._thread:
            return
        self._done += 1
        now = time.monotonic()
        due = _PROGRESS if self._logged_at > self._begun else _PATIENCE
        if self._file is not None and now - self._logged_at > due:
            self._logged_at = now
            self._logger.warning(
                "compiling kernels, once per machine: %d compiled in %.0f s", self._done, now - self._begun
            )

    def _lock(self, path: Path) -> bool:
        """Waits for the lock file.

        Returns:
            Whether to keep the lock: after a wait, the cache already holds nearly all kernels.
        """
        try:
            import fcntl  # noqa: PLC0415 - not on every system

            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (ImportError, OSError):
            self._gave_up = True
            return False
        begun, logged, first = time.monotonic(), not self._logs, True
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return first
            first, waited = False, time.monotonic() - begun
            if not logged and waited > _PATIENCE:
                logged = True
                self._logger.warning(
                    "another process on this machine, usually another rank, is compiling the kernels; waiting for it"
                )
            if waited > _LOCK_TIMEOUT:
                self._gave_up = True
                self._logger.warning("another process has held %s for %.0f s; compiling without the lock", path, waited)
                return False
            time.sleep(_LOCK_INTERVAL)

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@cache  # once per process
def _run(method: Method, workers: int, dtype: torch.dtype) -> None:
    if isinstance(method.compressor, SparseCompressor):
        _precompile(dtype)
    _synchronize(replace(method, warmup=Warmup()), workers, dtype, Layout(_SHAPES))


def _representative(method: Method, workers: int) -> int:
    """Returns a small number of workers that the method supports; it needs the same kernels as ``workers``."""
    communicator = method.communicator
    # Some communicators need a power of two, so the cap itself may be invalid.
    return next((fewer for fewer in range(min(workers, _ENOUGH), 1, -1) if communicator.runs_on(fewer)), workers)


def _apply_threshold(dtype: torch.dtype) -> None:
    # A second step may compile the threshold scan, but whether a synchronization reaches it depends on its gradients.
    values, part, candidates = torch.arange(1, _LENGTH + 1).to(dtype), Range(0, _LENGTH, _LENGTH // 10), Candidates()
    candidates.add(values, None)
    candidates.largest(values, [part], [])
    candidates.add(values, None)
    candidates.reaching(values, part, float(_LENGTH), _LENGTH, [])


def _synchronize(method: Method, workers: int, dtype: torch.dtype, layout: Layout) -> None:
    random = torch.Generator().manual_seed(0)
    cluster = SimulatedCluster(workers, Network(0, 1))
    states = [method.init_state(layout, dtype) for _ in range(workers)]
    for _ in range(_STEPS):
        for state in states:
            method.accumulate(torch.randn(layout.length, generator=random).to(dtype), state)
        averages = cluster.run_uncounted(
            [method.average(worker, state) for worker, state in zip(cluster.local_workers, states, strict=True)]
        )
        write(averages[0], torch.empty(layout.length, dtype=dtype))
