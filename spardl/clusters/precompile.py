"""Compiles what synchronizations will call before training begins, not in its first step."""

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

from spardl.basics.files import own_temporary_folder
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
from spardl.vector.layout import Layout, Part

__all__ = ["precompile", "prepare"]

# Long enough that lists, merges and messages of several entries come up.
_LENGTH, _STEPS = 300, 2
# A matrix that is long enough for every kernel that leaves short vectors to torch, and a short vector.
_SHAPES = ((100, 200), (50,))
# So many workers are as good as more.
_ENOUGH = 8
# Seconds after which a silence needs a word.
_PATIENCE = 1.0
# Seconds that a process waits for another one on the same machine that compiles, and between two looks at its lock.
_LOCK_TIMEOUT, _LOCK_INTERVAL = 600.0, 0.1
# Seconds between two lines of progress.
_PROGRESS = 10.0
# Threads of one process compile one after another: numba has a lock of its own, which must not be held by a thread that
# waits for the lock file of another thread.
_IN_PROCESS = threading.RLock()


def precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    """Synchronizes small vectors of a type a few times, on simulated workers.

    Takes about a second, and some more the first time on a machine; later, compiled functions are read from a cache.
    One process of a machine compiles, and the others wait for it; see :func:`prepare`.

    Args:
        dtype: of the vectors.
        methods: further ones that will be used.
    """
    with _compiling_once():
        _precompile(dtype, methods)


def _precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    # Two vectors are merged by another kernel than three.
    for communicator, workers in ((SparDL(), 3), (AllGather(), 2), (AllGather(), 3)):
        _synchronize(Method(TopK(0.05), communicator, GlobalResidual()), workers, dtype, Layout.flat(_LENGTH))
    _apply_threshold(dtype)
    for method in methods:
        _synchronize(method, 2, dtype, Layout.flat(_LENGTH))


def prepare(method: Method, workers: int, parts: Iterable[torch.Tensor], *, tells: bool = True) -> None:
    """Compiles what a method calls, before training begins: in the first step other workers would wait for it.

    Lines to the logger ``spardl`` show progress if it takes more than a second, as it does the first time on a machine;
    later processes read what was compiled from numba's cache. One process of a machine compiles: the others wait until
    it is done, at most ten minutes, and then read its cache. ``spardl precompile`` does it beforehand. Methods with
    parts of other packages are left to compile theirs when they are used.

    Args:
        method: that will be used.
        workers: how many there will be.
        parts: tensors of the types and on the devices of the gradients, of any shape.
        tells: whether this process is the one that says so.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    pieces = (method.compressor, method.communicator, method.residual, method.momentum)
    if not all(type(piece).__module__.startswith("spardl.") for piece in pieces):
        return
    begun = time.perf_counter()
    dtypes = sorted({part.dtype for part in parts if compiled(part)}, key=str)
    if not dtypes:
        return
    with _compiling_once(tells=tells):
        for dtype in dtypes:
            _run(method, _representative(method, workers), dtype)
    seconds = time.perf_counter() - begun
    if tells and seconds > _PATIENCE:
        logging.getLogger("spardl").warning(
            "%.1f s before training begins: the kernels of %s are compiled, or read from numba's cache",
            seconds,
            method.compressor.name,
        )


@contextmanager
def _compiling_once(*, tells: bool = True) -> Iterator[None]:
    """While this process compiles for the first time, others of this user on this machine wait for it."""
    if not compiled(torch.empty(0)):
        yield
        return
    from numba.core import event  # noqa: PLC0415 - numba is optional

    with _IN_PROCESS, _MachineLock(tells) as lock:

        class Compilation(event.Listener):  # type: ignore[misc]
            """Numba reports a function that its cache does not have."""

            def on_start(self, event: Any) -> None:
                lock.acquire()

            def on_end(self, event: Any) -> None:
                lock.count()

        with event.install_listener("numba:compile", Compilation()):
            yield


def _cache_name() -> str:
    """Differs between installations and caches, which need not wait for one another."""
    place = f"{kernels.__file__} {os.environ.get('NUMBA_CACHE_DIR')}"
    return f"{crc32(place.encode()):08x}"


class _MachineLock:
    """A lock file that the first process to compile holds until it has compiled all.

    A process that finds the file locked compiles the function that it asked for itself, once the other is done, and
    reads the others from numba's cache. A process that ends, in whatever way, releases its lock.

    Args:
        tells: whether to say that this process waits; the process that compiles always shows progress.
    """

    def __init__(self, tells: bool) -> None:
        self._tells, self._thread = tells, threading.get_ident()
        self._file: int | None = None
        self._done, self._begun, self._told = 0, 0.0, 0.0
        self._logger = logging.getLogger("spardl")
        self._gave_up = False

    def __enter__(self) -> _MachineLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def acquire(self) -> None:
        """Waits until no other process compiles."""
        if self._file is not None or self._gave_up or threading.get_ident() != self._thread:
            return
        folder = own_temporary_folder()
        if folder is None or not self._lock(folder / f"compiling-{_cache_name()}.lock"):
            self._release()
        self._begun = self._told = time.monotonic()

    def count(self) -> None:
        """A function is compiled."""
        if threading.get_ident() != self._thread:
            return
        self._done += 1
        now = time.monotonic()
        due = _PROGRESS if self._told > self._begun else _PATIENCE
        if self._file is not None and now - self._told > due:
            self._told = now
            self._logger.warning(
                "compiling kernels, once on this machine: %d done in %.0f s", self._done, now - self._begun
            )

    def _lock(self, path: Path) -> bool:
        """Waits for the lock file.

        Returns:
            Whether to keep it: after a wait, the cache has nearly all that is missing.
        """
        try:
            import fcntl  # noqa: PLC0415 - not on every system

            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (ImportError, OSError):
            self._gave_up = True
            return False
        begun, told, first = time.monotonic(), not self._tells, True
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return first
            first, waited = False, time.monotonic() - begun
            if not told and waited > _PATIENCE:
                told = True
                self._logger.warning("another process on this machine compiles the kernels; waiting for it")
            if waited > _LOCK_TIMEOUT:
                self._gave_up = True
                self._logger.warning("another process has held %s for %.0f s; compiling without it", path, waited)
                return False
            time.sleep(_LOCK_INTERVAL)

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@cache
def _run(method: Method, workers: int, dtype: torch.dtype) -> None:
    """Once in a process."""
    if isinstance(method.compressor, SparseCompressor):
        _precompile(dtype)
    _synchronize(replace(method, warmup=Warmup()), workers, dtype, Layout(_SHAPES))


def _representative(method: Method, workers: int) -> int:
    """The largest number of workers that shows what so many call, without the work of so many."""
    communicator = method.communicator
    return next((fewer for fewer in range(min(workers, _ENOUGH), 1, -1) if communicator.runs_on(fewer)), workers)


def _apply_threshold(dtype: torch.dtype) -> None:
    """To what a second step lists: whether a synchronization comes to that depends on its gradients."""
    values, part, candidates = torch.arange(1, _LENGTH + 1).to(dtype), Part(0, _LENGTH, _LENGTH // 10), Candidates()
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
        averages = cluster.run_aside(
            [method.average(worker, state) for worker, state in zip(cluster.local_workers, states, strict=True)]
        )
        write(averages[0], torch.empty(layout.length, dtype=dtype))
