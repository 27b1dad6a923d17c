"""Workers with different settings: every worker raises one line that names both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.communicators import AllGather
from spardl.compressors import TopK
from spardl.hooks.fsdp import attach_fsdp
from spardl.method import LocalResidual
from spardl.method.provenance import first_difference, method_settings
from spardl.schedules import AfterBackward, Training, Wfbp
from spardl.vector import FlatGradient
from tests.hooks.loops import Hooks, batches, made
from tests.support.harness import run_workers

END = "; all workers need the same value"


def parameters(*lengths: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(length, dtype=dtype)) for length in lengths]


def synchronize(named: Any, method: Any = "spardl", timeout: float = 10, **options: Any) -> None:
    synchronizer = spardl.Synchronizer(named, method, timeout=timeout, **options)
    try:
        with synchronizer:
            sum(each.sum() for each in synchronizer._parameters).backward()
    finally:
        synchronizer.detach()


def grouped(rank: int) -> None:
    """Parameter groups with equal learning rates but different parameters."""
    named = [("first", nn.Parameter(torch.ones(9))), ("second", nn.Parameter(torch.ones(9)))]
    rates = zip(named[:: 1 - 2 * rank], (0.1, 0.2), strict=True)
    groups = [{"params": [parameter], "lr": rate} for (_, parameter), rate in rates]
    synchronize(named, optimizer=torch.optim.SGD(groups))


def attached(method: str, **options: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(20, 5))
    handle = spardl.attach(ddp, method, timeout=10, **options)
    try:
        ddp(torch.ones(2, 20)).sum().backward()
    finally:
        handle.detach()


def sharded(method: str, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
    model = nn.Linear(20, 5)
    fully_shard(model, mesh=mesh["inside"])
    attach_fsdp(model, method, group=mesh["nodes"].get_group(), **options)
    model(torch.ones(2, 20)).sum().backward()


def scheduled(schedule: Any) -> None:
    model = nn.Sequential(nn.Linear(20, 5), nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, FlatGradient(model.named_parameters()), optimizer)
    schedule.start(spardl.make_method("spardl"), ProcessGroupCluster(), training)


def complaint(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing"


# Calls of a rank, with the message that both workers raise.
HANDLES: list[tuple[Callable[[int], Any], str]] = [
    (
        lambda rank: synchronize(parameters(50), ["spardl", "topka"][rank], density=0.1),
        "rank 1 has method=TopK + AllGather + LocalResidual + OptimizerMomentum, "
        "rank 0 has method=TopK + SparDL + GlobalResidual + OptimizerMomentum",
    ),
    (
        lambda rank: synchronize(parameters(50), density=[0.1, 0.2][rank]),
        "rank 1 has density=0.2, rank 0 has density=0.1",
    ),
    (
        lambda rank: synchronize(parameters(50, 60), bucket_mb=[25, 0.0001][rank]),
        "rank 1 has bucket_mb=0.0001, rank 0 has bucket_mb=25",
    ),
    (
        lambda rank: synchronize(parameters(50 + rank)),
        "rank 1 has parameter 0 (0)=float32 (51,), rank 0 has parameter 0 (0)=float32 (50,)",
    ),
    (
        lambda rank: synchronize(parameters(50, dtype=[torch.float32, torch.float64][rank])),
        "rank 1 has parameter 0 (0)=float64 (50,), rank 0 has parameter 0 (0)=float32 (50,)",
    ),
    (
        lambda rank: synchronize(parameters(*[50] * (1 + rank))),
        "rank 1 has parameter 1 (1)=float32 (50,), rank 0 has no parameter 1 (1)",
    ),
    (
        lambda rank: synchronize(parameters(50), find_unused=bool(rank)),
        "rank 1 has find_unused=True, rank 0 has find_unused=False",
    ),
    (
        lambda rank: synchronize(parameters(50), scaler=[torch.amp.GradScaler("cpu"), None][rank]),
        "rank 1 has scaler=False, rank 0 has scaler=True",
    ),
    (
        lambda rank: attached("spardl", density=[0.01, 0.02][rank]),
        "rank 1 has density=0.02, rank 0 has density=0.01",
    ),
    (
        grouped,
        "rank 1 has parameters of parameter group 0=['second'], rank 0 has parameters of parameter group 0=['first']",
    ),
    (
        lambda rank: sharded("spardl", density=[0.01, 0.02][rank]),
        "rank 1 has density=0.02, rank 0 has density=0.01",
    ),
    (
        lambda rank: scheduled([AfterBackward(), Wfbp(bucket_mb=0.0001)][rank]),
        "rank 1 has handle=InBackward, rank 0 has handle=AtTheEnd",
    ),
    (
        lambda rank: scheduled(Wfbp(bucket_mb=[25, 0.0001][rank])),
        "rank 1 has groups=[(0, 1), (1, 2)], rank 0 has groups=[(0, 2)]",
    ),
    (
        lambda rank: spardl.all_reduce(torch.ones(10 + 5 * rank), "spardl", density=0.5),
        "rank 1 has shape=(15,), rank 0 has shape=(10,)",
    ),
    (
        lambda rank: spardl.all_reduce(torch.ones(10, dtype=[torch.float32, torch.float64][rank]), "none"),
        "rank 1 has dtype=float64, rank 0 has dtype=float32",
    ),
    (
        lambda rank: spardl.all_reduce(torch.ones(10), "random_k", step=3 + rank),
        "rank 1 has step=4, rank 0 has step=3",
    ),
]


def test_all_workers_report_a_difference() -> None:
    """In the same processes, one after the other: no worker stays in an exchange."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        rank = cluster.local_ranks[0]
        return [complaint(lambda call=call: call(rank)) for call, _ in HANDLES]  # type: ignore[misc]

    assert run_workers(2, work) == [[said + END for _, said in HANDLES]] * 2


def test_state_loaded_on_some_workers_only() -> None:
    """Their steps differ, and so do their messages."""

    def work(cluster: ProcessGroupCluster) -> str:
        model = made("cnn")
        path = Hooks(model, {"method": "spardl", "timeout": 10})
        path.backward(batches(model, [0]))
        state = path.handle.state_dict()
        again = Hooks(made("cnn"), {"method": "spardl", "timeout": 10})
        if cluster.local_ranks[0]:
            again.handle.load_state_dict(state)
        return complaint(lambda: again.backward(batches(model, [1])))

    assert run_workers(2, work) == [f"rank 1 has step=1, rank 0 has step=0{END}"] * 2


def test_all_reduce_need_not_compare() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        sent = []
        exchange = ProcessGroupCluster.run_uncounted
        ProcessGroupCluster.run_uncounted = lambda *parts: sent.append(parts) or exchange(*parts)  # type: ignore[assignment, func-returns-value]
        one, other = (spardl.all_reduce(torch.ones(10), "none", compare=compare) for compare in (True, False))
        return len(sent) == 1 and torch.equal(one.average, other.average) and one.cost.rounds == other.cost.rounds

    assert run_workers(2, work) == [True] * 2


class Handmade(LocalResidual):
    """Values that users may put into a part: they must look the same in two processes."""

    def __init__(self) -> None:
        self.chosen = {"b", "a"}
        self.rule = lambda value: value
        self.object = object()


def test_compared_values_are_plain_text() -> None:
    method = spardl.Method(TopK(0.5), AllGather(), Handmade())
    facts = method_settings(method)
    assert facts["density"] == "0.5"
    assert facts["chosen"] == "{'a', 'b'}"
    assert (facts["rule"], facts["object"]) == ("function", "object")
    assert not any("0x" in value for value in facts.values())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"a": "1"}, {"a": "1"}], None),
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}, {"a": "1", "b": "3"}], "rank 2 has b=3, rank 0 has b=2"),
        ([{"a": "1"}, {}], "rank 1 has no a, rank 0 has a=1"),
        ([{}, {"a": "1"}], "rank 1 has a=1, rank 0 has no a"),
    ],
)
def test_the_first_difference(rows: list[dict[str, str]], said: str | None) -> None:
    assert first_difference(rows) == (said and said + END)
