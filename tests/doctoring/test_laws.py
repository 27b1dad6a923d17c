"""The doctor finds methods that are broken."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spardl.clusters import ProcessGroupCluster
from spardl.method import registry
from spardl.method.residuals import GlobalResidual
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import SparseVector
from tests.doctoring.common import Collected
from tests.harness import run_workers


def _verdict(check: str) -> Callable[[ProcessGroupCluster], tuple[int, list[str]]]:
    """What a check finds, as each worker sees it."""

    def work(cluster: ProcessGroupCluster) -> tuple[int, list[str]]:
        findings = Collected()
        getattr(importlib.import_module("doctoring.laws"), check)(cluster, findings)
        return findings.failures, findings.lines

    return work


def _forget(self: GlobalResidual, accumulated: Accumulator, final: torch.Tensor) -> None:
    """Keeps nothing of what was not sent."""
    accumulated.values.zero_()


def _drift(self: SparseVector, divisor: int) -> SparseVector:
    """Averages that are not the same on all workers, in the last bit of one entry."""
    values = self.values / divisor
    if dist.get_rank():
        values[0] = torch.nextafter(values[0], torch.tensor(9.0))
    return SparseVector(self.indices, values, self.length)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("target", "broken", "said"),
    [
        (
            "spardl.method.residuals.GlobalResidual.keep",
            _forget,
            "FAILED SparDL at density 0.01: residuals and averages add up",
        ),
        (
            "spardl.vector.sparse.SparseVector.divided",
            _drift,
            "FAILED SparDL at density 1: the average of worker 1 differs",
        ),
    ],
)
def test_a_broken_method_is_found(
    target: str, broken: Callable[..., Any], said: str, doctor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, broken)
    (failures, found), other = run_workers(2, _verdict("check_spardl"))
    assert failures >= 1
    assert any(line.startswith(said) for line in found), found
    assert other == (failures, found)


@pytest.mark.timeout(60)
def test_one_broken_method_among_all(doctor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    laws = importlib.import_module("doctoring.laws")
    every = laws.registered(0.01)
    few = {
        way: next(every[name] for name in every if name.endswith(f" {way}")) for way in ("gtopk", "topkdsa", "backend")
    }
    monkeypatch.setattr(laws, "registered", lambda density: few)
    (_, right), _ = run_workers(2, _verdict("check_methods"))
    assert right == ["ok methods: all 3 have equal replicas, and keep all mass where they claim to"]
    monkeypatch.setattr("spardl.communicators.gtopk.GTopk.reduce", _mine_alone)
    (failures, found), _ = run_workers(2, _verdict("check_methods"))
    assert failures == 1
    assert found[0].startswith("FAILED gtopk: the average of worker 1 differs"), found


def _mine_alone(self: Any, context: Any, accumulated: Any, compressor: Any, *states: Any) -> Iterator[Any]:
    """A sum of one's own entries, without asking the others."""
    return accumulated.take([compressor.whole(context)], compressor.selector(context, states[0]))
    yield


def test_every_part_of_the_library_is_among_the_methods(doctor: ModuleType) -> None:
    names = [name.split(" with ") for name in importlib.import_module("doctoring.laws").registered(0.01)]
    assert {name for name, _ in names} == set(registry.compressors())
    assert {name for _, name in names} == set(registry.communicators())
