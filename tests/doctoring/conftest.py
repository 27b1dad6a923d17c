"""The doctor, with short messages and few of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from tests.doctoring.common import LATER, Collected, member
from tests.driver import STARTED_BY
from tests.labs import ROOT


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With short messages and few of them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    module = importlib.import_module("doctor")
    for place, value in (
        ("fit._BYTES", 1 << 18),
        ("fit._SHORT_TURNS", 10),
        ("fit._LONG_TURNS", 4),
        ("fit._MOST", 1 << 18),
    ):
        monkeypatch.setattr(f"doctoring.{place}", value)
    for place, value in (("laws._ENTRIES", 5000), ("pairs._MOST", 1 << 16), ("pairs._PROBE", 1 << 16)):
        monkeypatch.setattr(f"doctoring.{place}", value)
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 0.5)
    return module


@pytest.fixture
def brief(doctor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the first checks only."""
    monkeypatch.setattr(doctor, "precompile", lambda dtype: None)
    for check in LATER:
        monkeypatch.setattr(f"doctoring.{check}", lambda *arguments: None)
    return doctor


@pytest.fixture
def places(doctor: ModuleType) -> Callable[[int], Any]:
    """Workers' ways to one store, with little patience."""
    store = dist.HashStore()

    def place(rank: int) -> Any:
        meeting = importlib.import_module("doctoring.meeting")
        return meeting.Meeting(member(rank), store, timeout=0.2)

    return place


@pytest.fixture
def findings(doctor: ModuleType) -> Collected:
    return Collected()
