"""The doctor, with short messages and few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from spardl.diagnostics.doctor.board import Board
from tests.diagnostics.doctor.common import LATER, Collected, Doctor, examined, member
from tests.support.driver import STARTED_BY


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """The command in this process; it gives back the exit code."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    for place, value in (
        ("links._BYTES", 1 << 18),
        ("links._SHORT_PROBES", 10),
        ("links._LONG_PROBES", 4),
        ("links._LONGEST", 1 << 18),
        ("correctness._ENTRIES", 5000),
        ("links._MOST", 1 << 16),
        ("links._PROBE", 1 << 16),
    ):
        monkeypatch.setattr(f"spardl.diagnostics.doctor.{place}", value)
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 0.5)
    return examined


@pytest.fixture
def brief(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """With the first checks only."""
    monkeypatch.setattr("spardl.diagnostics.doctor.examination.precompile", lambda *arguments: None)
    for check in LATER:
        monkeypatch.setattr(f"spardl.diagnostics.doctor.{check}", lambda *arguments: None)
    return doctor


@pytest.fixture
def places(doctor: Doctor) -> Callable[[int], Any]:
    """Workers' ways to one store, with little patience."""
    store = dist.HashStore()
    return lambda rank: Board(member(rank), store, timeout=0.2)


@pytest.fixture
def findings() -> Collected:
    return Collected()
