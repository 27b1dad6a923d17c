"""Every schedule gives the same weights as training without it and as DistributedDataParallel."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from spardl.clusters import Cluster, SimulatedCluster
from spardl.schedules import AfterBackward, Dear, LayerFusion, MgWfbp, Schedule, Wfbp
from tests.schedules.loops import SETTINGS, Loop, Setting, batch, loss_of, make_model, weights
from tests.support.harness import NETWORK, run_workers
from tests.support.quick import some_quick

# 0.0005 MB are 65 entries of 8 bytes: groups of several layers, and layers larger than a group.
SCHEDULES: dict[str, Schedule] = {
    "after_backward": AfterBackward(),
    "wfbp_layers": Wfbp(bucket_mb=0),
    "wfbp_buckets": Wfbp(bucket_mb=0.002),
    "mg_wfbp": MgWfbp(),
    "layer_fusion": LayerFusion(),
    "dear_layers": Dear(threshold_mb=0),
    "dear_pairs": Dear(layers=2),
    "dear_one": Dear(),
    "dear_tuned": Dear(threshold_mb=0.002, trials=2, low_mb=0.0005, high_mb=0.01),
}


@cache
def simulated(setting: str, schedule: str, workers: int) -> Tensor:
    return Loop(SCHEDULES[schedule], SimulatedCluster(workers, NETWORK), SETTINGS[setting]).run()


@pytest.mark.parametrize(
    ("setting", "schedule"), some_quick(product(SETTINGS, [name for name in SCHEDULES if name != "after_backward"]), 5)
)
def test_same_bits_as_after_the_backward_pass(setting: str, schedule: str) -> None:
    workers = 2 if SETTINGS[setting].accumulation > 1 else 3
    assert torch.equal(simulated(setting, schedule, workers), simulated(setting, "after_backward", workers))


def plain_ddp(setting: Setting, rank: int) -> Tensor:
    """The same training with torch alone."""
    model = make_model()
    optimizer = setting.optimizer(model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(setting.steps):
        optimizer.zero_grad()
        for number in range(setting.accumulation):
            with torch.enable_grad() if number == setting.accumulation - 1 else ddp.no_sync():
                (loss_of(ddp, batch(step, rank, number)) / setting.accumulation).backward()
        if setting.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip_norm)
        optimizer.step()
    return weights(model)


def train_all(setting: Setting, cluster: Cluster) -> dict[str, Any]:
    (rank,) = cluster.local_ranks
    found = {name: Loop(schedule, cluster, setting).run() for name, schedule in SCHEDULES.items()}
    return {**found, "ddp": plain_ddp(setting, rank)}


@pytest.mark.parametrize(
    ("setting", "workers"),
    [("adamw", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("momentum", 3), ("everything", 2)))],
)
def test_same_weights_as_ddp(setting: str, workers: int) -> None:
    by_rank = run_workers(workers, partial(train_all, SETTINGS[setting]))
    expected = by_rank[0]["after_backward"]
    assert torch.equal(expected, simulated(setting, "after_backward", workers))
    for found in by_rank:
        torch.testing.assert_close(found.pop("ddp"), expected, rtol=1e-10, atol=1e-10)
        for name, value in found.items():
            assert torch.equal(value, expected), name
