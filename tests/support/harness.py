"""Runs methods in the clusters, as every test of a law needs it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spardl as package
from spardl.clusters import Cluster, Network, ProcessGroupCluster, SimulatedCluster
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.processes import run_processes
from spardl.communicators import AllGather, Communicator, Dense, GTopk, SparDL, TopkDSA
from spardl.compressors import ARCTopK, Cast, Compressor, Mass, NoCompression, PowerSGD, TopK
from spardl.compressors.base import SparseCompressor
from spardl.method import registry
from spardl.method.method import Method, MethodState
from spardl.method.registry import incompatibility
from spardl.method.residuals import (
    GlobalResidual,
    LocalResidual,
    NoResidual,
    PartialResidual,
    RescaledResidual,
    Residual,
)
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout, Range
from spardl.vector.sparse import SparseVector, Sum

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


def compressors(density: float) -> list[Compressor]:
    """Every compressor, and those forms that have a path of their own."""
    return [
        *(_with_density(kind, density) for kind in registry.compressors().values()),
        TopK(density, scope="layer"),
        TopK(density, scope="bucket", bucket_entries=16),
        ARCTopK(density, sketch=1),
        PowerSGD(1),
        PowerSGD(2, warm_start=False),
        Cast("fp16"),
    ]


def _with_density(kind: type[Compressor], density: float) -> Compressor:
    names = {field.name for field in fields(kind)}
    return kind(**{"density": density} if "density" in names else {})


def communicators(workers: int) -> list[Communicator[Any, Any]]:
    """Every communicator, and those forms that have a path of their own and that a number of workers allows."""
    kinds = registry.communicators().values()
    forms = [GTopk("doubling"), TopkDSA(dense_above=0.0), *spardl_communicators(workers)[1:]]
    return [*(kind() for kind in kinds), *forms]


def residual_rules() -> list[Residual]:
    return [NoResidual(), RescaledResidual(), LocalResidual(), PartialResidual(), GlobalResidual()]


def legal(parts: Iterable[tuple[Compressor, Communicator[Any, Any], Residual]]) -> list[Method]:
    """The methods that these parts make, without what does not fit together."""
    return [Method(*three) for three in parts if incompatibility(*map(type, three)) is None]


def published_parts(kinds: Mapping[str, type]) -> set[str]:
    """The names of those that the package exports; others are somebody's work in progress, and need no docs."""
    return {name for name, kind in kinds.items() if kind.__name__ in package.__all__}


def published_methods() -> set[str]:
    """The names of those whose parts are all published."""
    compressors, communicators = published_parts(registry.compressors()), published_parts(registry.communicators())
    declared = registry.combinations().values()
    return {each.name for each in declared if each.compressor in compressors and each.communicator in communicators}


def best_residual(compressor: Compressor) -> Residual:
    """The rule that keeps most with a compressor."""
    if compressor.sparsifies:
        return GlobalResidual()
    return LocalResidual() if compressor.mass is Mass.LEFT else NoResidual()


def representatives(workers: int, density: float) -> list[Method]:
    """Every communicator with its first compressor, and every compressor with its first communicator."""
    every, ways = compressors(density), communicators(workers)
    pairs = [(next(c for c in every if c.output in way.sums), way) for way in ways]
    pairs += [(compressor, next(w for w in ways if compressor.output in w.sums)) for compressor in every]
    methods = [Method(compressor, way, best_residual(compressor)) for compressor, way in pairs]
    return [method for place, method in enumerate(methods) if method not in methods[:place]]


def conserves(method: Method) -> bool:
    """Whether a method claims to lose no mass."""
    return method.compressor.mass is Mass.KEPT or (
        method.compressor.mass is Mass.LEFT and type(method.residual) is type(best_residual(method.compressor))
    )


def conserving_methods(workers: int, density: float) -> list[Method]:
    """Representatives of the methods that claim to lose no mass."""
    return [method for method in representatives(workers, density) if conserves(method)]


def sparse_methods(workers: int, density: float) -> list[Method]:
    """Top-k with every communicator that takes it, in every form, and global residuals."""
    return legal((TopK(density), way, GlobalResidual()) for way in communicators(workers))


def remembering_methods(workers: int, density: float) -> list[Method]:
    """Representatives of the methods with error feedback."""
    return [method for method in representatives(workers, density) if method.residual.remembers]


def all_methods(workers: int, density: float) -> list[Method]:
    """Every legal pair of compressor and communicator; for top-k with every residual and in every form."""
    first = {type(way): way for way in reversed(communicators(workers))}
    forms = itertools.product([TopK(density)], communicators(workers), residual_rules())
    pairs = itertools.product(compressors(density), first.values())
    return legal(forms) + legal((compressor, way, best_residual(compressor)) for compressor, way in pairs)


def context(length: int, worker: Worker = Worker(0, 1), step: int = 0) -> Context:  # noqa: B008 - immutable
    return Context(worker, layout_of(length), step)


def layout_of(length: int) -> Layout:
    """Matrices, vectors and an empty tensor that make up a length."""
    rows = length // 8
    return Layout.of([(rows, 4), (min(3, length - 4 * rows),), (0,), (length - 4 * rows - min(3, length - 4 * rows),)])


def selected(
    compressor: SparseCompressor, values: Tensor, k: int, at: Context | None = None, state: State | None = None
) -> list[int]:
    """The positions that a compressor picks of a whole vector."""
    select = compressor.selector(at or context(values.numel()), state or State())
    positions: list[int] = select(Accumulator(values), [Range(0, values.numel(), k)]).tolist()
    return positions


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
        states = [method.init_state(layout_of(length), dtype) for _ in range(workers)]
        return cls(method, SimulatedCluster(workers, NETWORK, count_local=False), states)

    def step(self, gradients: Sequence[Tensor]) -> list[Sum]:
        for gradient, state in zip(gradients, self.states, strict=True):
            self.method.accumulate(gradient, state)
        return run_method(self.method, self.cluster, self.states)

    def residuals(self) -> Tensor:
        """The sum of what all workers carry over, shape (n,)."""
        if not self.method.residual.remembers:
            return torch.zeros_like(self.states[0].memory)
        return torch.stack([state.memory for state in self.states]).sum(0)


def run_method(method: Method, cluster: Cluster, states: Sequence[MethodState]) -> list[Sum]:
    """One synchronization; results are copied out of the states' memory."""
    averages = cluster.run(
        [method.average(worker, state) for worker, state in zip(cluster.local_workers, states, strict=True)]
    )
    return [average if isinstance(average, SparseVector) else average.clone() for average in averages]


@cache
def _compiled() -> None:
    """Compiles what a fresh checkout has not compiled yet: once, instead of in all workers at the same time."""
    precompile(torch.float32)


def run_workers(workers: int, work: Callable[[ProcessGroupCluster], Any], timeout: float = 60.0) -> list[Any]:
    """Calls ``work(cluster)`` in real processes over gloo and returns what each of them returned."""
    _compiled()
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
