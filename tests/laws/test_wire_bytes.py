"""Bytes per entry: what the ledger says, and what the interfaces count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spardl.clusters import SimulatedCluster
from spardl.communicators import SparDL
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.vector.layout import Layout
from spardl.vector.wire import Wire
from tests.support.harness import NETWORK
from tests.support.labs import ROOT, in_a_lab
from tests.support.measuring import undisturbed

LENGTH = 1_470_000
LIMITS = [
    (0.01, "int4", 1.8),
    (0.01, "exact", 5.5),
    (0.01, "bfloat16", 3.5),
    (0.001, "exact", 6.3),
    (0.001, "bfloat16", 4.3),
]

# Prints, for rank 0, the bytes that the ledger has, those that the interface counted, and the entries sent.
ON_THE_WIRE = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
import spardl
from spardl.vector.layout import Layout

length, options, turns = int(sys.argv[1]), json.loads(sys.argv[2]), 20
torch.set_num_threads(1)
dist.init_process_group("gloo")
cluster = spardl.clusters.ProcessGroupCluster()
(worker,), (ledger,) = cluster.local_workers, cluster.ledgers
method = spardl.make_method(**options)
state = method.init_state(Layout.flat(length), torch.float32)
gradient = torch.randn(length, generator=torch.Generator().manual_seed(worker.rank))
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")

def synchronize():
    method.accumulate(gradient, state)
    cluster.run([method.average(worker, state)])

synchronize()
dist.barrier()
before, sent, words = int(counter.read_text()), ledger.bytes_sent, ledger.words
for _ in range(turns):
    synchronize()
dist.barrier()
found = [ledger.bytes_sent - sent, int(counter.read_text()) - before, (ledger.words - words) // 2]
if cluster.leads:
    Path(sys.argv[3]).write_text(json.dumps(found))
cluster.close()
"""


def on_the_wire(folder: Path, **options: Any) -> list[int]:
    """Bytes of 20 synchronizations by rank 0 of 4, as the ledger has them and as the interface does; and entries."""
    lab = [sys.executable, "scripts/netlab.py", "run", "--workers", "4", "--gbit", "1", "--"]
    words = [str(LENGTH), json.dumps(options), str(folder / "found.json")]
    subprocess.run(
        [*lab, sys.executable, "-c", ON_THE_WIRE, *words], cwd=ROOT, capture_output=True, timeout=240, check=True
    )
    found: list[int] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize(("density", "wire", "limit"), LIMITS)
@pytest.mark.parametrize("workers", [4, 14])
def test_the_ledger_has_few_bytes_per_entry(density: float, wire: str, limit: float, workers: int) -> None:
    method = Method(TopK(density), SparDL(), GlobalResidual(), wire=Wire(wire))
    cluster, layout = SimulatedCluster(workers, NETWORK), Layout.flat(LENGTH // 4)
    states = [method.init_state(layout, torch.float32) for _ in range(workers)]
    for rank, state in enumerate(states):
        method.accumulate(torch.randn(layout.length, generator=torch.Generator().manual_seed(rank)), state)
    cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
    for ledger in cluster.ledgers:
        assert ledger.bytes_sent <= limit * ledger.words / 2


@in_a_lab
@pytest.mark.parametrize(("density", "wire", "limit"), LIMITS)
def test_the_interface_counts_what_the_ledger_has(density: float, wire: str, limit: float, tmp_path: Path) -> None:
    """Headers, acknowledgements and gloo's own messages take some 430 bytes a message, of which there are 80."""

    def measured() -> list[int]:
        found = on_the_wire(tmp_path, method="spardl", density=density, wire=wire)
        assert found[0] < found[1]
        assert found[0] <= limit * found[2]
        return found

    undisturbed(measured, lambda found: found[1] < found[0] + 80 * 600)


@in_a_lab
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_quantized_all_reduce_sends_what_its_formula_says(bits: int, tmp_path: Path) -> None:
    """2(P-1)/P n bits / 8, and a scale for every 256 entries; the interface counts at most 2% more."""
    formula = 20 * 2 * 3 / 4 * (LENGTH * bits / 8 + 4 * LENGTH / 256)

    def measured() -> int:
        ledger, interface, _ = on_the_wire(tmp_path, method=f"int{bits}")
        assert ledger == pytest.approx(formula, rel=1e-4)
        assert formula < interface
        return interface

    undisturbed(measured, lambda interface: interface < 1.02 * formula)
