"""Compiles what synchronizations will call before training begins, not in its first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch

from spardl.clusters.network import Network
from spardl.clusters.simulated import SimulatedCluster
from spardl.communicators.allgather import AllGather
from spardl.communicators.spardl import SparDL
from spardl.compressors.base import SparseCompressor
from spardl.compressors.topk import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.method.warmup import Warmup
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


def precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    """Synchronizes small vectors of a type a few times, on simulated workers.

    Takes about a second, and some more the first time on a machine; later, compiled functions are read from a cache.

    Args:
        dtype: of the vectors.
        methods: further ones that will be used.
    """
    # Two vectors are merged by another kernel than three.
    for communicator, workers in ((SparDL(), 3), (AllGather(), 2), (AllGather(), 3)):
        _synchronize(Method(TopK(0.05), communicator, GlobalResidual()), workers, dtype, Layout.flat(_LENGTH))
    _apply_threshold(dtype)
    for method in methods:
        _synchronize(method, 2, dtype, Layout.flat(_LENGTH))


def prepare(method: Method, workers: int, parts: Iterable[torch.Tensor], *, tells: bool = True) -> None:
    """Compiles what a method calls, before training begins: in the first step other workers would wait for it.

    A line to the logger ``spardl`` says so if it takes more than a second, as it does the first time on a machine;
    later processes read what was compiled from numba's cache. Methods with parts of other packages are left to compile
    theirs when they are used.

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
    for dtype in sorted({part.dtype for part in parts if compiled(part)}, key=str):
        _run(method, _representative(method, workers), dtype)
    seconds = time.perf_counter() - begun
    if tells and seconds > _PATIENCE:
        logging.getLogger("spardl").warning(
            "%.1f s before training begins: the kernels of %s are compiled, or read from numba's cache",
            seconds,
            method.compressor.name,
        )


@cache
def _run(method: Method, workers: int, dtype: torch.dtype) -> None:
    """Once in a process."""
    if isinstance(method.compressor, SparseCompressor):
        precompile(dtype)
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
