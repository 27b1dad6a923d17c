"""Checks that synchronizations on this cluster satisfy two laws that hold for every method.

First, the averages (replicas) on all workers are bitwise equal. Second, gradients are conserved: the
residuals contain all that the averages lack.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.clusters import Cluster, Ledger, Network, ProcessGroupCluster, gather_rows
from spardl.clusters.profile import StepCosts, break_even_gbit, gather_costs
from spardl.communicators import Backend, SparDL
from spardl.compressors import Mass, NoCompression, TopK
from spardl.diagnostics.doctor.board import Findings
from spardl.method import registry
from spardl.method.method import Method, MethodState
from spardl.method.momentum import OptimizerMomentum
from spardl.method.recipes import make_method, method_names
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual
from spardl.protocol.programs import Phase
from spardl.vector.layout import Layout
from spardl.vector.sparse import SparseVector, Sum

__all__ = [
    "DENSITY",
    "LAYOUT",
    "ROUNDING",
    "STEPS",
    "Trial",
    "check_methods",
    "check_pace",
    "check_spardl",
    "dense_of",
    "distance",
    "every_method",
    "gradient_of",
    "lossless",
    "synchronize",
    "total",
    "try_method",
]

DENSITY = 0.01
LAYOUT = Layout.of([(100, 150), (5000,)])
"""A matrix and a vector, because some methods depend on shapes."""
STEPS = 2
"""Number of checked steps."""
ROUNDING = 1e-5
"""Largest relative error of a sum by rounding, with a significand of 24 bits."""
# Seconds for all methods except SparDL together.
_BUDGET = 10.0
# Entries of the timed gradient, longest dense all-reduce of it in seconds, and steps before and during the measurement.
_ENTRIES, _PATIENCE, _SETTLE, _TIMED = 1_000_000, 0.5, 2, 5


class Trial(NamedTuple):
    """Result of running a method on known gradients.

    Attributes:
        problem: Description of the fault; ``None`` without a fault. Equal on all workers.
        lost: 2-norm of the part that is neither in averages nor in residuals, divided by that of the gradients; 0
            without a check, because the method may lose gradients.
        average: Last average, shape (n,), on the CPU.
    """

    problem: str | None
    lost: float
    average: Tensor


def every_method(findings: Findings) -> dict[str, Method]:
    """Returns all methods by name, and additional ones so that every communicator is used with a suitable compressor.

    Args:
        findings: Receives warnings of methods that cannot be created without options.
    """
    methods: dict[str, Method] = {}
    for name in method_names():
        try:
            methods[name] = make_method(name)
        except ConfigError as error:
            findings.warn(f"methods: {name} is not checked because it needs options: {error}")
    compressors = [method.compressor for method in methods.values()]
    used = {type(method.communicator) for method in methods.values()}
    for kind in registry.communicators().values():
        if kind in used:
            continue
        communicator = kind()
        # Any compressor whose output the communicator can sum; LocalResidual keeps what such a pair leaves behind.
        compressor = next(each for each in compressors if each.output in communicator.sums)
        residual = LocalResidual() if compressor.mass is Mass.LEFT else NoResidual()
        methods[f"{compressor.name} with {communicator.name}"] = Method(compressor, communicator, residual)
    return methods


def lossless(method: Method) -> Method:
    """Returns a copy of the method without momentum, and with a residual that keeps everything that is not sent."""
    kept = type(method.residual)()
    residual = GlobalResidual() if method.compressor.sparsifies and method.residual.remembers else kept
    return replace(method, residual=residual, momentum=OptimizerMomentum())


def check_spardl(cluster: ProcessGroupCluster, networked: bool, findings: Findings) -> None:
    """Compares SparDL at density 1 with the dense average, and checks its laws at a low density."""
    alike = "use the same versions and the same kind of processor on all hosts"
    fix = f"training would be wrong; {alike if networked else 'report a bug with the versions above'}"
    average, _, _ = synchronize(cluster, _spardl(1.0), steps=1)
    off = distance(average.double() * cluster.size, total(cluster.size, steps=1))
    problem = _differing(cluster, average)
    findings.judge(
        problem is None and off <= ROUNDING,
        f"SparDL at density 1: {problem or f'equals the dense average within {off:.0e}'}",
        f"rounding explains at most {ROUNDING:g}, so {fix}",
    )
    problem, off, _ = try_method(cluster, _spardl(DENSITY))
    findings.judge(
        problem is None,
        f"SparDL at density {DENSITY:g}: {problem or f'replicas bitwise equal, gradients conserved within {off:.0e}'}",
        fix,
    )


def check_methods(cluster: ProcessGroupCluster, findings: Findings) -> None:
    """Checks all methods: equal replicas and, where a method claims it, conserved gradients."""
    began, done, spent, before = time.perf_counter(), 0, 0.0, findings.failures
    methods = every_method(findings)
    for name, method in methods.items():
        # As published, and with nothing lost, so that the sum can be checked; a dict drops equal methods.
        tried = dict.fromkeys((method, lossless(method)))
        problem = next((problem for each in tried for problem, *_ in [try_method(cluster, each)] if problem), None)
        if problem:
            findings.fail(f"{name}: {problem}; do not use it on this cluster, and report a bug")
        done += 1
        # The clock of worker 0 decides, so that all workers stop at the same method.
        spent = float(gather_rows(cluster, [torch.tensor([time.perf_counter() - began])])[0])
        if spent > _BUDGET:
            break
    if done < len(methods):
        findings.warn(
            f"methods: {', '.join(list(methods)[done:])} not checked, because the others took {spent:.0f} s; run this "
            "again on an idle machine, or run spardl doctor --thorough"
        )
    elif findings.failures == before:
        named = sum(name in methods for name in method_names())
        findings.ok(
            f"methods: all {named} have equal replicas, and conserve gradients where they claim to ({spent:.1f} s)"
        )


def try_method(cluster: ProcessGroupCluster, method: Method, steps: int = STEPS) -> Trial:
    """Averages known gradients for ``steps`` steps, and checks that workers get equal averages and lose no gradient."""
    average, sent, (state,) = synchronize(cluster, method, steps)
    problem = _differing(cluster, average)
    if problem or not _conserves(method):
        return Trial(problem, 0.0, average)
    kept = state.memory.double() if method.residual.remembers else torch.zeros_like(state.memory, dtype=torch.float64)
    residuals = torch.stack(gather_rows(cluster, [kept])).sum(0).cpu()
    off = distance(sent + residuals, total(cluster.size, steps))
    if not off <= ROUNDING:  # also true for NaN
        problem = f"the sum of averages and residuals differs from that of the gradients by {off:.0e}"
    return Trial(problem, off, average)


def check_pace(cluster: ProcessGroupCluster, network: Network, findings: Findings) -> None:
    """Compares the time of SparDL with torch's dense all-reduce, and reports on which networks SparDL is faster."""
    share = 2 * (cluster.size - 1) / cluster.size
    # On a slow network the gradient is smaller, so that the dense all-reduce ends in time.
    entries = int(min(_ENTRIES, _PATIENCE / (share * network.beta * 4)))
    dense, _ = _paced(cluster, Method(NoCompression(), Backend(), NoResidual()), entries)
    sparse, costs = _paced(cluster, _spardl(DENSITY), entries)
    gbit = break_even_gbit(costs)
    verdict = "saves no bytes" if gbit is None else f"pays below {gbit:.2g} Gbit/s per worker"
    findings.ok(
        f"SparDL on {entries:,} entries at density {DENSITY:g}: {costs.rounds:.0f} rounds, {costs.words:,.0f} words, "
        f"{1e3 * sparse:.1f} ms; dense all-reduce of torch {1e3 * dense:.1f} ms; it {verdict}, and this network "
        f"has {network.gbit:.3g} Gbit/s"
    )


def _spardl(density: float) -> Method:
    return Method(TopK(density), SparDL(), GlobalResidual())


def _conserves(method: Method) -> bool:
    """Returns whether averages and residuals of this method should add up to the gradients."""
    if method.momentum.remembers:
        return False  # averages then contain momentum, not only gradients
    return isinstance(method.residual, GlobalResidual) or (
        (method.residual.remembers and not method.compressor.sparsifies) or method.compressor.mass is Mass.KEPT
    )


def gradient_of(rank: int, step: int, length: int) -> Tensor:
    """Returns a random gradient, shape (length,), that depends only on rank and step, so that all workers know it."""
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * step + rank))


def total(size: int, steps: int) -> Tensor:
    """Returns the sum of the gradients (see ``gradient_of``) of all workers and steps, float64, shape (n,)."""
    each = itertools.product(range(size), range(steps))
    return torch.stack([gradient_of(rank, step, LAYOUT.length).double() for rank, step in each]).sum(0)


def synchronize(cluster: Cluster, method: Method, steps: int) -> tuple[Tensor, Tensor, list[MethodState]]:
    """Averages known gradients for some steps.

    Args:
        cluster: Cluster that connects the workers.
        method: Method that averages the gradients.
        steps: Number of steps to run.

    Returns:
        Three values: the last average; P times the sum of the averages of all steps, in float64; and the state of each
        local worker. Both vectors have shape (n,) and are on the CPU.
    """
    states = [method.init_state(LAYOUT, torch.float32, cluster.device) for _ in cluster.local_workers]
    average, sent = torch.empty(0), torch.zeros(LAYOUT.length, dtype=torch.float64)
    for step in range(steps):
        pairs = list(zip(cluster.local_workers, states, strict=True))
        for worker, state in pairs:
            method.accumulate(gradient_of(worker.rank, step, LAYOUT.length).to(cluster.device), state)
        average = dense_of(cluster.run_uncounted([method.average(*pair) for pair in pairs])[0])
        sent += cluster.size * average.double()  # float64, so that this sum adds no rounding error
    return average, sent, states


def dense_of(found: Sum) -> Tensor:
    """Returns a dense copy of an average on the CPU, shape (n,)."""
    return (found.dense() if isinstance(found, SparseVector) else found.clone()).cpu()


def _differing(cluster: ProcessGroupCluster, average: Tensor) -> str | None:
    """Names the workers whose average differs from that of worker 0, or reports that it is not finite."""
    # Digests keep the message small; equal digests mean equal bits.
    digest = hashlib.sha256(average.numpy().tobytes()).digest()
    rows = gather_rows(cluster, [torch.tensor([*digest, average.isfinite().all()], dtype=torch.uint8)])
    others = [str(rank) for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if others:
        return f"the average of worker {', '.join(others)} differs from that of worker 0"
    return None if rows[0][-1] else "the average is not finite"


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the 2-norm of the difference of two vectors, divided by the 2-norm of the expected one.

    Args:
        found: Computed vector of shape (n,).
        expected: Reference vector of shape (n,).
    """
    return float((found - expected).norm() / expected.norm())


def _paced(cluster: ProcessGroupCluster, method: Method, entries: int) -> tuple[float, StepCosts]:
    """Returns the median seconds of the slowest worker, and the costs of a step."""
    (worker,), (ledger,) = cluster.local_workers, cluster.ledgers
    state = method.init_state(Layout.flat(entries), torch.float32, cluster.device)
    gradient = gradient_of(worker.rank, 0, entries).to(cluster.device)
    seconds = []
    for step in range(_SETTLE + _TIMED):
        if step == _SETTLE:  # costs of the first steps do not count
            ledger.load_state_dict(Ledger().state_dict())
        began = cluster.now(0)
        with cluster.timed(Phase.SELECT, [0]):
            method.accumulate(gradient, state)
        cluster.run([method.average(worker, state)])
        seconds.append(cluster.now(0) - began)
    # The slowest worker determines the duration of a step.
    rows = gather_rows(cluster, [torch.tensor([median(seconds[_SETTLE:])])])
    return max(float(row) for row in rows), gather_costs(cluster, _TIMED, gradient)
