"""Sharded inside nodes, sparse between nodes: two nodes of two workers each."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.fsdp import attach_fsdp
from tests.hooks.loops import Ddp, Loss, Path, batches, loss_of, made, train
from tests.support.harness import run_workers

SPARSE = {"method": "spardl", "density": 0.1}


class Nodes(Path):
    """FSDP inside a node, the method between nodes."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        fully_shard(model.head if hasattr(model, "head") else model.layer, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
        self.called = model
        self.handle = attach_fsdp(model, group=mesh["nodes"].get_group(), **(options or {}))

    def backward(self, parts: list[torch.Tensor], loss: Loss = loss_of) -> None:
        for number, part in enumerate(parts):
            self.called.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
            (loss(self.called, part) / len(parts)).backward()


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_density_1_is_plain_ddp(kind: str) -> None:
    """Also with four micro-batches, of which the last one is synchronized."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        plain = made(kind)
        expected = train(Ddp(plain, None), plain)
        same = []
        for passes in (1, 4):
            sharded = made(kind)
            path = Nodes(sharded, {"method": "spardl", "density": 1.0})
            train_only(path, sharded, range(20), momentum=0.9, passes=passes)
            same.append(bool(torch.allclose(whole(sharded), expected, rtol=1e-10, atol=1e-12)))
        return same

    assert run_workers(4, work) == [[True, True]] * 4


def train_only(path: Path, model: Any, steps: range, momentum: float = 0.0, passes: int = 1) -> None:
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for batch in batches(model, steps):
        rule.zero_grad()
        path.backward(list(batch.split(len(batch) // passes)))
        rule.step()


@pytest.mark.slow
def test_the_state_round_trip() -> None:
    def first(cluster: ProcessGroupCluster) -> Any:
        model = made("cnn")
        path = Nodes(model, SPARSE)
        train_only(path, model, range(5))
        buffer = io.BytesIO()
        torch.save((path.handle.state_dict(), whole(model)), buffer)
        train_only(path, model, range(5, 9))
        return buffer.getvalue(), whole(model), path.handle.stats()

    halfway = run_workers(4, first)
    assert all(torch.equal(weights, halfway[0][1]) for _, weights, _ in halfway)
    assert all(stats.steps == 9 and 0 < stats.bytes_sent < stats.dense_bytes for _, _, stats in halfway)

    def second(cluster: ProcessGroupCluster) -> bool:
        saved, expected, _ = halfway[cluster.local_ranks[0]]
        state, weights = torch.load(io.BytesIO(saved), weights_only=True)
        model = made("cnn")
        nn.utils.vector_to_parameters(weights, model.parameters())
        path = Nodes(model, SPARSE)
        with pytest.raises(ConfigError, match="not the state of a handle of this kind"):
            path.handle.load_state_dict({"owner": state["owner"], "groups": []})
        path.handle.load_state_dict(state)
        train_only(path, model, range(5, 9))
        return torch.equal(whole(model), expected)

    assert all(run_workers(4, second))


@pytest.mark.slow
def test_groups_that_cut_across_shards_are_refused() -> None:
    """Shards of different parameters must not be averaged, nor those that native HSDP has averaged."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        said = []
        for inside, group in ((mesh["inside"], None), (mesh, mesh["nodes"].get_group())):
            model = made("cnn")
            fully_shard(model, mesh=inside)
            with pytest.raises(ConfigError) as error:
                attach_fsdp(model, group=group)
            said.append(str(error.value))
        return said

    for said in run_workers(4, work):
        assert all("replicated among workers of the group; shard inside nodes only" in each for each in said)


@pytest.mark.parametrize("method", ["powersgd", "arc_topk"])
def test_methods_for_matrices_are_refused(method: str) -> None:
    """A shard is a vector, which such methods send uncompressed."""

    def work(cluster: ProcessGroupCluster) -> str:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
        model = made("cnn")
        fully_shard(model, mesh=mesh["inside"])
        with pytest.raises(ConfigError) as error:
            attach_fsdp(model, method, group=mesh["nodes"].get_group())
        return str(error.value)

    said = "compresses matrices, but FSDP's shards are flat and would be sent uncompressed; use a method for vectors"
    assert all(said in found for found in run_workers(2, work))


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match=r"needs a model sharded by fully_shard\(\)"):
        attach_fsdp(nn.Linear(2, 2), group=None)


def test_attach_names_attach_fsdp_for_a_sharded_model() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError) as error:
            spardl.attach(model, "topka", density=0.5)  # type: ignore[arg-type]
        return str(error.value)

    (said,) = run_workers(1, work)
    assert said == (
        "attach() needs a DistributedDataParallel, got a FSDPLinear sharded by fully_shard(); call "
        "spardl.attach_fsdp(model, ..., group=...)"
    )


def accumulated(how: str, **options: Any) -> tuple[torch.Tensor, Any]:
    """Trains two steps of three micro-batches on two nodes; only the last micro-batch sends."""
    model = made("cnn")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
    fully_shard(model.head, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    handle = attach_fsdp(model, group=mesh["nodes"].get_group(), **options)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(model, range(2), size=6):
        rule.zero_grad()
        for number, part in enumerate(batch.split(2)):
            ACCUMULATING[how](model, number == 2)
            loss_of(model, part).backward()
        rule.step()
    return whole(model), handle.stats()


def set_unit_by_unit(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last, recurse=False)
    model.head.set_requires_all_reduce(requires_all_reduce=last)


def set_by_both_methods(model: Any, last: bool) -> None:
    """``set_requires_gradient_sync(True)`` also reverts ``set_requires_all_reduce(False)``."""
    if last:
        model.set_requires_gradient_sync(True)
    else:
        model.set_requires_all_reduce(False)


ACCUMULATING: dict[str, Any] = {
    "set_requires_gradient_sync": lambda model, last: model.set_requires_gradient_sync(last),
    "set_requires_all_reduce": lambda model, last: model.set_requires_all_reduce(last),
    "unit by unit": set_unit_by_unit,
    "by both methods": set_by_both_methods,
}


@pytest.mark.slow
def test_set_requires_all_reduce_sends_only_the_last() -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        return [accumulated(how, **SPARSE) for how in ACCUMULATING]

    for (expected, usual), *others in run_workers(2, work):
        for found, ours in others:
            torch.testing.assert_close(found, expected)
            assert ours.steps == usual.steps == 2
            assert ours.bytes_sent == usual.bytes_sent


def test_a_second_handle_knows_the_flag_set_after_the_first() -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
        model: Any = fully_shard(nn.Linear(4, 2), mesh=mesh["inside"])
        attach_fsdp(model, group=mesh["nodes"].get_group())
        model.set_requires_all_reduce(False)
        handle = attach_fsdp(model, group=mesh["nodes"].get_group())
        steps = []
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            steps.append(handle.stats().steps)
            model.set_requires_all_reduce(True)
        return steps

    assert run_workers(2, work) == [[0, 1]] * 2


@pytest.mark.slow
def test_uncompressed_shards_are_reported() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Any]:
        found: list[Any] = []
        for options in ({}, {"exempt": 0}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, stats = accumulated("set_requires_gradient_sync", method="int8", **options)
            found += [stats.share, [str(each.message) for each in caught if "uncompressed" in str(each.message)]]
        return found

    first, second = run_workers(2, work)
    said = "is sent uncompressed, like every shard of at most exempt=16,384 entries; pass exempt=0"
    assert (first[0], first[3], second[1], second[3]) == (1.0, [], [], [])
    assert first[2] < 0.5
    assert len(first[1]) == 1
    assert said in first[1][0]
