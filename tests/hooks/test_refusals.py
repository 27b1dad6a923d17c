"""Errors of handles for invalid arguments, each one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.hook import Hook
from spardl.vector.layout import Layout
from tests.hooks.refused import refusals
from tests.support.harness import run_workers


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sparkle", {}, "unknown method 'sparkle'; use one of arc_topk, arc_topk_ef21, bf16, "),
        ("spardl", {"teem": 2}, "unknown option teem; this method has bucket_entries, density, gather, "),
        ("spardl", {"density": 2}, "compressor.density must be above 0 and at most 1, got 2"),
        ("spardl", {"residual": "x"}, "residual must be one of global, local, "),
        ("qsgd", {"residual": "global"}, "residual=global does not fit compressor=qsgd"),
        (
            spardl.make_method("none"),
            {"density": 0.1},
            "a spardl.Method takes no options, got density; set them",
        ),
    ],
)
def test_bad_input(name: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        spardl.make_method(name, **options)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_models_without_ddp_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a DistributedDataParallel, got a Linear; without DDP use"):
        spardl.attach(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_momentum_applied_twice_is_warned_of_once() -> None:
    said = "spardl: compressor=arc_topk_ef21 averages running means of gradients, and "

    def work(cluster: ProcessGroupCluster) -> list[list[str]]:
        def warned(make: Callable[[nn.Module], Any]) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                make(nn.Linear(4, 3))
            return [line for each in caught if (line := str(each.message)).startswith(said)]

        def handle(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
            spardl.Synchronizer(model.named_parameters(), "arc_topk_ef21", optimizer=optimizer, **options)

        sgd, adamw = torch.optim.SGD, torch.optim.AdamW
        return [
            warned(lambda model: handle(model, sgd(model.parameters(), lr=0.1, momentum=0.9))),
            warned(lambda model: handle(model, adamw(model.parameters()))),
            warned(lambda model: handle(model, sgd(model.parameters(), lr=0.1))),
            warned(lambda model: handle(model, sgd(model.parameters(), lr=0.1, momentum=0.9), share=1.0)),
            warned(_outer),
            warned(lambda model: _outer(model, momentum=0.0)),
        ]

    (found,) = run_workers(1, work)
    assert [len(lines) for lines in found] == [1, 1, 0, 0, 1, 0]
    assert found[0][0].endswith(
        "SGD applies its own momentum (0.9) to them again; set its momentum=0 and a learning rate 10 times as large."
    )
    assert found[1][0].endswith(
        "AdamW applies its own momentum (0.9) to them again; set its betas=(0, ...), or use SGD with momentum=0."
    )


def _outer(model: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spardl.Outer(model.named_parameters(), optimizer, "arc_topk_ef21", every=2, **options).close()


def test_unsupported_tensors_are_refused_at_the_start() -> None:
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
        return refusals(calls)

    (said,) = run_workers(1, work)
    assert said == [
        "0 has sparse gradients; create it with sparse=False",
        "parameters contains a Sequential; pass model.named_parameters()",
        "parameters contains a Sequential; pass model.named_parameters()",
        "bucket_mb must be above 0, got 'x'",
        "timeout must be above 0 seconds, and at most 1000000, got -1",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.int64; convert it with "
        "tensor.float()",
        "all_reduce() averages a tensor, got a list; convert it with torch.tensor(...)",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.complex64; pass "
        "torch.view_as_real(tensor)",
        "all_reduce() averages floating-point tensors of at least 16 bits, got torch.float8_e5m2; convert it "
        "with tensor.float()",
        "all_reduce() averages dense tensors, got one of layout torch.sparse_coo; convert it with tensor.to_dense()",
        "all_reduce() averages tensors with values, got one on the meta device; create it on cpu or cuda",
        "0 has dtype complex64, but only floating-point gradients of at least 16 bits can be averaged; store a "
        "complex parameter as torch.view_as_real(parameter)",
        "0 has dtype complex64, but only floating-point gradients of at least 16 bits can be averaged; store a "
        "complex parameter as torch.view_as_real(parameter)",
        "attach() needs the DistributedDataParallel itself, got its torch.compile() wrapper; call "
        "spardl.attach(ddp_model, ...) first, then torch.compile(ddp_model)",
        "this process is not a member of the process group; pass a group that contains it, or None for the "
        "default group",
        "the gradient of 0 is sparse; create its layer with sparse=False",
    ]


def test_models_and_parameters_that_would_fail_later_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        ddp = nn.parallel.DistributedDataParallel(
            nn.Linear(2, 2), find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        plain, shared = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), nn.Parameter(torch.ones(3))
        calls = [
            lambda: spardl.attach(ddp),
            lambda: Hook(plain, "spardl"),
            lambda: Hook(nn.Linear(2, 2), spardl.make_method("none")),
            lambda: spardl.Synchronizer([("encoder", shared), ("decoder", shared)]),
        ]
        return refusals(calls)

    (said,) = run_workers(1, work)
    assert said == [
        "skip_all_reduce_unused_params=True makes DDP skip the hook for unused buckets, so a step would never end; "
        "remove it (find_unused_parameters=True is enough)",
        "method must be a Method, got 'spardl'",
        "attach() needs a DistributedDataParallel, got a Linear; without DDP use spardl.Synchronizer",
        "parameters contains encoder twice, the second time as decoder; pass each one once",
    ]


def test_before_there_is_a_process_group() -> None:
    assert not dist.is_initialized()
    for call in (lambda: spardl.Synchronizer([nn.Parameter(torch.ones(3))]), lambda: spardl.all_reduce(torch.ones(3))):
        with pytest.raises(
            ConfigError, match=r"no process group is initialized; call torch\.distributed\.init_process_group\(\) fi"
        ):
            call()


def test_a_gradient_of_another_length_is_refused() -> None:
    method = spardl.make_method("spardl")
    state = method.init_state(Layout.flat(10), torch.float32)
    with pytest.raises(ValueError, match="gradient must have 10 entries, got 6"):
        method.accumulate(torch.zeros(6), state)


def test_too_few_workers_and_no_parameters() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        one = [nn.Parameter(torch.zeros(3))]
        return refusals(
            [lambda: spardl.Synchronizer(one, "spardl", teams=2), lambda: spardl.Synchronizer([], "spardl")]
        )

    (said,) = run_workers(1, work)
    assert "teams" in said[0]
    assert said[1] == "parameters is empty or all frozen; pass model.named_parameters() of a model to train"
