"""All-reduce of codes, with simple compressors."""

from __future__ import annotations

import itertools
import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import spardl
from spardl.communicators import AllReduceCodes
from spardl.communicators.allreduce_codes import _contexts
from spardl.compressors import QSGD
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual
from spardl.protocol.programs import Context, Worker
from tests.communicators.test_allgather_codes import Whole
from tests.support.harness import Bench, context, layout_of, same_bits
from tests.support.quick import some_quick


def bench(workers: int, length: int) -> Bench:
    return Bench.build(Method(Whole(), AllReduceCodes(), LocalResidual()), workers, length)


def test_worked_example() -> None:
    """The first worker sums the first entry, the second the others; the own summand is not coded, the sum is."""
    found = bench(2, 3)
    gradients = [torch.tensor([1.5, -2.25, 0.5]), torch.tensor([0.75, 4.5, -0.5])]
    # 1.5 + 0 is coded as 1; -2 + 4.5 as 2; 0 - 0.5 as 0.
    assert found.step([gradient.double() for gradient in gradients])[0].tolist() == [0.5, 1.0, 0.0]
    assert [state.memory.tolist() for state in found.states] == [[0.5, -0.25, 0.5], [0.75, 0.5, -0.5]]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_equals_a_loop_over_the_ranks(workers: int, length: int) -> None:
    source = np.random.default_rng(workers)
    found, memory = bench(workers, length), np.zeros((workers, length))
    borders = [number * length // workers for number in range(workers + 1)]
    owner = np.searchsorted(borders[1:], np.arange(length), side="right")
    for _ in range(4):
        gradients = 3 * source.standard_normal((workers, length))
        memory += gradients
        sent = np.where(owner == np.arange(workers)[:, None], memory, np.trunc(memory))
        memory -= sent
        total = np.trunc(sent.sum(0))
        memory[owner, np.arange(length)] += sent.sum(0) - total
        averages = found.step([torch.from_numpy(gradient) for gradient in gradients])
        np.testing.assert_allclose(averages[0].numpy(), total / workers)
        assert all(same_bits(average, averages[0]) for average in averages)
        for state, row in zip(found.states, memory, strict=True):
            np.testing.assert_allclose(state.memory.numpy(), row, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8])
def test_cost(workers: int) -> None:
    """80 entries of one byte each: the words of a ring all-reduce of bytes, 32 bits each."""
    found = bench(workers, 80)
    found.step([torch.ones(80, dtype=torch.float64)] * workers)
    for rank, ledger in enumerate(found.cluster.ledgers):
        cost = found.method.cost(context(80, found.cluster.local_workers[rank]))
        assert ledger.rounds == cost.rounds.low == cost.rounds.high == workers - 1 + math.ceil(math.log2(workers))
        assert cost.words.low <= ledger.words <= cost.words.high
        assert ledger.bytes_sent == pytest.approx(2 * 80 * (workers - 1) / workers, abs=2 * workers)
    halves = found.method.half_costs(context(80, found.cluster.local_workers[0]))
    assert sum(half.words.high for half in halves) == cost.words.high


def test_messages_have_different_random_numbers() -> None:
    """All messages of one worker, over several steps."""
    steps: list[int] = []
    for step in range(4):
        where = Context(Worker(1, 3), layout_of(30), step)
        steps += [each.step for each in _contexts(where)]
        (sums,) = {each.step for each in _contexts(where, number=3)}
        steps.append(sums)
    assert len(set(steps)) == len(steps)


@pytest.mark.slow
def test_two_stochastic_roundings_are_unbiased() -> None:
    vector = torch.linspace(-1, 1, 64, dtype=torch.float64)
    found = Bench.build(Method(QSGD(bits=2, bucket_entries=16, norm="max"), AllReduceCodes(), NoResidual()), 4, 64)
    mean = torch.zeros(64, dtype=torch.float64)
    for _ in range(500):
        (average, *_) = found.step([vector.clone() for _ in range(4)])
        assert isinstance(average, Tensor)
        mean += average / 500
    torch.testing.assert_close(mean, vector, atol=0.1, rtol=0)


def test_overflow_of_a_sum_is_clipped_and_counted() -> None:
    method = spardl.make_method("int8", exempt=0)
    found = Bench.build(method, 2, 40, torch.float32)
    limit = torch.finfo(torch.float32).max
    for average, state in zip(found.step([torch.full((40,), limit)] * 2), found.states, strict=True):
        assert isinstance(average, Tensor)
        assert torch.equal(average, torch.full((40,), limit / 2))
        assert state.overflowed
        assert state.memory.isfinite().all()


@pytest.mark.parametrize(("name", "workers"), list(itertools.product(("qsgd", "signsgd", "terngrad"), (1, 3))))
def test_sums_codes_of_other_compressors(name: str, workers: int) -> None:
    """Borders of blocks cut layers."""
    whole = spardl.make_method(name)
    found = Bench.build(Method(whole.compressor, AllReduceCodes(), whole.residual), workers, 61)
    gradients = [torch.randn(61, generator=torch.Generator().manual_seed(rank)).double() for rank in range(workers)]
    averages = found.step(gradients)
    assert all(same_bits(average, averages[0]) for average in averages)
    assert torch.dot(averages[0], torch.stack(gradients).mean(0)) > 0  # type: ignore[arg-type]


def test_average_is_written_into_given_memory() -> None:
    """The result is the same as without it."""
    method, gradients = spardl.make_method("int4", exempt=0), [torch.randn(50) for _ in range(3)]
    benches = [Bench.build(method, 3, 50, torch.float32) for _ in range(2)]
    for _ in range(3):
        elsewhere = benches[0].step(gradients)
        outputs = [gradient.clone() for gradient in gradients]
        for gradient, state in zip(outputs, benches[1].states, strict=True):
            method.accumulate(gradient, state)
        workers = benches[1].cluster.local_workers
        programs = [method.average(*each) for each in zip(workers, benches[1].states, outputs, strict=True)]
        assert all(found is output for found, output in zip(benches[1].cluster.run(programs), outputs, strict=True))
        assert all(same_bits(*pair) for pair in zip(outputs, elsewhere, strict=True))
    for one, other in zip(*(bench.states for bench in benches), strict=True):
        assert same_bits(one.memory, other.memory)


@pytest.mark.parametrize(
    ("name", "rounding", "dtype"),
    some_quick(
        product(
            ["int8", "int4", "int2", "fp8"],
            ["nearest", "stochastic"],
            [torch.float32, torch.float64, torch.float16, torch.bfloat16],
        ),
        3,
    ),
    ids=str,
)
def test_residual_stays_within_its_bound(name: str, rounding: str, dtype: torch.dtype) -> None:
    """A sum can be P times larger than a gradient, and so can its compression error."""
    method = spardl.make_method(name, exempt=0, block=16, **({} if name == "fp8" else {"rounding": rounding}))
    found = Bench.build(method, 8, 200, dtype)
    for step in range(4):
        random = torch.Generator().manual_seed(step)
        gradient = (torch.randn(200, generator=random) / (1 + 9 * (step % 2))).to(dtype)
        found.step([gradient] * 8)
        for state in found.states:
            assert state.memory.abs().max() <= state.bound.value
