"""Casts: known results, comparison with torch's communication hooks, and values that a format cannot represent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo  # DistributedDataParallel imports it: here, once for all workers that are forked
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.communicators import Backend, Dense, DenseCommunicator
from spardl.compressors import Cast, Mass
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from tests.support.harness import Bench, context, layout_of, run_method, run_workers, same_bits, to_dense

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8}
LENGTH = 59


def cast(name: str, communicator: DenseCommunicator | None = None) -> Method:
    return Method(Cast(name), communicator or Dense(), NoResidual())


def gradients_of(workers: int, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, generator=source) for _ in range(workers)]


@pytest.mark.parametrize("name", DTYPES)
def test_one_worker_gets_its_gradient_rounded(name: str) -> None:
    (gradient,) = gradients_of(1)
    average = Bench.build(cast(name), 1, LENGTH, torch.float32).step([gradient])[0]
    assert same_bits(average, gradient.to(DTYPES[name]).float())
    assert not torch.equal(to_dense(average), gradient)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_every_addition_is_rounded(name: str, workers: int) -> None:
    """The parts are added in the order of the ranks."""
    gradients = gradients_of(workers)
    total, *others = [(gradient / workers).to(DTYPES[name]) for gradient in gradients]
    for part in others:
        total = total + part
    average = Bench.build(cast(name), workers, LENGTH, torch.float32).step(gradients)[0]
    torch.testing.assert_close(average, total.float(), rtol=1e-6, atol=0)
    error = (to_dense(average) - torch.stack(gradients).mean(0)).abs()
    assert bool((error <= workers * EPSILON[name] * torch.stack(gradients).abs().mean(0)).all())


@pytest.mark.parametrize("communicator", [Dense(), Backend()], ids=["dense", "backend"])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_costs(workers: int, communicator: DenseCommunicator) -> None:
    """As many rounds and words as without compression, and two bytes to a word."""
    bench = Bench.build(cast("bf16", communicator), workers, 64, torch.float32)
    bench.step([torch.ones(64)] * workers)
    for ledger in bench.cluster.ledgers:
        assert ledger.rounds == 2 * (workers - 1)
        assert ledger.words == 2 * 64 * (workers - 1) // workers
        assert ledger.bytes_sent == 2 * ledger.words
    assert Cast().sizes(context(64)) == [64]


def test_an_average_too_large_for_fp16_becomes_infinite() -> None:
    gradients = [torch.tensor([7e4, 7e4, -7e4, 1e-8, math.nan]), torch.tensor([7e4, 0.0, -7e4, 1e-8, 1.0])]
    found = to_dense(Bench.build(cast("fp16"), 2, 5, torch.float32).step(gradients)[0])
    assert found[:4].tolist() == [math.inf, 35008.0, -math.inf, 0.0]
    assert found[4].isnan()
    found = to_dense(Bench.build(cast("bf16"), 2, 5, torch.float32).step(gradients)[0])
    torch.testing.assert_close(found[:4], torch.tensor([7e4, 3.5e4, -7e4, 1e-8]), rtol=2.0**-8, atol=0)
    assert found[4].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_average_has_the_gradients_type(dtype: torch.dtype) -> None:
    gradients = [gradient.to(dtype) for gradient in gradients_of(3)]
    for name in DTYPES:
        average = Bench.build(cast(name), 3, LENGTH, dtype).step(gradients)[0]
        assert to_dense(average).dtype == dtype
        expected = torch.stack(gradients).float().mean(0)
        torch.testing.assert_close(to_dense(average).float(), expected, rtol=0.1, atol=0.05)


def test_it_keeps_nothing() -> None:
    assert Cast.mass is Mass.ROUNDED
    bench = Bench.build(cast("bf16"), 2, LENGTH, torch.float32)
    first = bench.step(gradients_of(2, seed=1))[0]
    bench.step(gradients_of(2, seed=2))
    assert same_bits(bench.step(gradients_of(2, seed=1))[0], first)


def test_bad_formats() -> None:
    for wrong in ("fp8", "FP16", 16, None, ["fp16"]):
        with pytest.raises(ConfigError, match=r"compressor\.format must be one of fp16, bf16, got"):
            Cast(format=wrong)


def _train_with_hook(name: str) -> tuple[Tensor, Tensor]:
    """This worker's gradient, and what torch makes of all."""
    rank, torch_hook = torch.distributed.get_rank(), getattr(default_hooks, f"{name}_compress_hook")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)))
    seen: list[Tensor] = []

    def hook(_, bucket):  # torch reads the annotations, and takes no strings
        seen.append(bucket.buffer().clone())
        order[:] = bucket.parameters()
        return torch_hook(None, bucket)

    order: list[nn.Parameter] = []
    model.register_comm_hook(None, hook)
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))
    model(inputs).exp().mean().backward()
    assert len(seen) == 1
    return seen[0], torch.cat([parameter.grad.flatten() for parameter in order])


def _average_with_both(cluster: ProcessGroupCluster) -> list[Any]:
    found = []
    for name in DTYPES:
        gradient, expected = _train_with_hook(name)
        for communicator in (Backend(), Dense()):
            method = cast(name, communicator)
            state = method.init_state(layout_of(gradient.numel()), gradient.dtype)
            method.accumulate(gradient, state)
            found.append((name, expected, *run_method(method, cluster, [state])))
    return found


@pytest.mark.parametrize("workers", [3, 4])
def test_agrees_with_torchs_hooks(workers: int) -> None:
    """To the bit where division by P is exact and the order of the additions the same.

    torch casts before it divides, this class after it. In fp16 halves of very small numbers are not exact.
    """
    for found in run_workers(workers, _average_with_both):
        for (name, expected, backend), (_, _, ring) in zip(found[::2], found[1::2], strict=True):
            exact = expected.abs() > 1e-3
            assert exact.sum() > 30
            if workers == 4:
                assert same_bits(backend[exact], expected[exact])
            scale = workers * EPSILON[name] * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(backend, expected, rtol=2 * EPSILON[name], atol=scale)
            torch.testing.assert_close(ring, expected, rtol=2 * EPSILON[name], atol=scale)
