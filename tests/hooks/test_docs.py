"""The code of docs/training-loop.md runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import spardl
from spardl.clusters import ProcessGroupCluster
from tests.support.harness import run_workers
from tests.support.labs import ROOT

PAGE = (ROOT / "docs" / "training-loop.md").read_text()
# Shards cannot be compared outside their processes; Outer averages every 30 steps, and the test makes four.
NOT_COMPARED = {"Between nodes only", "Local steps"}
BLOCKS = re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_the_code_of_the_page(title: str, code: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def work(cluster: ProcessGroupCluster) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(40, 20)
        rank = cluster.local_ranks[0]
        generator = torch.Generator().manual_seed(rank)
        batches = [(torch.randn(3, 40, generator=generator), torch.randn(3, 20, generator=generator)) for _ in range(4)]
        names = {
            "spardl": spardl,
            "torch": torch,
            "rank": rank,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_function": nn.MSELoss(),
            "batches": batches,
            "inputs": batches[0][0],
            "targets": batches[0][1],
            "tensor": torch.randn(50, generator=generator),
            "nodes": 2,
            "per_node": 1,
        }
        if "ddp_model" in code:
            names["ddp_model"] = nn.parallel.DistributedDataParallel(model)
        exec(code, names)
        if "reduced" in names:
            return names["reduced"].average  # type: ignore[attr-defined,no-any-return]
        found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return found.to(torch.bfloat16) if "WeightSync" in code else found

    one, other = run_workers(2, work)
    assert title in NOT_COMPARED or torch.equal(one, other)


def test_every_part_of_the_page_has_code() -> None:
    assert len(BLOCKS) == PAGE.count("```python") >= 6


def test_code_not_run_here_is_covered_by_examples() -> None:
    """Code for third-party trainers: its imports and calls appear in programs that a test runs."""
    programs = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        first, _, last = block.strip().splitlines()
        assert first in programs
        calls = re.findall(r"\w+\((?:\w+, )*\"spardl\"|lightning\.Trainer\(", last)
        assert len(calls) == (2 if "lightning" in first else 1)
        assert all(call in programs for call in calls)
