"""What is compiled beforehand is all that a sparse synchronization calls."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from spardl.clusters import Network, SimulatedCluster
from spardl.clusters.precompile import precompile
from spardl.vector.layout import Layout
from tests.harness import spardl, topka

KERNELS = {
    "adding": ["add_and_list"],
    "reaching": ["collect"],
    "selection": ["largest", "list_of"],
    "entries": ["add", "cut", "put", "put_others"],
    "codec": ["decode", "write"],
    "merging": ["add_all", "add_two"],
}


def compiled() -> dict[str, int]:
    """How many types each kernel has been compiled for in this process."""
    found: dict[str, int] = {}
    for module, names in KERNELS.items():
        functions: Any = importlib.import_module(f"spardl.vector.kernels.{module}")
        found.update({f"{module}.{name}": len(getattr(functions, name).signatures) for name in names})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_is_left_to_compile(dtype: torch.dtype) -> None:
    precompile(dtype)
    before = compiled()
    assert all(count > 0 for count in before.values())
    for method in (spardl(0.01), spardl(0.01, teams=2), topka(0.01)):
        cluster = SimulatedCluster(4, Network(1e-4, 1))
        states = [method.init_state(Layout.flat(20_000), dtype) for _ in range(4)]
        for _ in range(4):
            for state in states:
                method.accumulate(torch.randn(20_000, dtype=dtype), state, clear=True)
            cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
    assert compiled() == before
