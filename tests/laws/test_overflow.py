"""Law 6 where gradients are finite and their sums are not: nothing infinite is carried over, and all is counted."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.communicators import AllGather, AllGatherCodes, Dense
from spardl.compressors import NoCompression, RandomK, SignSGD, TopK
from spardl.method.method import Method, MethodState
from spardl.method.momentum import CorrectedMomentum, LocalMomentum, Moments, Momentum, OptimizerMomentum
from spardl.method.residuals import LocalResidual, NoResidual, PartialResidual
from spardl.method.warmup import Warmup
from spardl.vector.accumulator import Accumulator
from spardl.vector.norms import Bound, largest_magnitude
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Wire
from tests.support.harness import Bench, all_methods, remembering_methods, same_bits, spardl, to_dense, topka

TYPES = [torch.float16, torch.bfloat16, torch.float32]


@cache
def carrying_methods(workers: int, density: float = 0.1) -> list[Method]:
    """All with a residual or a velocity, a momentum, a warm-up and narrow wires among them."""
    sparse = Method(TopK(density), AllGather(), LocalResidual())
    return [
        *remembering_methods(workers, density),
        *(method for method in all_methods(workers, density) if method.residual.remembers),
        replace(sparse, momentum=CorrectedMomentum(0.9)),
        replace(sparse, momentum=LocalMomentum(0.9, nesterov=True), residual=NoResidual()),
        replace(sparse, wire=Wire("float16")),
        replace(sparse, wire=Wire("float16"), residual=PartialResidual()),
        replace(sparse, warmup=Warmup(2), momentum=LocalMomentum(0.9)),
        Method(NoCompression(), Dense(), NoResidual(), LocalMomentum(0.9)),
        Method(SignSGD(), AllGatherCodes(), LocalResidual(), LocalMomentum(0.9)),
    ]


def carried(bench: Bench) -> list[Tensor]:
    """What lasts from step to step."""
    memories = [state.memory for state in bench.states if bench.method.residual.remembers]
    return memories + [state.moments.velocity for state in bench.states]


def huge_gradients(workers: int, length: int, dtype: torch.dtype, strength: float, seed: int) -> list[Tensor]:
    """Finite gradients near the largest number, most of them of one sign."""
    source = torch.Generator().manual_seed(seed)
    sizes = strength * torch.rand(workers, length, generator=source, dtype=torch.float64)
    signs = torch.where(torch.rand(workers, length, generator=source) < 0.8, 1.0, -1.0)
    return list((sizes * signs * torch.finfo(dtype).max).to(dtype))


def usual_gradients(workers: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return list(torch.randn(workers, length, generator=source).to(dtype))


@given(
    data=st.data(),
    workers=st.integers(1, 4),
    length=st.integers(1, 70),
    dtype=st.sampled_from(TYPES),
    strength=st.floats(0.05, 1.0),
    kernels=st.sampled_from(["compiled", "portable"]),
    seed=st.integers(0, 2**20),
)
@hypothesis_settings(max_examples=40, phases=[Phase.explicit, Phase.generate])
def test_huge_gradients_leave_nothing_infinite(
    data: st.DataObject, workers: int, length: int, dtype: torch.dtype, strength: float, kernels: str, seed: int
) -> None:
    method = data.draw(st.sampled_from(carrying_methods(workers)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARDL_KERNELS", kernels)
        check_steps(Bench.build(method, workers, length, dtype), length, dtype, strength, seed)


def check_steps(bench: Bench, length: int, dtype: torch.dtype, strength: float, seed: int, steps: int = 4) -> None:
    """Steps with huge gradients, then as many with usual ones."""
    workers = len(bench.states)
    for step in range(2 * steps):
        huge = step < steps
        make = partial(huge_gradients, strength=strength) if huge else usual_gradients
        gradients = make(workers, length, dtype, seed=seed + step)
        before = [state.refused for state in bench.states]
        pairs = list(zip(bench.states, gradients, strict=True))
        due = [overflows(bench.method, *pair) for pair in pairs]
        # Factors of a matrix are sums of many entries.
        many = workers if bench.method.compressor.sparsifies else workers * length
        possible = many * max(reach(*pair) for pair in pairs) >= torch.finfo(dtype).max
        averages = bench.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        assert all(bool(vector.isfinite().all()) for vector in carried(bench))
        assert bool(to_dense(averages[0]).isfinite().all())
        counted = [state.refused - count for state, count in zip(bench.states, before, strict=True)]
        flags = [state.overflowed for state in bench.states]
        assert len(set(flags)) == 1
        assert all(int(own or flags[0]) <= count <= int(possible) for own, count in zip(due, counted, strict=True))


def reach(state: MethodState, gradient: Tensor) -> float:
    """What no entry of this worker can exceed in a step; Nesterov's momentum counts a gradient nearly twice."""
    parts = (gradient, gradient, state.memory, state.moments.velocity)
    return sum(float(part.abs().max()) for part in parts if part.numel())


def overflows(method: Method, state: MethodState, gradient: Tensor) -> bool:
    """Whether a gradient is too much for the velocity, or for what is carried over."""
    largest, more, found = torch.finfo(gradient.dtype).max, gradient, False
    if method.momentum.remembers:
        moments = Moments(state.moments.velocity.clone())
        more = method.momentum.apply(gradient, moments)
        found = not bool(moments.velocity.isfinite().all() and more.isfinite().all())
        more = more.clamp(-largest, largest)
    total = state.memory + more
    return found or (method.residual.remembers and not bool(total.isfinite().all()))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "dtype"), [(1, torch.float16), (3, torch.bfloat16), (4, torch.float16)], ids=str)
def test_no_method_keeps_infinities_of_huge_gradients(workers: int, dtype: torch.dtype) -> None:
    for method, strength in itertools.product(carrying_methods(workers), (0.3, 1.0)):
        check_steps(Bench.build(method, workers, 60, dtype), 60, dtype, strength, seed=workers, steps=2)


def test_gradients_that_add_up_to_too_much() -> None:
    """Each fits into float16, and so does the sum over workers; after four steps the residual would not."""
    for method in (topka(0.01), Method(RandomK(0.01), Dense(), LocalResidual()), spardl(0.01)):
        bench = Bench.build(method, 2, 1000, torch.float16)
        for _ in range(6):
            bench.step([torch.full((1000,), 2e4).half(), torch.zeros(1000).half()])
        assert bool(bench.states[0].memory.isfinite().all())
        assert 3 <= bench.states[0].refused <= 4
        before = bench.states[1].refused
        for seed in range(4):
            averages = bench.step(usual_gradients(2, 1000, torch.float16, seed))
            assert bool(to_dense(averages[0]).isfinite().all())
        assert bench.states[1].refused == before


@pytest.mark.parametrize("momentum", [OptimizerMomentum(), CorrectedMomentum(0.9), LocalMomentum(0.9, nesterov=True)])
def test_usual_steps_do_not_look_for_overflows(momentum: Momentum, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be a pass over the whole vector."""
    looked: list[Tensor] = []
    monkeypatch.setattr(Bound, "look", lambda bound, values: bool(looked.append(values)))
    for method in (topka(0.1), spardl(0.1), Method(RandomK(0.1), Dense(), LocalResidual())):
        bench = Bench.build(replace(method, momentum=momentum), 3, 200, torch.float32)
        for step in range(20):
            bench.step(usual_gradients(3, 200, torch.float32, step))
        assert not looked
        bench.step(huge_gradients(3, 200, torch.float32, 1.0, seed=0))
        assert looked
        looked.clear()


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64], ids=str)
def test_the_largest_magnitude(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each way that it is found: of negative numbers, the smallest ones, infinities and NaNs."""
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for kernels in ("compiled", "portable"):
        monkeypatch.setenv("SPARDL_KERNELS", kernels)
        for many in (1, 10_000):
            for values, expected in (([1, -3, 2], 3), ([-most, 1], most), ([least, -0.0], least), ([-0.0], 0.0)):
                assert largest_magnitude([torch.tensor(values, dtype=dtype).repeat(many)]) == expected
            assert largest_magnitude([torch.tensor([1, -math.inf], dtype=dtype).repeat(many)]) == math.inf
            assert math.isnan(largest_magnitude([torch.tensor([-math.nan, math.inf, -1], dtype=dtype).repeat(many)]))
    assert largest_magnitude([]) == largest_magnitude([torch.empty(0, dtype=dtype)]) == 0


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_arrives_is_cut_before_it_is_sent_on(dtype: torch.dtype) -> None:
    """Else two infinities of different signs would meet in the next round."""
    most = torch.finfo(dtype).max
    vector = Accumulator(torch.tensor([most, -most, 1.0], dtype=dtype), bound=Bound(most))
    vector.add(0, SparseVector(torch.tensor([0, 1, 2]), torch.tensor([most, -most, 1.0], dtype=dtype), 3))
    assert vector.values.tolist() == [most, -most, 2]
    assert vector.overflowed
    vector.restore()
    assert vector.values.tolist() == [most, -most, 1]
