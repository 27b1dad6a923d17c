"""Whether synchronizations are right here: the laws that every method has to keep, checked on this cluster."""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import fields
from statistics import median

import torch
from torch import Tensor

from doctoring.findings import Findings
from spardl.clusters import Ledger, Network, ProcessGroupCluster, gather_rows
from spardl.clusters.step_costs import StepCosts, break_even_gbit, gather_costs
from spardl.communicators import Backend, SparDL
from spardl.compressors import Compressor, Mass, NoCompression, TopK
from spardl.method import registry
from spardl.method.method import Method, MethodState
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, Residual
from spardl.protocol.programs import Phase
from spardl.vector.layout import Layout
from spardl.vector.sparse import SparseVector

__all__ = ["check_methods", "check_pace", "check_spardl", "registered", "try_out"]

DENSITY = 0.01
# A matrix and a vector, for methods that look at shapes; the steps that are checked.
_LAYOUT, _STEPS = Layout.of([(100, 150), (5000,)]), 2
# The part of a sum that rounding may change, at 24 bits.
_ROUNDING = 1e-5
# Seconds that all other methods may take together.
_BUDGET = 10.0
# Entries of the gradient that is timed, seconds that one dense all-reduce of it may take, steps before and while timed.
_ENTRIES, _PATIENCE, _SETTLE, _TIMED = 1_000_000, 0.5, 2, 5


def registered(density: float) -> dict[str, Method]:
    """Every communicator and every compressor of the library, each with the first partner that fits.

    Args:
        density: of those that have one.

    Returns:
        The methods by name, with the residual that keeps most.
    """
    ways = [kind() for kind in registry.communicators().values()]
    compressors = [_with_density(kind, density) for kind in registry.compressors().values()]
    pairs = [(next(one for one in compressors if one.output in way.sums), way) for way in ways]
    pairs += [(one, next(way for way in ways if one.output in way.sums)) for one in compressors]
    return {f"{one.name} with {way.name}": Method(one, way, _best_residual(one)) for one, way in pairs}


def _with_density(kind: type[Compressor], density: float) -> Compressor:
    given = {"density": density} if "density" in {field.name for field in fields(kind)} else {}  # type: ignore[arg-type]
    return kind(**given)


def _best_residual(compressor: Compressor) -> Residual:
    if compressor.sparsifies:
        return GlobalResidual()
    return LocalResidual() if compressor.mass is Mass.LEFT else NoResidual()


def check_spardl(cluster: ProcessGroupCluster, findings: Findings) -> None:
    """SparDL at density 1 against the dense average, and its laws at a low density."""
    fix = "training would go wrong; see that all hosts have the same versions and the same kind of processor"
    average, _, _ = _synchronized(cluster, _spardl(1.0), steps=1)
    off = _distance(average.double() * cluster.size, _total(cluster.size, steps=1))
    problem = _differing(cluster, average)
    findings.judge(
        problem is None and off <= _ROUNDING,
        f"SparDL at density 1: {problem or f'equals the dense average but for {off:.0e} of it'}",
        f"rounding makes {_ROUNDING:g} at most, {fix}",
    )
    problem, off = try_out(cluster, _spardl(DENSITY))
    findings.judge(
        problem is None,
        f"SparDL at density {DENSITY:g}: {problem or f'replicas equal to the last bit, mass kept but for {off:.0e}'}",
        fix,
    )


def check_methods(cluster: ProcessGroupCluster, findings: Findings) -> None:
    """All other methods once: equal replicas, and where they claim it, all mass kept."""
    began, done, before = time.perf_counter(), 0, findings.failures
    methods = registered(DENSITY)
    for name, method in methods.items():
        problem, _ = try_out(cluster, method)
        if problem:
            findings.fail(f"{name}: {problem}; do not use it here, and report it")
        done += 1
        # The first worker's clock decides for all.
        spent = gather_rows(cluster, [torch.tensor([time.perf_counter() - began])])[0]
        if float(spent) > _BUDGET:
            break
    if done < len(methods):
        findings.warn(
            f"methods: {done} of {len(methods)} checked in {_BUDGET:g} s; on a faster network, run this again"
        )
    elif findings.failures == before:
        findings.ok(f"methods: all {done} have equal replicas, and keep all mass where they claim to")


def try_out(cluster: ProcessGroupCluster, method: Method) -> tuple[str | None, float]:
    """What is wrong with a method, if anything, and which part of the mass is lost; the same on all workers."""
    average, sent, state = _synchronized(cluster, method, _STEPS)
    problem = _differing(cluster, average)
    if problem or not _conserves(method):
        return problem, 0.0
    kept = state.memory.double() if method.residual.remembers else torch.zeros_like(state.memory, dtype=torch.float64)
    residuals = torch.stack(gather_rows(cluster, [kept])).sum(0).cpu()
    off = _distance(sent + residuals, _total(cluster.size, _STEPS))
    if not off <= _ROUNDING:  # nor if it is no number
        problem = f"residuals and averages add up to something else than the gradients, {off:.0e} of it"
    return problem, off


def check_pace(cluster: ProcessGroupCluster, network: Network, findings: Findings) -> None:
    """SparDL's seconds beside those of torch's all-reduce, and on which networks that pays."""
    share = 2 * (cluster.size - 1) / cluster.size
    entries = int(min(_ENTRIES, _PATIENCE / (share * network.beta * 4)))
    dense, _ = _paced(cluster, Method(NoCompression(), Backend(), NoResidual()), entries)
    sparse, costs = _paced(cluster, _spardl(DENSITY), entries)
    gbit = break_even_gbit(costs)
    verdict = "saves no bytes" if gbit is None else f"pays below {gbit:.2g} Gbit/s per worker"
    findings.ok(
        f"SparDL of {entries:,} entries at density {DENSITY:g}: {costs.rounds:.0f} rounds, {costs.words:,.0f} words, "
        f"{1e3 * sparse:.1f} ms; torch's dense all-reduce {1e3 * dense:.1f} ms; it {verdict}, and this network has "
        f"{network.gbit:.3g}"
    )


def _spardl(density: float) -> Method:
    return Method(TopK(density), SparDL(), GlobalResidual())


def _conserves(method: Method) -> bool:
    return method.compressor.mass is Mass.KEPT or method.residual.remembers


def _gradient(rank: int, step: int, length: int) -> Tensor:
    """A worker's gradient, which every worker can make: what is right is known without sending anything."""
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * step + rank))


def _total(size: int, steps: int) -> Tensor:
    """The sum of all gradients in float64."""
    each = itertools.product(range(size), range(steps))
    return torch.stack([_gradient(rank, step, _LAYOUT.length).double() for rank, step in each]).sum(0)


def _synchronized(cluster: ProcessGroupCluster, method: Method, steps: int) -> tuple[Tensor, Tensor, MethodState]:
    """The last average, P times the sum of all in float64 (both on the CPU), and this worker's state."""
    (worker,) = cluster.local_workers
    state = method.init_state(_LAYOUT, torch.float32, cluster.device)
    average, sent = torch.empty(0), torch.zeros(_LAYOUT.length, dtype=torch.float64)
    for step in range(steps):
        method.accumulate(_gradient(worker.rank, step, _LAYOUT.length).to(cluster.device), state)
        (found,) = cluster.run_aside([method.average(worker, state)])
        average = (found.dense() if isinstance(found, SparseVector) else found.clone()).cpu()
        sent += cluster.size * average.double()
    return average, sent, state


def _differing(cluster: ProcessGroupCluster, average: Tensor) -> str | None:
    """Which workers have another average than the first one; also if it is not finite."""
    digest = hashlib.sha256(average.numpy().tobytes()).digest()
    rows = gather_rows(cluster, [torch.tensor([*digest, average.isfinite().all()], dtype=torch.uint8)])
    others = [str(rank) for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if others:
        return f"the average of worker {', '.join(others)} differs from that of worker 0"
    return None if rows[0][-1] else "the average is not finite"


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _paced(cluster: ProcessGroupCluster, method: Method, entries: int) -> tuple[float, StepCosts]:
    """Median seconds of the slowest worker, and what a step costs."""
    (worker,), (ledger,) = cluster.local_workers, cluster.ledgers
    state = method.init_state(Layout.flat(entries), torch.float32, cluster.device)
    gradient = _gradient(worker.rank, 0, entries).to(cluster.device)
    seconds = []
    for step in range(_SETTLE + _TIMED):
        if step == _SETTLE:
            ledger.load_state_dict(Ledger().state_dict())
        began = cluster.now(0)
        with cluster.timed(Phase.SELECT, [0]):
            method.accumulate(gradient, state)
        cluster.run([method.average(worker, state)])
        seconds.append(cluster.now(0) - began)
    rows = gather_rows(cluster, [torch.tensor([median(seconds[_SETTLE:])])])
    return max(float(row) for row in rows), gather_costs(cluster, _TIMED, gradient)
