"""The doctor finds methods that are broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.diagnostics.doctor import correctness
from spardl.method import registry
from spardl.method.method import Method, MethodState
from spardl.method.recipes import make_method, method_names
from spardl.method.residuals import GlobalResidual
from spardl.vector.accumulator import Accumulator
from tests.diagnostics.doctor.common import Collected, Doctor
from tests.support.harness import run_workers


def _verdict(check: str, *more: bool) -> Callable[[ProcessGroupCluster], tuple[int, list[str]]]:
    """What a check finds, as each worker sees it."""

    def work(cluster: ProcessGroupCluster) -> tuple[int, list[str]]:
        findings = Collected()
        getattr(correctness, check)(cluster, *more, findings)
        return findings.failures, findings.lines

    return work


def _forget(self: GlobalResidual, accumulated: Accumulator, final: torch.Tensor) -> None:
    """Keeps nothing of what was not sent."""
    accumulated.values.zero_()


def _drift(total: torch.Tensor, workers: int, state: MethodState) -> torch.Tensor:
    """Averages that are not the same on all workers, in the last bit of one entry."""
    values = total / workers
    if dist.get_rank():
        values[0] = torch.nextafter(values[0], torch.tensor(9.0))
    return values


@pytest.mark.parametrize(
    ("target", "broken", "said"),
    [
        (
            "spardl.method.residuals.GlobalResidual.keep",
            _forget,
            "FAILED SparDL at density 0.01: the sum of averages and residuals differs",
        ),
        (
            "spardl.method.method._limited",
            _drift,
            "FAILED SparDL at density 1: the average of worker 1 differs",
        ),
    ],
)
def test_a_broken_method_is_found(
    target: str, broken: Callable[..., Any], said: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, broken)
    (failures, found), other = run_workers(2, _verdict("check_spardl", False))
    assert failures >= 1
    assert any(line.startswith(said) for line in found), found
    assert other == (failures, found)


def test_one_broken_method_among_all(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: make_method(name) for name in ("dgc", "gtopk", "topkdsa")}
    monkeypatch.setattr(correctness, "every_method", lambda findings: few)
    (_, (right,)), _ = run_workers(2, _verdict("check_methods"))
    assert re.fullmatch(
        r"ok methods: all 3 have equal replicas, and conserve gradients where they claim to \([\d.]+ s\)", right
    )
    monkeypatch.setattr("spardl.communicators.gtopk.GTopk.reduce", _mine_alone)
    (failures, found), _ = run_workers(2, _verdict("check_methods"))
    assert failures == 1
    assert found[0].startswith("FAILED gtopk: the average of worker 1 differs"), found


def _mine_alone(self: Any, sync: Any) -> Iterator[Any]:
    """A sum of the worker's own entries, without communication."""
    whole = sync.compressor.whole(sync.context)
    return sync.accumulated.take([whole], sync.compressor.selector(sync.context, sync.compression))
    yield


def test_lossy_method_is_found_among_all(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its mass, although it has a momentum of its own, or a residual that may lose some."""
    few = {name: make_method(name) for name in ("dgc", "gtopk")}
    monkeypatch.setattr(correctness, "every_method", lambda findings: few)
    monkeypatch.setattr("spardl.method.residuals.GlobalResidual.keep", _forget)
    (failures, found), _ = run_workers(2, _verdict("check_methods"))
    assert failures == 2
    assert [line.split(":")[0] for line in found] == ["FAILED dgc", "FAILED gtopk"]
    assert all("the sum of averages and residuals differs" in line for line in found)


def test_a_method_that_needs_options_is_named(findings: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> Method:
        if name == "theirs":
            raise ConfigError("density is missing")
        return make_method(name)

    monkeypatch.setattr(correctness, "method_names", lambda: [*method_names(), "theirs"])
    monkeypatch.setattr(correctness, "make_method", make)
    assert "theirs" not in correctness.every_method(findings)
    assert findings.lines[0] == "warning methods: theirs is not checked because it needs options: density is missing"


def test_every_method_and_every_part_of_the_library_is_checked(findings: Collected) -> None:
    every = correctness.every_method(findings)
    assert set(method_names()) <= set(every)
    assert {method.compressor.name for method in every.values()} == set(registry.compressors())
    assert {method.communicator.name for method in every.values()} == set(registry.communicators())
    assert not findings.lines
