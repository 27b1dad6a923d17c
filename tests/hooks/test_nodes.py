"""Two nodes of two workers: dense means inside a node, a method between the nodes."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
from torch import Tensor

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.workers.membership import find_node
from spardl.hooks.choosing import choose_method, choose_nodes
from spardl.protocol.programs import Worker
from spardl.schedules import MgWfbp, Wfbp
from tests.hooks.loops import Ddp, Hooks, Path, batches, loss_of, made, weights
from tests.support.harness import run_workers

OPTIONS = {"method": "spardl", "density": 0.1, "bucket_mb": 0.001, "ranks_per_node": "auto"}


class Trained:
    """A small model in a training loop."""

    def __init__(self, kind: type[Path], options: dict[str, Any] | None, rule: str = "SGD") -> None:
        self.model = made("cnn")
        parameters = self.model.parameters()
        self.rule = getattr(torch.optim, rule)(parameters, lr=0.01)
        if options is not None and rule == "AdamW":
            options = {**options, "optimizer": self.rule}
        self.path = kind(self.model, options)

    def run(self, steps: range) -> Tensor:
        for batch in batches(self.model, steps):
            self.rule.zero_grad()
            self.path.backward([batch], loss_of)
            self.rule.step()
        return weights(self.model)

    def state(self) -> bytes:
        buffer = io.BytesIO()
        torch.save((self.model.state_dict(), self.rule.state_dict(), self.path.handle.state_dict()), buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        parts = torch.load(io.BytesIO(saved), weights_only=True)
        for part, whose in zip(parts, (self.model, self.rule, self.path.handle), strict=True):
            whose.load_state_dict(part)


def in_environment(rank: int) -> Any:
    return patch.dict("os.environ", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))


def test_two_nodes_of_two_workers() -> None:
    """Dense sums give the weights of DDP; replicas are equal to the last bit; a resumed run as well."""

    def work(cluster: ProcessGroupCluster) -> Any:
        with in_environment(cluster.local_ranks[0]):
            plain = Trained(Ddp, None).run(range(4))
            whole = Trained(Ddp, {**OPTIONS, "density": 1.0}).run(range(4))
            found = {}
            for kind, rule in ((Ddp, "SGD"), (Hooks, "AdamW")):
                one = Trained(kind, OPTIONS, rule)
                one.run(range(3))
                kept, later = one.state(), Trained(kind, OPTIONS, rule)
                expected = one.run(range(3, 6))
                later.load(kept)
                with pytest.raises(ConfigError, match="needs the same number of workers"):
                    later.path.handle.load_resharded([later.path.handle.state_dict()] * 2)
                found[rule] = (expected, later.run(range(3, 6)), one.path.handle.stats().bytes_sent)
            with pytest.raises(ConfigError, match="saved with ranks_per_node=2, but this handle has ranks_per_node=1"):
                Trained(Hooks, {**OPTIONS, "ranks_per_node": 1}, "AdamW").path.handle.load_state_dict(
                    later.path.handle.state_dict()
                )
            return float((plain - whole).abs().max()), found

    rows = run_workers(4, work)
    assert max(apart for apart, _ in rows) < 1e-12
    for rule in ("SGD", "AdamW"):
        expected, resumed, sent = rows[0][1][rule]
        assert torch.equal(expected, resumed)
        assert all(torch.equal(found[rule][0], expected) for _, found in rows)
        assert all(torch.equal(found[rule][1], expected) for _, found in rows)
        assert sent > 0


@pytest.mark.slow
def test_the_next_handle_needs_the_same_nodes() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        path = Ddp(made("cnn"), {**OPTIONS, "ranks_per_node": 2})
        path.handle.detach()
        with pytest.raises(ConfigError) as error:
            spardl.attach(path.called, "spardl")
        return str(error.value)

    (one, *others) = run_workers(4, work)
    assert one.startswith("the last handle of this model had ranks_per_node=2, and this one has 1")
    assert others == [one] * 3


@pytest.mark.slow
def test_an_overflow_inside_a_node_skips_the_step() -> None:
    """Each gradient is finite, but not the sum of a node."""

    def work(cluster: ProcessGroupCluster) -> tuple[float, bool]:
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=4.0)
        synchronizer = spardl.Synchronizer(
            model.named_parameters(), "topka", density=1.0, scaler=scaler, ranks_per_node=2
        )
        before = weights(model)
        inputs = torch.full((1, 3), 2e38 / 4 if cluster.local_ranks[0] < 2 else 1.0)
        with synchronizer:
            scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), torch.equal(weights(model), before)

    assert run_workers(4, work) == [(2.0, True)] * 4


def test_one_worker_per_node_uses_the_sums_of_the_backend() -> None:
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"):
        assert choose_method("none", {}, ranks_per_node="auto").communicator.name == "backend"
    with in_environment(0):
        assert choose_method("none", {}, ranks_per_node="auto").communicator.name == "dense"


def test_layouts_from_the_environment() -> None:
    assert find_node({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}) == (4, 3)
    assert find_node({"SLURM_STEP_TASKS_PER_NODE": "8(x16)", "SLURM_LOCALID": "0"}) == (8, 0)
    assert find_node({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}) == (2, 1)


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (3, {}, "ranks_per_node=3 does not divide the 4 workers"),
        (0, {}, "ranks_per_node must be"),
        ("two", {}, "ranks_per_node must be"),
        ("auto", {}, "needs LOCAL_WORLD_SIZE or SLURM_STEP_TASKS_PER_NODE in the environment"),
        ("auto", {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "rank 2 is number 1 of the 2 workers of its node"),
        ("auto", {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_LOCALID": "0"}, "equally many workers on each node"),
    ],
)
def test_impossible_layouts(given: Any, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_nodes(given, Worker(2, 4), Wfbp(), spardl.make_method("spardl"), environment)


def test_schedules_and_sums_that_nodes_do_not_support() -> None:
    with pytest.raises(ConfigError, match="does not support schedule=mg_wfbp"):
        choose_nodes(2, Worker(0, 4), MgWfbp(), spardl.make_method("spardl"), {})
    with pytest.raises(ConfigError, match="does not support communicator=backend"):
        choose_nodes(2, Worker(0, 4), Wfbp(), spardl.make_method("none", communicator="backend"), {})
