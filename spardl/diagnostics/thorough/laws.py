"""Thorough checks of methods on the device: the laws of every method, and equality with a simulation on the CPU.

The laws are two properties that a method must have: averages are equal on all workers, and no part of a gradient is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.communicators import Backend
from spardl.compressors import TopK
from spardl.diagnostics.doctor.board import Findings
from spardl.diagnostics.doctor.correctness import (
    DENSITY,
    LAYOUT,
    ROUNDING,
    STEPS,
    distance,
    every_method,
    lossless,
    synchronize,
    total,
    try_method,
)
from spardl.diagnostics.thorough.outcome import Outcome, Place, judged, setting, shared, warned
from spardl.method.method import Method

__all__ = ["check_laws", "simulated"]

# Largest relative distance to the simulated average when rounding makes a few other entries pass a threshold.
_ELSEWHERE = 0.3
# Rounding error of sums by the backend, which may use another order and 16 bits.
_SIXTEEN = 2.0**-7
_FIX = "do not use it on this device, and report a bug with the file of --json"


class _Case(NamedTuple):
    """A method in one configuration.

    Attributes:
        method: Method to check.
        steps: Number of steps to run.
        expected: Last average of simulated workers on the CPU.
        dense: Whether the average must also equal the dense average.
    """

    method: Method
    steps: int
    expected: Tensor
    dense: bool


class _Found(NamedTuple):
    """Result of one case.

    Attributes:
        problem: Description of the fault, or ``None``.
        lost: Share of the gradients that is in no average and no residual.
        off: Relative distance of the average to the simulated one.
        same: Whether both averages have the same bits.
    """

    problem: str | None
    lost: float
    off: float
    same: bool


def check_laws(workers: int) -> Callable[[Place], Outcome]:
    """Returns the check of all methods, for ``workers`` workers that share the device."""

    def check(place: Place) -> Outcome:
        cases = _cases(workers)
        # The results of one worker suffice: a deviation between workers is a problem that all of them report.
        (found, *_) = shared(place, workers, lambda device: _try_all(place, device, cases))
        return _verdict(place, workers, cases, found)

    return check


def simulated(method: Method, workers: int, steps: int) -> Tensor:
    """Averages known gradients with workers that are simulated on the CPU; returns the last average, shape (n,)."""
    return synchronize(SimulatedCluster(workers, Network(0, 1), count_local=False), method, steps)[0]


def _cases(workers: int) -> dict[str, _Case]:
    """Returns every method as published, with a residual that loses nothing, and with top-k at density 1."""
    cases: dict[str, _Case] = {}
    for name, method in every_method(Findings(False)).items():
        forms = {name: (method, STEPS, False), f"{name}, all mass kept": (lossless(method), STEPS, False)}
        if isinstance(method.compressor, TopK):
            whole = replace(lossless(method), compressor=replace(method.compressor, density=1.0))
            forms[f"{name} at density 1"] = (whole, 1, True)
        for form, (made, steps, dense) in forms.items():
            # Several names may give the same method; each is checked once.
            if all(made != case.method for case in cases.values()):
                cases[form] = _Case(made, steps, simulated(made, workers, steps), dense)
    return cases


def _try_all(place: Place, device: torch.device, cases: Mapping[str, _Case]) -> dict[str, _Found]:
    cluster = ProcessGroupCluster(device=device, timeout=place.timeout)
    found = {name: _try(cluster, case) for name, case in cases.items()}
    cluster.close()
    return found


def _try(cluster: ProcessGroupCluster, case: _Case) -> _Found:
    trial = try_method(cluster, case.method, case.steps)
    problem, size = trial.problem, cluster.size
    if problem is None and case.dense:
        off = distance(trial.average.double() * size, total(size, 1))
        problem = None if off <= ROUNDING else f"the average differs from the dense average by {off:.0e}"
    # As integers, because equal floats may differ in bits (0.0 and -0.0).
    same = torch.equal(trial.average.view(torch.int32), case.expected.view(torch.int32))
    return _Found(problem, trial.lost, distance(trial.average, case.expected), same)


def _verdict(place: Place, workers: int, cases: Mapping[str, _Case], found: Mapping[str, _Found]) -> Outcome:
    where = setting(place, workers)
    problems = [f"{name}: {one.problem}, {where}" for name, one in found.items() if one.problem]
    problems += [line for name, one in found.items() if (line := _deviation(place, name, cases[name], one, where))]
    rounding = {
        name: _SIXTEEN if isinstance(case.method.communicator, Backend) else ROUNDING for name, case in cases.items()
    }
    near = [name for name, one in found.items() if not one.off <= rounding[name]]
    same = sum(one.same for one in found.values())
    figures: dict[str, Any] = {"workers": workers, "density": DENSITY, "entries": LAYOUT.length}
    figures["methods"] = {name: one._asdict() for name, one in found.items()}
    good = (
        f"{where}: all {len(found)} configurations have equal replicas, conserve gradients where they claim to, and "
        f"equal the dense average at density 1; {same} match the CPU simulation bitwise, the others within rounding"
    )
    if near and not problems:
        return warned(
            f"{where}: {', '.join(near)}: rounding selected other entries than in the CPU simulation; all laws hold, "
            "so it is usable; report it with the file of --json",
            figures,
        )
    return judged(good, problems, _FIX, figures)


def _deviation(place: Place, name: str, case: _Case, found: _Found, where: str) -> str | None:
    # On the CPU the bits must match, except for sums of the backend, whose order differs.
    exact = not place.on_gpu and not isinstance(case.method.communicator, Backend)
    if found.same if exact else found.off <= _ELSEWHERE:
        return None
    return f"{name}: the average differs from the CPU simulation by {found.off:.0e}, {where}"
