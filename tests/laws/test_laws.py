"""The laws that hold for every method, in the simulated cluster; test_laws_gloo.py repeats them in real processes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.communicators import AllGather, Backend, Dense, OkTopk, TopkDSA
from spardl.communicators.spardl import srs_rounds
from spardl.compressors import Mass, NoCompression, TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual, NoResidual, PartialResidual
from spardl.vector.layout import Layout
from spardl.vector.packing import Slot, message_bytes
from spardl.vector.wire import EXACT, Wire
from tests.support.harness import (
    Bench,
    all_methods,
    conserving_methods,
    divisors,
    remembering_methods,
    representatives,
    same_bits,
    spardl,
    spardl_communicators,
    sparse_methods,
    to_dense,
    topka,
)
from tests.support.quick import some_quick

# All up to 16, and more; those that take long and are like others are left to the slow tests.
QUICK, SLOW = (1, 2, 3, 4, 6, 7, 14), (5, 8, 9, 10, 11, 12, 13, 15, 16, 24, 32)
WORKERS = [*QUICK, *(pytest.param(count, marks=pytest.mark.slow) for count in SLOW)]
DTYPES = [torch.float32, torch.float64]
SLOW_WITH_DTYPE = [
    pytest.param(count, DTYPES[(place + 1) % 2], marks=pytest.mark.slow) for place, count in enumerate(SLOW)
]


def random_gradients(workers: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Gradients with common parts, ties, zeros and negative zeros."""
    source = torch.Generator().manual_seed(seed)
    common = torch.randn(length, generator=source, dtype=dtype)
    gradients = [common + torch.randn(length, generator=source, dtype=dtype) for _ in range(workers)]
    if seed % 3 == 0:
        gradients = [(4 * gradient).round() / 4 for gradient in gradients]
    if seed % 4 == 0 and length:
        gradients[0] = -torch.zeros_like(gradients[0])
    return gradients


@pytest.mark.parametrize(
    ("workers", "dtype"), [*((count, torch.float32) for count in QUICK), *SLOW_WITH_DTYPE], ids=str
)
def test_replicas_are_bit_identical_and_mass_is_conserved(workers: int, dtype: torch.dtype) -> None:
    """Laws 1 and 2, at every team size and both gathers, over steps in which h adapts."""
    length, density = 61 + 5 * workers, 0.1
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    for method in conserving_methods(workers, density):
        bench = Bench.build(method, workers, length, dtype)
        for step in range(4 if workers <= 16 else 2):
            gradients = random_gradients(workers, length, dtype, seed=step)
            before = bench.residuals() + torch.stack(gradients).sum(0)
            averages = bench.step(gradients)
            assert all(same_bits(average, averages[0]) for average in averages), method
            after = bench.residuals() + workers * to_dense(averages[0])
            torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance * workers, msg=str(method))


@pytest.mark.parametrize(
    ("workers", "wire"),
    some_quick(
        [
            *((workers, "bfloat16") for workers in (1, 2, 3, 4, 7, 8)),
            *((workers, "int4") for workers in (1, 2, 3, 4, 7, 8)),
            *((workers, wire) for workers in (3, 4) for wire in ("float16", "int8", "int2")),
        ],
        2,
    ),
)
def test_rounding_on_the_way_loses_no_mass(workers: int, wire: str) -> None:
    """Laws 1 and 2 where values travel in 16 bits or fewer; each sum in 32 has an error of its own, far smaller."""
    length = 61 + 5 * workers
    for method in sparse_methods(workers, 0.1):
        if Wire(wire).coarse and not method.communicator.sends_whole:
            continue
        bench = Bench.build(replace(method, wire=Wire(wire)), workers, length, torch.float32)
        for step in range(1, 4):
            gradients = random_gradients(workers, length, torch.float32, seed=step)
            gradients[-1] = 300 * gradients[-1]
            before = bench.residuals() + torch.stack(gradients).sum(0)
            averages = bench.step(gradients)
            assert all(same_bits(average, averages[0]) for average in averages), method
            after = bench.residuals() + workers * to_dense(averages[0])
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * 300 * workers, msg=str(method))
            if step == 1:
                exact = Bench.build(method, workers, length, torch.float32).step(gradients)[0]
                assert not torch.equal(to_dense(averages[0]), to_dense(exact)), method


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8])
def test_partial_residuals_lose_no_mass_where_nothing_is_dropped(workers: int) -> None:
    """Laws 1 and 2 with the rule of Ok-Topk, at both widths of the wire."""
    length = 61 + 5 * workers
    for wire, communicator in itertools.product((EXACT, Wire("bfloat16")), (OkTopk(), AllGather(), TopkDSA())):
        method = Method(TopK(0.1), communicator, PartialResidual(), wire=wire)
        bench = Bench.build(method, workers, length, torch.float32)
        for step in range(4):
            gradients = random_gradients(workers, length, torch.float32, seed=step)
            before = bench.residuals() + torch.stack(gradients).sum(0)
            averages = bench.step(gradients)
            assert all(same_bits(average, averages[0]) for average in averages), method
            after = bench.residuals() + workers * to_dense(averages[0])
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * workers, msg=str(method))


@pytest.mark.parametrize(
    ("workers", "dtype", "wire"),
    some_quick(
        [
            *((workers, torch.float32, EXACT) for workers in (1, 2, 3, 4, 7, 8)),
            *((workers, torch.float32, Wire("bfloat16")) for workers in (1, 4, 7)),
            (5, torch.float32, Wire("int4")),
            (4, torch.float64, Wire("float16")),
            (3, torch.bfloat16, EXACT),
        ],
        2,
    ),
    ids=str,
)
def test_compiled_and_portable_runs_are_bit_equal(
    workers: int, dtype: torch.dtype, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages and residuals, over steps in which candidates come to work."""
    pytest.importorskip("numba")
    length = 400 + workers
    for method in sparse_methods(workers, 0.05):
        if wire.coarse and not method.communicator.sends_whole:
            continue
        benches = {}
        for name in ("compiled", "portable"):
            benches[name] = Bench.build(replace(method, wire=wire), workers, length, dtype)
        for step in range(3):
            found = {}
            for name, bench in benches.items():
                monkeypatch.setenv("SPARDL_KERNELS", name)
                found[name] = bench.step(random_gradients(workers, length, dtype, seed=step))
            pairs = zip(*found.values(), strict=True)
            assert all(same_bits(one, other) for one, other in pairs), method
        for one, other in zip(*(bench.states for bench in benches.values()), strict=True):
            assert same_bits(one.memory, other.memory), method


@given(
    data=st.data(),
    workers=st.integers(1, 12),
    length=st.integers(0, 40),
    density=st.floats(0.001, 1.0),
    dtype=st.sampled_from(DTYPES),
    steps=st.integers(1, 3),
)
@hypothesis_settings(max_examples=150)
def test_any_shape_and_any_values(
    data: st.DataObject, workers: int, length: int, density: float, dtype: torch.dtype, steps: int
) -> None:
    """Laws 1, 2 and 4: fewer elements than workers, empty vectors and blocks, ties, -0.0, P = 1."""
    method = data.draw(st.sampled_from(conserving_methods(workers, density)))
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -3.25, 1e-30, 1e6])
    bench = Bench.build(method, workers, length, dtype)
    for _ in range(steps):
        values = data.draw(st.lists(numbers, min_size=workers * length, max_size=workers * length))
        gradients = list(torch.tensor(values, dtype=dtype).view(workers, length))
        copies = [gradient.clone() for gradient in gradients]
        before = bench.residuals() + torch.stack(gradients).sum(0)
        averages = bench.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        after = bench.residuals() + workers * to_dense(averages[0])
        tolerance = 1e-9 if dtype is torch.float64 else 10.0
        torch.testing.assert_close(after, before, rtol=1e-6, atol=tolerance)
        assert all(same_bits(gradient, copy) for gradient, copy in zip(gradients, copies, strict=True))


@pytest.mark.parametrize(("workers", "dtype"), [*itertools.product(QUICK, DTYPES), *SLOW_WITH_DTYPE], ids=str)
def test_density_one_is_the_dense_average(workers: int, dtype: torch.dtype) -> None:
    """Law 3."""
    length = 3 * workers + 1
    gradients = random_gradients(workers, length, dtype, seed=workers)
    expected = torch.stack(gradients).mean(0)
    for method in representatives(workers, 1.0):
        if not hasattr(method.compressor, "density") and method.compressor.mass is not Mass.KEPT:
            continue
        average = Bench.build(method, workers, length, dtype).step(gradients)[0]
        torch.testing.assert_close(to_dense(average), expected, msg=str(method))


@pytest.mark.parametrize(
    ("workers", "length"),
    [
        *itertools.product((1, 2, 3, 4), (0, 2)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 5), (3, 1), (4, 5), (7, 1), (7, 5), (8, 2))),
    ],
)
def test_fewer_elements_than_workers(workers: int, length: int) -> None:
    """Law 4: every legal combination runs, and keeps at most what there is."""
    gradients = [torch.full((length,), rank + 1.0, dtype=torch.float64) for rank in range(workers)]
    for method in all_methods(workers, density=0.01):
        averages = Bench.build(method, workers, length).step(gradients)
        assert all(to_dense(average).shape == (length,) for average in averages)


@pytest.mark.parametrize("workers", WORKERS)
def test_cost_of_spardl_without_teams(workers: int) -> None:
    """Law 5, d = 1: 2 ceil(log2 P) rounds and 4 k (P-1) / P words, on every worker."""
    per_block, steps = 3, 2
    k = per_block * workers
    bench = Bench.build(spardl(0.05), workers, 20 * k)
    for step in range(steps):
        bench.step(random_gradients(workers, 20 * k, torch.float64, seed=step))
    for ledger in bench.cluster.ledgers:
        assert ledger.rounds == steps * 2 * math.ceil(math.log2(workers))
        assert ledger.messages == ledger.rounds
        assert ledger.words == steps * 4 * k * (workers - 1) // workers
        reduced = [message_bytes(Slot(3 * bag, 60 * bag), torch.float64) for _, bag in srs_rounds(workers)]
        gathered = (workers - 1) * message_bytes(Slot(3, 60), torch.float64)
        assert ledger.bytes_sent == steps * (sum(reduced) + gathered)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_bytes_at_density_one_percent(workers: int) -> None:
    """9.4 bits for an index in addition to the 32 of its value, 16 on a shorter wire; counts are few."""
    length = 20_000
    for wire, value in ((EXACT, 4), (Wire("bfloat16"), 2)):
        for method in {type(one.communicator): one for one in reversed(sparse_methods(workers, 0.01))}.values():
            bench = Bench.build(replace(method, wire=wire), workers, length, torch.float32)
            bench.step(random_gradients(workers, length, torch.float32, seed=1))
            for ledger in bench.cluster.ledgers:
                assert value * ledger.words / 2 < ledger.bytes_sent < (value + 1.5) * ledger.words / 2, method


@pytest.mark.parametrize("workers", WORKERS)
def test_cost_of_spardl_with_teams(workers: int) -> None:
    """Law 5, d > 1: the formula of R-SAG exactly, B-SAG within its bounds."""
    for d in divisors(workers)[1:]:
        size = workers // d
        per_block = 2 * d  # k_b, so that its d-th part is whole
        k = per_block * size
        log_team, log_teams = math.ceil(math.log2(size)), math.ceil(math.log2(d))
        for communicator in spardl_communicators(workers):
            if communicator.teams != d:
                continue
            bench = Bench.build(Method(TopK(0.1), communicator, GlobalResidual()), workers, 10 * k)
            bench.step(random_gradients(workers, 10 * k, torch.float64, seed=1))
            low = 2 * k * (2 * workers - d - 1) // workers
            high = 2 * k * (d * d + 2 * workers - 3 * d) // workers
            exact = 2 * k * (2 * workers - 2 * d + d * log_teams) // workers
            for ledger in bench.cluster.ledgers:
                assert ledger.rounds == 2 * log_team + log_teams
                if communicator.gather == "recursive":
                    assert ledger.words == exact
                else:
                    assert low <= ledger.words <= high


@pytest.mark.parametrize("workers", WORKERS)
def test_cost_of_the_baselines(workers: int) -> None:
    """Law 5: TopkA sends 2k(P-1) words in ceil(log2 P) rounds, the ring 2n(P-1)/P in 2(P-1)."""
    length = 10 * workers
    gathered = Bench.build(topka(0.1), workers, length)
    gathered.step(random_gradients(workers, length, torch.float64, seed=1))
    for ledger in gathered.cluster.ledgers:
        assert ledger.rounds == math.ceil(math.log2(workers))
        assert ledger.words == 2 * workers * (workers - 1)
    for communicator in (Dense(), Backend()):
        method = Method(NoCompression(), communicator, NoResidual())
        bench = Bench.build(method, workers, length)
        bench.step(random_gradients(workers, length, torch.float64, seed=1))
        for ledger in bench.cluster.ledgers:
            assert ledger.rounds == 2 * (workers - 1)
            assert ledger.words == 2 * length * (workers - 1) // workers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_infinite_enters_a_residual(bad: float) -> None:
    """Law 6: a gradient with a NaN is left out, the other workers' are not, and the next step is as usual."""
    workers, length = 4, 50
    for method in remembering_methods(workers, 0.1):
        bench = Bench.build(method, workers, length)
        gradients = random_gradients(workers, length, torch.float64, seed=1)
        gradients[2][7] = bad
        averages = bench.step(gradients)
        assert bench.states[2].refused == 1
        assert all(bool(state.memory.isfinite().all()) for state in bench.states)
        assert bool(to_dense(averages[0]).isfinite().all())
        accepted = torch.stack([g for rank, g in enumerate(gradients) if rank != 2]).sum(0)
        torch.testing.assert_close(bench.residuals() + workers * to_dense(averages[0]), accepted)


def test_an_overflow_on_the_way_stays_out_of_the_residual() -> None:
    """Law 6: finite gradients whose sums are too large for the type, more of them than are sent."""
    largest = torch.finfo(torch.float32).max
    source = torch.Generator().manual_seed(0)
    for method in remembering_methods(8, 0.2):
        for _ in range(10):
            bench = Bench.build(method, 8, 64, torch.float32)
            huge = torch.rand(8, 64, generator=source) < 0.4
            bench.step(list(torch.where(huge, largest, torch.randn(8, 64, generator=source))))
            assert all(bool(state.memory.isfinite().all()) for state in bench.states), method


@pytest.mark.parametrize(
    "workers", [1, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_state_round_trip(workers: int) -> None:
    """Law 7: save, load and continue is never having stopped, bit for bit."""
    length = 97
    for method in all_methods(workers, density=0.1):
        undisturbed = Bench.build(method, workers, length, torch.float32)
        for step in range(3):
            undisturbed.step(random_gradients(workers, length, torch.float32, seed=step))
        resumed = Bench.build(method, workers, length, torch.float32)
        for state, saved in zip(resumed.states, undisturbed.states, strict=True):
            state.load_state_dict(saved.state_dict())
        for step in range(3, 6):
            gradients = random_gradients(workers, length, torch.float32, seed=step)
            expected, found = undisturbed.step(gradients), resumed.step(gradients)
            assert all(same_bits(one, other) for one, other in zip(expected, found, strict=True)), method
        if method.residual.remembers:
            pairs = zip(undisturbed.states, resumed.states, strict=True)
            assert all(same_bits(one.memory, other.memory) for one, other in pairs)


def test_a_foreign_state_is_refused() -> None:
    """Law 7: a residual of another model does not load."""
    method = spardl(0.1)
    saved = method.init_state(Layout.flat(10), torch.float32).state_dict()
    with pytest.raises(ValueError, match="must have 11 entries, got 10"):
        method.init_state(Layout.flat(11), torch.float32).load_state_dict(saved)


def test_without_residual_nothing_is_carried_over() -> None:
    """``residual=none``: each step depends on its own gradients alone."""
    first, second = (random_gradients(4, 60, torch.float64, seed) for seed in (1, 2))
    bench = Bench.build(spardl(0.05, residual=NoResidual()), 4, 60)
    bench.step(first)
    fresh = Bench.build(spardl(0.05, residual=NoResidual()), 4, 60)
    assert same_bits(bench.step(second)[0], fresh.step(second)[0])
