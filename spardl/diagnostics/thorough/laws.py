"""The laws of every method on the device, and its averages beside those of simulated workers on the CPU."""

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
    dense_of,
    distance,
    every_method,
    gradient_of,
    keeping,
    total,
    try_out,
)
from spardl.diagnostics.thorough.outcome import Outcome, Place, judged, setting, shared, warned
from spardl.method.method import Method

__all__ = ["check_laws", "simulated"]

# How far an average may be from the simulated one where rounding let another few entries pass a threshold.
_ELSEWHERE = 0.3
# The same where the backend adds up, in an order of its own, and maybe in 16 bits.
_SIXTEEN = 2.0**-7
_FIX = "do not use it on this device, and send the file of --json with your report"


class _Case(NamedTuple):
    """One method, in one form.

    Attributes:
        method: itself.
        steps: that it averages.
        expected: the last average of simulated workers on the CPU.
        dense: whether that must be the dense average, too.
    """

    method: Method
    steps: int
    expected: Tensor
    dense: bool


class _Found(NamedTuple):
    """What one case was like.

    Attributes:
        problem: what is wrong with it, if anything.
        lost: part of the mass.
        off: how far the average is from the simulated one.
        same: whether it has the same bits.
    """

    problem: str | None
    lost: float
    off: float
    same: bool


def check_laws(workers: int) -> Callable[[Place], Outcome]:
    """The check for so many workers that share the device."""

    def check(place: Place) -> Outcome:
        cases = _cases(workers)
        (found, *_) = shared(place, workers, lambda device: _tried(place, device, cases))
        return _verdict(place, workers, cases, found)

    return check


def simulated(method: Method, workers: int, steps: int) -> Tensor:
    """The last average of workers that are simulated on the CPU, shape (n,)."""
    cluster = SimulatedCluster(workers, Network(0, 1), count_local=False)
    states = [method.init_state(LAYOUT, torch.float32) for _ in range(workers)]
    found = torch.empty(0)
    for step in range(steps):
        for rank, state in enumerate(states):
            method.accumulate(gradient_of(rank, step, LAYOUT.length), state)
        pairs = zip(cluster.local_workers, states, strict=True)
        found = dense_of(cluster.run_aside([method.average(*pair) for pair in pairs])[0])
    return found


def _cases(workers: int) -> dict[str, _Case]:
    """Every method as published; with the residual that loses nothing; and top-k of everything."""
    cases: dict[str, _Case] = {}
    for name, method in every_method(Findings(False)).items():
        forms = {name: (method, STEPS, False), f"{name}, all mass kept": (keeping(method), STEPS, False)}
        if isinstance(method.compressor, TopK):
            whole = replace(keeping(method), compressor=replace(method.compressor, density=1.0))
            forms[f"{name} at density 1"] = (whole, 1, True)
        for form, (made, steps, dense) in forms.items():
            if all(made != case.method for case in cases.values()):
                cases[form] = _Case(made, steps, simulated(made, workers, steps), dense)
    return cases


def _tried(place: Place, device: torch.device, cases: Mapping[str, _Case]) -> dict[str, _Found]:
    cluster = ProcessGroupCluster(device=device, timeout=place.timeout)
    found = {name: _try(cluster, case) for name, case in cases.items()}
    cluster.close()
    return found


def _try(cluster: ProcessGroupCluster, case: _Case) -> _Found:
    trial = try_out(cluster, case.method, case.steps)
    problem, size = trial.problem, cluster.size
    if problem is None and case.dense:
        off = distance(trial.average.double() * size, total(size, 1))
        problem = None if off <= ROUNDING else f"is {off:.0e} off the dense average"
    same = torch.equal(trial.average.view(torch.int32), case.expected.view(torch.int32))
    return _Found(problem, trial.lost, distance(trial.average, case.expected), same)


def _verdict(place: Place, workers: int, cases: Mapping[str, _Case], found: Mapping[str, _Found]) -> Outcome:
    where = setting(place, workers)
    problems = [f"{name}: {one.problem}, {where}" for name, one in found.items() if one.problem]
    problems += [line for name, one in found.items() if (line := _unlike(place, name, cases[name], one, where))]
    near = [name for name, one in found.items() if not one.off <= _rounding(cases[name])]
    same = sum(one.same for one in found.values())
    figures: dict[str, Any] = {"workers": workers, "density": DENSITY, "entries": LAYOUT.length}
    figures["methods"] = {name: one._asdict() for name, one in found.items()}
    good = (
        f"{where}: all {len(found)} forms of methods have equal replicas and keep mass where they claim to, at density "
        f"1 equal the dense average, and {same} have the bits of the simulation on the CPU, the others but for rounding"
    )
    if near and not problems:
        return warned(
            f"{where}: {', '.join(near)}: rounding let other entries pass a threshold than in the simulation on the "
            "CPU; all laws hold, so use it, and send the file of --json",
            figures,
        )
    return judged(good, problems, _FIX, figures)


def _rounding(case: _Case) -> float:
    return _SIXTEEN if isinstance(case.method.communicator, Backend) else ROUNDING


def _unlike(place: Place, name: str, case: _Case, found: _Found, where: str) -> str | None:
    """Whether an average is another one than it may be: to the bit on the CPU, but for sums of the backend's own."""
    exact = not place.on_gpu and not isinstance(case.method.communicator, Backend)
    if found.same if exact else found.off <= _ELSEWHERE:
        return None
    return f"{name}: the average is {found.off:.0e} off that of the simulation on the CPU, {where}"
