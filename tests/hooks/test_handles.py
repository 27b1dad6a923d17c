"""Further features of handles, and their errors."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spardl
from spardl.basics.errors import ConfigError, SpardlError, WorkerError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.hook import Hook, hook
from tests.hooks.loops import Ddp, Hooks, batches, loss_of, made, reports_overflow, train, weights
from tests.support.harness import run_workers

SPARSE = {"method": "spardl", "density": 0.1, "bucket_mb": 0.001}


@pytest.mark.slow
def test_the_hook_itself_can_be_registered() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        one, other = made("cnn"), made("cnn")
        attached = train(Ddp(one, SPARSE), one, range(3))
        path = Ddp(other, None)
        state = Hook(path.called, spardl.make_method("spardl", density=0.1), bucket_mb=0.001)
        path.called.register_comm_hook(state, hook)
        return torch.equal(train(path, other, range(3)), attached)

    assert all(run_workers(2, work))


@pytest.mark.slow
def test_detached_ddp_is_plain_ddp_again() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        plain, one = made("cnn"), made("cnn")
        expected = train(Ddp(plain, None), plain, range(4))
        path = Ddp(one, SPARSE)
        path.handle.detach()
        return bool(torch.allclose(train(path, one, range(4)), expected, rtol=1e-12))

    assert all(run_workers(2, work))


@pytest.mark.slow
def test_a_detached_synchronizer_leaves_gradients_alone() -> None:
    def work(cluster: ProcessGroupCluster) -> float:
        parameter = nn.Parameter(torch.zeros(3))
        synchronizer = spardl.Synchronizer([parameter], "none")
        synchronizer.detach()
        parameter.backward(torch.full((3,), float(cluster.local_ranks[0])))
        return float(parameter.grad.sum())

    assert run_workers(2, work) == [0.0, 3.0]


def test_cost_of_all_reduce() -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        model = made("cnn")
        path = Ddp(model, {**SPARSE, "bucket_mb": 25})
        train(path, model, range(4))
        return path.handle.stats()

    for stats in run_workers(2, work):
        entries = sum(parameter.numel() for parameter in made("cnn").parameters())
        assert (stats.steps, stats.refused, stats.rounds) == (4, 0, 2)
        assert stats.dense_bytes == 8 * entries
        assert 0 < stats.bytes_sent < 0.3 * stats.dense_bytes
        assert 0.3 * entries > stats.words > 0.1 * entries
        assert set(stats.seconds) == {"select", "pack", "communicate", "merge"}


def _averages(path: str, group: Any) -> None:
    parameter = nn.Parameter(torch.ones(50))
    if path == "all_reduce":
        spardl.all_reduce(torch.ones(50), "spardl", density=0.1, group=group)
    else:
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9) if "optimizer" in path else None
        synchronizer = spardl.Synchronizer([parameter], "spardl", density=0.1, group=group, optimizer=optimizer)
        with synchronizer:
            parameter.sum().backward()
        if optimizer:
            optimizer.step()
        synchronizer.detach()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("path", ["all_reduce", "Synchronizer", "Synchronizer, optimizer"])
def test_a_destroyed_group_is_gone_at_once(path: str) -> None:
    """Otherwise its threads, one of which may be freeing a tensor, abort a process that exits."""

    def work(cluster: ProcessGroupCluster) -> list[int]:
        _averages(path, None)  # so that libraries have started their own threads
        gc.disable()
        found = [_threads()]
        group = dist.new_group()
        _averages(path, group)
        found.append(_threads())
        dist.destroy_process_group(group)
        del group
        return [*found, _threads()]

    for before, meanwhile, after in run_workers(2, work):
        assert before == after < meanwhile


def test_all_reduce() -> None:
    """Averages are equal on all workers, and the residual has the rest."""

    def work(cluster: ProcessGroupCluster) -> Any:
        generator = torch.Generator().manual_seed(cluster.local_ranks[0])
        tensor = torch.randn(7, 9, generator=generator)
        before = tensor.clone()
        found = spardl.all_reduce(tensor, "spardl", density=0.2)
        assert torch.equal(tensor, before)
        return tensor, found.average, found.residual, found.cost.bytes_sent

    rows = run_workers(3, work)
    assert all(torch.equal(row[1], rows[0][1]) for row in rows)
    assert rows[0][1].shape == (7, 9)
    assert int((rows[0][1] != 0).sum()) <= 15
    total = sum(row[0] for row in rows)
    torch.testing.assert_close(sum(row[2] for row in rows) + 3 * rows[0][1], total)
    assert all(row[3] > 0 for row in rows)


def test_a_second_backward_pass_too_early() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        model = made("cnn")
        synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl")
        (batch,) = batches(model, [0])
        loss_of(model, batch).backward()
        with pytest.raises(SpardlError) as error:
            loss_of(model, batch).backward()
        synchronizer.detach()
        return str(error.value)

    (said,) = run_workers(1, work)
    assert said == (
        "head.bias received a second gradient before its first one was averaged; run all backward passes of a step "
        "except the last in no_sync(); if checkpointed blocks share a layer, use use_reentrant=False, or run the "
        "backward pass in no_sync() and then call wait(); after a failed backward pass, call wait() on all workers"
    )


def test_reentrant_checkpoints_that_share_a_layer_in_no_sync() -> None:
    """The advice of the error above works: wait() averages all gradients of the pass."""

    def work(cluster: ProcessGroupCluster) -> bool:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        synchronizer = spardl.Synchronizer(layers.named_parameters(), "spardl", density=1.0)
        inputs = layers[0](torch.full((2, 4), 1.0 + cluster.local_ranks[0]))
        with synchronizer, synchronizer.no_sync():
            for _ in range(2):
                inputs = torch.relu(checkpoint(layers[1], inputs, use_reentrant=True))
            inputs.square().mean().backward()
        found = torch.cat([each.grad.flatten() for each in layers.parameters() if each.grad is not None])
        synchronizer.detach()
        sums = found.clone()
        torch.distributed.all_reduce(sums)
        return bool(found.any()) and torch.allclose(sums, 2 * found)

    assert all(run_workers(2, work))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("hooks", marks=pytest.mark.slow)])
def test_a_lost_worker_ends_the_backward_pass(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step may use unaveraged gradients."""
    # Worker 0 exits as soon as it has noticed.
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 60.0)

    def work(cluster: ProcessGroupCluster) -> None:
        model = made("cnn")
        if kind == "ddp":
            path: Any = Ddp(model, {**SPARSE, "timeout": 30})
        else:
            path = Hooks(model, {**SPARSE, "timeout": 30})
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(batches(model, range(6))):
            if step == 3 and cluster.local_ranks[0] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            before = weights(model)
            try:
                path.backward([batch])
            except Exception as error:
                assert torch.equal(weights(model), before)
                (tmp_path / "said").write_text(f"{type(error).__name__}: {error}")
                os._exit(0)
            rule.step()
        raise AssertionError("no worker noticed")

    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        run_workers(2, work)
    (said,) = (tmp_path / "said").read_text().splitlines()
    assert said.startswith("PeerError: rank 0 lost contact in an exchange (receiving from rank 1, sending to rank 1): ")


@pytest.mark.parametrize("method", ["none", "spardl"])
def test_gradients_that_the_loop_sets_itself_become_averages(method: str) -> None:
    """Hooks of parameters do not see results of ``torch.autograd.grad``."""

    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        model = made("cnn")
        synchronizer = spardl.Synchronizer(model.named_parameters(), method)
        found = []
        for batch in batches(model, range(3)):
            given = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                parameter.grad = gradient
            synchronizer.wait()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        synchronizer.detach()
        return found

    one, other = run_workers(2, work)
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(one, other, strict=True))


def test_gradients_with_a_graph_leave_nothing_behind() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        model = made("cnn")
        synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl")
        for batch in batches(model, range(2)):
            with synchronizer, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about create_graph
                loss_of(model, batch).backward(create_graph=True)
        carried = synchronizer._averager.gradient.vectors
        synchronizer.detach()
        return any(each.requires_grad for each in carried)

    assert run_workers(1, work) == [False]


def test_copies_of_a_model_have_no_hook() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        path = Ddp(made("cnn"), SPARSE)
        same = copy.deepcopy(path.called.module)
        copied = copy.deepcopy(path.handle)
        return copied is None and torch.equal(weights(same), weights(path.called))

    assert run_workers(1, work) == [True]


def test_a_disabled_scaler_is_none() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[bool, int]:
        parameter = nn.Parameter(torch.zeros(10))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        synchronizer = spardl.Synchronizer([parameter], "spardl", density=0.5, scaler=scaler)
        parameter.backward(torch.full((10,), torch.inf if cluster.local_ranks[0] else 1.0))
        with reports_overflow(cluster.local_ranks[0]):
            synchronizer.wait()
        return bool(parameter.grad.isfinite().all()), synchronizer.stats().refused

    assert run_workers(2, work) == [(True, 1)] * 2


def test_all_reduce_of_a_lazily_negated_tensor() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        conjugate = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2).conj()
        found = spardl.all_reduce(conjugate.imag, "spardl", density=0.5)
        expected = spardl.all_reduce(conjugate.imag.clone(), "spardl", density=0.5)
        return torch.equal(found.average, expected.average) and torch.equal(found.residual, expected.residual)

    assert run_workers(2, work) == [True, True]


@pytest.mark.parametrize("method", ["spardl", "powersgd"])
def test_frozen_parameters_may_be_of_any_type(method: str) -> None:
    """For example parameters of quantized layers, which have no gradients to average."""

    def work(cluster: ProcessGroupCluster) -> bool:
        model = nn.Linear(8, 4)
        for dtype in (torch.int8, torch.bool, torch.complex64):
            frozen = nn.Parameter(torch.zeros(30, 30, dtype=dtype), requires_grad=False)
            model.register_parameter(str(dtype).removeprefix("torch."), frozen)
        ddp = nn.parallel.DistributedDataParallel(model)
        spardl.attach(ddp, method)
        ddp(torch.ones(2, 8)).sum().backward()
        return any(bool(each.grad.any()) for each in (model.weight, model.bias))

    assert run_workers(1, work) == [True]


def test_a_model_has_one_hook() -> None:
    """The second handle leaves nothing behind."""

    def work(cluster: ProcessGroupCluster) -> tuple[str, int]:
        path = Ddp(made("cnn"), SPARSE)
        with pytest.raises(ConfigError) as error:
            spardl.attach(path.called)
        return str(error.value), sum(thread.name == "spardl-communication" for thread in threading.enumerate())

    (found,) = run_workers(1, work)
    assert found == ("this model already has a handle; call its detach() before attach()", 1)


def test_each_call_of_all_reduce_can_draw_differently() -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        tensor = torch.ones(100)
        drawn = [spardl.all_reduce(tensor, "random_k", density=0.1, step=step).average for step in (0, 0, 1)]
        return [int((one * other != 0).sum()) for one, other in ((drawn[0], drawn[1]), (drawn[0], drawn[2]))]

    for same, other in run_workers(2, work):
        assert same == 10
        assert other < 10


def test_frozen_parameters_stay_without_gradient() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        synchronizer = spardl.Synchronizer(layers.named_parameters(), "spardl", density=0.5)
        for step in range(3):
            layers.zero_grad()
            if step == 1:
                layers[0].requires_grad_(False)
            with synchronizer:
                layers(torch.ones(2, 4)).sum().backward()
        return all(parameter.grad is None for parameter in layers[0].parameters())

    assert all(run_workers(2, work))


@pytest.mark.parametrize("moved", [False, True])
def test_layers_unfrozen_after_attach_are_refused(moved: bool) -> None:
    """DDP averages only parameters that were trainable when it was created, whatever the optimizer."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        for unfreezes in ("before attach", "after a step"):
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
            net[0].requires_grad_(False)
            head = torch.optim.AdamW(net[1].parameters())
            ddp = nn.parallel.DistributedDataParallel(net)
            if unfreezes == "before attach":
                net[0].requires_grad_(True)
                head.add_param_group({"params": list(net[0].parameters())})
            spardl.attach(ddp, "topka", **({"optimizer": head} if moved else {}))
            if unfreezes == "after a step":
                ddp(torch.ones(2, 3)).sum().backward()
                net[0].requires_grad_(True)
            with pytest.raises(ConfigError) as error:
                ddp(torch.ones(2, 3)).sum().backward()
            said.append(str(error.value))
        return said

    reported = "0.weight was unfrozen after the model was wrapped in DDP, which does not average its gradient"
    assert all(each.startswith(reported) for said in run_workers(2, work) for each in said)
