"""The first training step compiles nothing, because all workers would wait for it."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import subprocess
import sys
from pathlib import Path as File
from typing import Any

import pytest
import torch
from torch import nn

import spardl
from spardl.clusters import ProcessGroupCluster, precompile
from spardl.communicators import AllGather
from spardl.compressors import TopK
from spardl.method import LocalResidual
from spardl.vector import kernels
from tests.hooks.loops import Ddp, Hooks, Path
from tests.support.harness import run_workers

ROOT = File(__file__).resolve().parents[2]
PATHS: dict[str, type[Path]] = {"attach": Ddp, "Synchronizer": Hooks}
METHODS: dict[str, dict[str, Any]] = {
    name: {"method": name} for name in ("spardl", "oktopk", "topka", "gtopk", "topkdsa", "int8", "none", "powersgd")
}
METHODS |= {f"spardl, {wire}": {"method": "spardl", "wire": wire} for wire in ("bfloat16", "int4")}
METHODS["spardl, teams"] = {"method": "spardl", "teams": 3}


def signatures() -> int:
    """Returns how many kernel signatures are compiled in this process."""
    from numba.core.dispatcher import Dispatcher

    names = [each.name for each in pkgutil.iter_modules(kernels.__path__) if each.name != "gpu"]
    found = [vars(importlib.import_module(f"{kernels.__name__}.{name}")).values() for name in names]
    return sum(len(each.signatures) for members in found for each in members if isinstance(each, Dispatcher))


def compiled_in_training(path: type[Path], options: dict[str, Any]) -> int:
    # Long enough for every kernel, and of a dtype without compiled kernels.
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = path(model, {"optimizer": optimizer, **options})
    before = signatures()
    for _ in range(2):
        optimizer.zero_grad()
        made.backward([torch.randn(4, 200, dtype=torch.float64)], lambda model, part: model(part).square().mean())
        optimizer.step()
    return signatures() - before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [pytest.param("attach"), pytest.param("Synchronizer", marks=pytest.mark.slow)])
def test_nothing_is_compiled_in_the_first_steps(kind: str, method: str) -> None:
    workers = 3 if "teams" in method else 2

    def work(cluster: ProcessGroupCluster) -> int:
        return compiled_in_training(PATHS[kind], METHODS[method])

    assert run_workers(workers, work) == [0] * workers


UNPREPARED = """
import torch.distributed as dist
from spardl.hooks import handle
from tests.hooks import test_first_step as here

handle.prepare = lambda *arguments, **more: None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(here.compiled_in_training(here.Ddp, here.METHODS["spardl"]))
dist.destroy_process_group()
"""


def test_it_would_be_compiled_there() -> None:
    """Without preparation, a fresh process does compile in the first step."""
    done = subprocess.run(
        [sys.executable, "-c", UNPREPARED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) > 0


def test_long_compilation_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(precompile, "_PATIENCE", -1.0)
    method, gradient = spardl.make_method("qsgd"), torch.empty(0)
    with caplog.at_level(logging.WARNING, logger="spardl"):
        precompile.prepare(method, 2, [gradient], logs=False)
        assert not caplog.messages
        precompile.prepare(method, 2, [gradient])
    (line,) = caplog.messages
    assert line.startswith("compiling the kernels of qsgd, or loading them")


def test_parts_of_others_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of other packages may have side effects, such as counting their calls."""

    class Theirs(TopK):
        name = "theirs"

        def count(self, context: Any) -> int:
            raise AssertionError

    method = spardl.Method(Theirs(0.5), AllGather(), LocalResidual())
    precompile.prepare(method, 2, [torch.empty(0)])


def test_many_workers_are_represented() -> None:
    for teams, workers, expected in ((1, 64, 8), (3, 48, 6), (16, 64, 64), (1, 1, 1)):
        assert precompile._representative(spardl.make_method("spardl", teams=teams), workers) == expected
