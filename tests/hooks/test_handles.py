"""What else the hooks can do, and what they say when something is wrong."""

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

import spardl
from spardl.basics.errors import ConfigError, SpardlError, WorkerError
from spardl.clusters import ProcessGroupCluster
from spardl.vector.layout import Layout
from tests.harness import run_workers
from tests.hooks.loops import Ddp, Hooks, batches, loss_of, made, overflow_is_told, train, weights

SPARSE = {"method": "spardl", "density": 0.1, "bucket_mb": 0.001}


@pytest.mark.slow
def test_the_hook_itself_can_be_registered() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        one, other = made("cnn"), made("cnn")
        attached = train(Ddp(one, SPARSE), one, range(3))
        path = Ddp(other, None)
        state = spardl.Hook(path.called, spardl.make_method("spardl", density=0.1), bucket_mb=0.001)
        path.called.register_comm_hook(state, spardl.hook)
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


def test_what_it_cost() -> None:
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
    """Or its threads, of which one may be letting go of a tensor, abort a process that ends."""

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
    """The average is the same everywhere, and nothing is lost."""

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
        "a second gradient of head.bias came before the first was averaged; leave all backward passes of a step but "
        "the last to no_sync(), or, after one that failed, let all workers call wait()"
    )


@pytest.mark.parametrize("kind", ["ddp", pytest.param("hooks", marks=pytest.mark.slow)])
def test_a_lost_worker_ends_the_backward_pass(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a step with gradients that are no averages."""
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 1.0)

    def work(cluster: ProcessGroupCluster) -> None:
        model = made("cnn")
        if kind == "ddp":
            path: Any = Ddp(model, {**SPARSE, "timeout": 5})
        else:
            path = Hooks(model, {**SPARSE, "timeout": 5})
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
        raise AssertionError("nobody noticed")

    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        run_workers(2, work)
    (said,) = (tmp_path / "said").read_text().splitlines()
    assert said.startswith("PeerError: rank 0 lost contact in an exchange (receiving from rank 1, sending to rank 1): ")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sparkle", {}, "there is no method 'sparkle'; use one of arc_topk, arc_topk_ef21, bf16, "),
        ("spardl", {"teem": 2}, "teem is no option of this method; it has bucket_entries, density, gather, "),
        ("spardl", {"density": 2}, "compressor.density must be above 0 and at most 1, got 2"),
        ("spardl", {"residual": "x"}, "residual must be one of global, local, "),
        ("qsgd", {"residual": "global"}, "residual=global does not fit compressor=qsgd"),
        (spardl.make_method("none"), {"density": 0.1}, "density: a method that is given whole takes no options"),
    ],
)
def test_bad_input(name: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        spardl.make_method(name, **options)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_what_is_no_ddp() -> None:
    with pytest.raises(ConfigError, match="needs a DistributedDataParallel, got a Linear; without DDP use"):
        spardl.attach(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["none", "spardl"])
def test_gradients_that_the_loop_sets_itself_become_averages(method: str) -> None:
    """No hook of a parameter sees what ``torch.autograd.grad`` gives."""

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


def test_gradients_with_a_graph_of_their_own_leave_nothing_behind() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        model = made("cnn")
        synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl")
        for batch in batches(model, range(2)):
            with synchronizer, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of create_graph
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
        with overflow_is_told(cluster.local_ranks[0]):
            synchronizer.wait()
        return bool(parameter.grad.isfinite().all()), synchronizer.stats().refused

    assert run_workers(2, work) == [(True, 1)] * 2


def test_a_tensor_that_is_the_negative_of_what_lies_in_memory() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        conjugate = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2).conj()
        found = spardl.all_reduce(conjugate.imag, "spardl", density=0.5)
        expected = spardl.all_reduce(conjugate.imag.clone(), "spardl", density=0.5)
        return torch.equal(found.average, expected.average) and torch.equal(found.residual, expected.residual)

    assert run_workers(2, work) == [True, True]


def test_what_cannot_be_averaged_is_told_at_the_start() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True))
        complex_one = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
        calls = [
            lambda: spardl.attach(nn.parallel.DistributedDataParallel(model)),
            lambda: spardl.Synchronizer(model),
            lambda: spardl.Synchronizer([model]),
            lambda: spardl.Synchronizer(model.parameters(), bucket_mb="x"),
            lambda: spardl.Synchronizer(model.parameters(), timeout=-1),
            lambda: spardl.all_reduce(torch.ones(3, dtype=torch.int64)),
            lambda: spardl.all_reduce([1.0]),
            lambda: spardl.all_reduce(torch.ones(3, dtype=torch.complex64)),
            lambda: spardl.all_reduce(torch.ones(3).to(torch.float8_e5m2)),
            lambda: spardl.all_reduce(torch.eye(3).to_sparse()),
            lambda: spardl.all_reduce(torch.ones(3, device="meta")),
            lambda: spardl.Synchronizer(complex_one.parameters()),
            lambda: spardl.attach(nn.parallel.DistributedDataParallel(complex_one)),
            lambda: spardl.attach(torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), backend="eager")),
            lambda: spardl.Synchronizer([nn.Parameter(torch.ones(3))], group=dist.GroupMember.NON_GROUP_MEMBER),
            lambda: (spardl.Synchronizer(model.parameters()), model(torch.tensor([1])).sum().backward()),
        ]
        said = []
        for call in calls:
            with pytest.raises(ConfigError) as error:
                call()
            said.append(str(error.value))
        return said

    (said,) = run_workers(1, work)
    assert said == [
        "0 has sparse gradients; make it with sparse=False",
        "parameters has a Sequential; give model.named_parameters()",
        "parameters has a Sequential; give model.named_parameters()",
        "bucket_mb must be above 0, got 'x'",
        "timeout must be above 0 seconds, and at most 1000000, got -1",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.int64",
        "all_reduce() averages a tensor, got a list; torch.tensor(...) makes one of it",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.complex64; give "
        "torch.view_as_real(tensor)",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.float8_e5m2",
        "all_reduce() averages dense tensors, got one of layout torch.sparse_coo; tensor.to_dense() makes one of it",
        "all_reduce() averages dense tensors, got one on the meta device, which has no values",
        "0 is complex64, and only floating-point gradients of at least 16 bits are averaged; keep a complex "
        "parameter as torch.view_as_real(...) of it",
        "0 is complex64, and only floating-point gradients of at least 16 bits are averaged; keep a complex "
        "parameter as torch.view_as_real(...) of it",
        "attach() needs the DistributedDataParallel itself, and torch.compile() has wrapped it; call "
        "spardl.attach(ddp_model, ...) first, then torch.compile(ddp_model)",
        "this process is no member of the process group; give a group that it is in, or None for the default one",
        "the gradient of 0 is sparse; use sparse=False where it is made",
    ]


def test_models_and_parameters_that_would_go_wrong_later_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        ddp = nn.parallel.DistributedDataParallel(
            nn.Linear(2, 2), find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        plain, shared = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), nn.Parameter(torch.ones(3))
        calls = [
            lambda: spardl.attach(ddp),
            lambda: spardl.Hook(plain, "spardl"),
            lambda: spardl.Hook(nn.Linear(2, 2), spardl.make_method("none")),
            lambda: spardl.Synchronizer([("encoder", shared), ("decoder", shared)]),
        ]
        said = []
        for call in calls:
            with pytest.raises(ConfigError) as error:
                call()
            said.append(str(error.value))
        return said

    (said,) = run_workers(1, work)
    assert said == [
        "with skip_all_reduce_unused_params=True DDP shows its hook no bucket that nobody used, and a step would not "
        "end; leave it out, as find_unused_parameters=True alone does what is needed",
        "method must be a Method, got 'spardl'",
        "attach() needs a DistributedDataParallel, got a Linear; without DDP use spardl.Synchronizer",
        "parameters has encoder twice, the second time as decoder; give each once",
    ]


@pytest.mark.parametrize("method", ["spardl", "powersgd"])
def test_frozen_parameters_may_be_of_any_type(method: str) -> None:
    """As those of quantized layers are, whose gradients nobody averages."""

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


def test_before_there_is_a_process_group() -> None:
    assert not dist.is_initialized()
    for call in (lambda: spardl.Synchronizer([nn.Parameter(torch.ones(3))]), lambda: spardl.all_reduce(torch.ones(3))):
        with pytest.raises(
            ConfigError, match=r"no process group yet; call torch\.distributed\.init_process_group\(\) fi"
        ):
            call()


def test_a_model_has_one_hook() -> None:
    """The second one leaves nothing behind."""

    def work(cluster: ProcessGroupCluster) -> tuple[str, int]:
        path = Ddp(made("cnn"), SPARSE)
        with pytest.raises(ConfigError) as error:
            spardl.attach(path.called)
        return str(error.value), sum(thread.name == "spardl-communication" for thread in threading.enumerate())

    (found,) = run_workers(1, work)
    assert found == ("a handle averages this model's gradients already; call its detach() before attach()", 1)


def test_each_call_of_all_reduce_can_draw_anew() -> None:
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


def test_a_gradient_of_another_length_is_refused() -> None:
    method = spardl.make_method("spardl")
    state = method.init_state(Layout.flat(10), torch.float32)
    with pytest.raises(ValueError, match="a gradient of 6 entries, expected 10"):
        method.accumulate(torch.zeros(6), state)


def test_too_few_workers_and_no_parameters() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        for parameters, options in (([nn.Parameter(torch.zeros(3))], {"teams": 2}), ([], {})):
            with pytest.raises(ConfigError) as error:
                spardl.Synchronizer(parameters, "spardl", **options)
            said.append(str(error.value))
        return said

    (said,) = run_workers(1, work)
    assert "teams" in said[0]
    assert said[1] == "there are no parameters to average the gradients of"
