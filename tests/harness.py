"""Runs methods in the clusters, as every test of a law needs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spardl.clusters import Cluster, Network, ProcessGroupCluster, SimulatedCluster
from spardl.communicators import AllGather, Backend, Communicator, Dense, SparDL
from spardl.communicators.base import Sum
from spardl.compressors import NoCompression, TopK
from spardl.method import Method, MethodState
from spardl.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, Residual
from spardl.sparse import SparseVector
from spardl.training.processes import run_processes

NETWORK = Network(alpha=1e-4, gbit=1)


def dense() -> Method:
    return Method(NoCompression(), Dense(), NoResidual())


def topka(density: float, residual: Residual | None = None) -> Method:
    return Method(TopK(density), AllGather(), residual or LocalResidual())


def spardl(density: float, teams: int = 1, gather: str = "bruck", residual: Residual | None = None) -> Method:
    return Method(TopK(density), SparDL(teams, gather), residual or GlobalResidual())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def spardl_communicators(workers: int) -> list[SparDL]:
    """Every team size and both ways to gather that a number of workers allows."""
    return [
        SparDL(d, gather)
        for d in divisors(workers)
        for gather in ("bruck", "recursive")
        if gather == "bruck" or d & (d - 1) == 0
    ]


def conserving_methods(workers: int, density: float) -> list[Method]:
    """Every method of this library that claims to lose no mass, at every team size."""
    sparse: list[Communicator[Any]] = [AllGather(), *spardl_communicators(workers)]
    return [dense(), *(Method(TopK(density), communicator, GlobalResidual()) for communicator in sparse)]


def all_methods(workers: int, density: float) -> list[Method]:
    """Every legal combination, at every team size."""
    sparse: list[Communicator[Any]] = [AllGather(), *spardl_communicators(workers)]
    rules = [NoResidual(), LocalResidual(), PartialResidual(), GlobalResidual()]
    return [
        dense(),
        Method(NoCompression(), Backend(), NoResidual()),
        *(Method(TopK(density), communicator, rule) for communicator in sparse for rule in rules),
    ]


def to_dense(value: Sum) -> Tensor:
    return value.dense() if isinstance(value, SparseVector) else value


def same_bits(one: Sum, other: Sum) -> bool:
    """Equal to the last bit, -0.0 and 0.0 being different."""
    if isinstance(one, SparseVector) and isinstance(other, SparseVector):
        return torch.equal(one.indices, other.indices) and same_bits(one.values, other.values)
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass
class Bench:
    """A method's workers in a simulated cluster, with their states."""

    method: Method
    cluster: SimulatedCluster
    states: list[MethodState]

    @classmethod
    def build(cls, method: Method, workers: int, length: int, dtype: torch.dtype = torch.float64) -> Bench:
        states = [method.init_state(length, dtype) for _ in range(workers)]
        return cls(method, SimulatedCluster(workers, NETWORK, count_local=False), states)

    def step(self, gradients: Sequence[Tensor]) -> list[Sum]:
        for gradient, state in zip(gradients, self.states, strict=True):
            self.method.accumulate(gradient, state)
        return run_method(self.method, self.cluster, self.states)

    def residuals(self) -> Tensor:
        """The sum of what all workers carry over."""
        if not self.method.residual.remembers:
            return torch.zeros_like(self.states[0].memory)
        return torch.stack([state.memory for state in self.states]).sum(0)


def run_method(method: Method, cluster: Cluster, states: Sequence[MethodState]) -> list[Sum]:
    """One synchronization; results are copied out of the states' memory."""
    averages = cluster.run(
        [method.average(worker, state) for worker, state in zip(cluster.local_workers, states, strict=True)]
    )
    return [average if isinstance(average, SparseVector) else average.clone() for average in averages]


def run_workers(workers: int, work: Callable[[ProcessGroupCluster], Any], timeout: float = 60.0) -> list[Any]:
    """Calls ``work(cluster)`` in real processes over gloo and returns what each of them returned."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def target(rank: int, heartbeat: Callable[[int], None]) -> None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), workers),
                rank=rank,
                world_size=workers,
                timeout=timedelta(seconds=timeout),
            )
            torch.save(work(ProcessGroupCluster()), folder / f"result-{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()

        run_processes(workers, target, folder)
        return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(workers)]
