"""Compiles what synchronizations of sparse gradients will call, before processes are forked that would each do it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from spardl.clusters.network import Network
from spardl.clusters.simulated import SimulatedCluster
from spardl.communicators.allgather import AllGather
from spardl.communicators.spardl import SparDL
from spardl.compressors.topk import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.vector.layout import Layout

__all__ = ["precompile"]

# Long enough that lists, merges and messages of several entries come up.
_LENGTH, _STEPS = 300, 2


def precompile(dtype: torch.dtype, methods: Iterable[Method] = ()) -> None:
    """Synchronizes small vectors of a type a few times, on simulated workers.

    Takes about a second, and some more the first time on a machine; later, compiled functions are read from a cache.

    Args:
        dtype: of the vectors.
        methods: further ones that will be used.
    """
    # Two vectors are merged by another kernel than three.
    for communicator, workers in ((SparDL(), 3), (AllGather(), 2), (AllGather(), 3)):
        _synchronize(Method(TopK(0.05), communicator, GlobalResidual()), workers, dtype)
    for method in methods:
        _synchronize(method, 2, dtype)


def _synchronize(method: Method, workers: int, dtype: torch.dtype) -> None:
    layout, random = Layout.flat(_LENGTH), torch.Generator().manual_seed(0)
    cluster = SimulatedCluster(workers, Network(0, 1))
    states = [method.init_state(layout, dtype) for _ in range(workers)]
    for _ in range(_STEPS):
        for state in states:
            method.accumulate(torch.randn(_LENGTH, generator=random).to(dtype), state)
        cluster.run_aside(
            [method.average(worker, state) for worker, state in zip(cluster.local_workers, states, strict=True)]
        )
