"""TopkDSA: a reference implementation, costs for inputs of known overlap, and both formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.topkdsa import TopkDSA
from spardl.compressors import TopK
from spardl.compressors.base import Output, SparseCompressor
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual, LocalResidual, PartialResidual, Residual
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Range
from spardl.vector.packing import Slot, message_bytes
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, context, layout_of, same_bits, to_dense

WORKERS = [*range(1, 10), 12, 16]
RULES = [LocalResidual(), PartialResidual(), GlobalResidual()]
FORMS = {"published": 1 / 3, "always dense": 0.0, "never dense": 1.0}
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AnyCount(SparseCompressor):
    """Selects entries above a threshold: none, some or all."""

    threshold: float

    name = "any_count_for_tests"
    output = Output.ANY_COUNT

    def selector(self, context: Context, state: State) -> Select:
        def select(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
            (part,) = parts
            inside = accumulated.values[part.start : part.stop]
            return (inside.abs() > self.threshold).nonzero().squeeze(1) + part.start

        return select


def largest(vector: Vector, k: int) -> list[int]:
    return sorted(range(len(vector)), key=lambda i: (-abs(vector[i]), i))[:k]


def reference(
    inputs: Sequence[Vector], chosen: Sequence[Sequence[int]], dense_above: float, rule: Residual
) -> tuple[dict[int, float], list[Vector]]:
    """One synchronization of vectors that hold the old residuals already: the sum, and the new residuals."""
    total: dict[int, float] = {}
    for vector, own in zip(inputs, chosen, strict=True):
        for i in own:
            total[i] = total.get(i, 0.0) + vector[i]
    if len(total) > dense_above * len(inputs[0]):
        total = {i: value for i, value in total.items() if value}
    residuals = [vector.copy() for vector in inputs]
    for residual, own in zip(residuals, chosen, strict=True):
        for i in own:
            if i in total or isinstance(rule, LocalResidual):
                residual[i] = 0.0
    return total, residuals


def compare(gradients: Sequence[Sequence[Tensor]], density: float, communicator: TopkDSA, rule: Residual) -> None:
    """Compares several steps with the reference; gradients by step and worker."""
    workers, length = len(gradients[0]), gradients[0][0].numel()
    method = Method(TopK(density), communicator, rule)
    bench = Bench.build(method, workers, length)
    k = method.compressor.count(context(length))
    memory = [np.zeros(length) for _ in range(workers)]
    for step in gradients:
        averages = bench.step(step)
        inputs = [old + gradient.numpy() for old, gradient in zip(memory, step, strict=True)]
        chosen = [largest(vector, k) for vector in inputs]
        total, memory = reference(inputs, chosen, communicator.dense_above, rule)
        assert all(same_bits(average, averages[0]) for average in averages)
        assert isinstance(averages[0], SparseVector)
        assert averages[0].indices.tolist() == sorted(total)
        expected = torch.tensor([total[i] / workers for i in sorted(total)], dtype=torch.float64)
        assert same_bits(averages[0].values, expected)
        for state, residual in zip(bench.states, memory, strict=True):
            torch.testing.assert_close(state.memory, torch.from_numpy(residual))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dense_above", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("workers", WORKERS)
def test_equals_the_reference(workers: int, dense_above: float, rule: Residual) -> None:
    source = torch.Generator().manual_seed(workers)
    length, steps = 60, 3
    common = torch.randn(length, generator=source, dtype=torch.float64)
    noise = torch.randn(steps, workers, length, generator=source, dtype=torch.float64)
    compare([list(step + common) for step in noise], 0.1, TopkDSA(dense_above=dense_above), rule)


@given(
    data=st.data(),
    workers=st.integers(1, 9),
    length=st.integers(1, 12),
    density=st.floats(0.05, 1.0),
    communicator=st.builds(TopkDSA, st.integers(1, 5), st.sampled_from([0.0, 1 / 3, 0.5, 1.0])),
    rule=st.sampled_from(RULES),
)
@hypothesis_settings(max_examples=40)
def test_equals_the_reference_for_small_shapes(
    data: st.DataObject, workers: int, length: int, density: float, communicator: TopkDSA, rule: Residual
) -> None:
    """Ties, zeros, sums that cancel out, regions without entries."""
    numbers = st.integers(-3, 3).map(float)
    size = workers * length
    steps = [data.draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(2)]
    gradients = [list(torch.tensor(step, dtype=torch.float64).view(workers, length)) for step in steps]
    compare(gradients, density, communicator, rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dense_above", FORMS.values(), ids=FORMS)
def test_cancelled_sums_lose_no_mass(dense_above: float, rule: Residual) -> None:
    """Position 0: 4 - 4, both selected; position 1 is selected by worker 0 only."""
    gradients = [torch.tensor([4.0, 3.0, 1.0]), torch.tensor([-4.0, 0.5, 2.0])]
    bench = Bench.build(Method(TopK(2 / 3), TopkDSA(dense_above=dense_above), rule), 2, 3, torch.float32)
    average = bench.step(gradients)[0]
    assert isinstance(average, SparseVector)
    as_dense = dense_above < 1
    assert average.indices.tolist() == ([1, 2] if as_dense else [0, 1, 2])
    assert average.dense().tolist() == [0, 1.5, 1]
    kept = 4 if as_dense and not isinstance(rule, LocalResidual) else 0
    assert [state.memory.tolist() for state in bench.states] == [[kept, 0, 1], [-kept, 0.5, 0]]
    assert (bench.residuals() + 2 * average.dense()).tolist() == [0, 3.5, 3]


@pytest.mark.parametrize("threshold", [0.0, 0.8, 1.9, 100.0])
@pytest.mark.parametrize("workers", [1, 3, 4, 7])
def test_any_number_of_entries(workers: int, threshold: float) -> None:
    source = torch.Generator().manual_seed(workers)
    gradients = list(torch.randn(workers, 50, generator=source, dtype=torch.float64))
    bench = Bench.build(Method(AnyCount(threshold), TopkDSA(), GlobalResidual()), workers, 50)
    averages = bench.step(gradients)
    assert all(same_bits(average, averages[0]) for average in averages)
    expected = sum(torch.where(gradient.abs() > threshold, gradient, 0) for gradient in gradients)
    torch.testing.assert_close(to_dense(averages[0]) * workers, expected)
    check_limits(bench)


def check_limits(bench: Bench) -> None:
    """Compares the formula with the sent words."""
    workers = len(bench.states)
    for rank, ledger in enumerate(bench.cluster.ledgers):
        rounds, words = bench.method.cost(Context(Worker(rank, workers), bench.states[rank].layout, 0))
        assert rounds == (ledger.rounds, ledger.rounds)
        assert ledger.words in words


def supports(workers: int, share: int, region: int, disjoint: bool) -> list[Tensor]:
    """Gradients with ``share`` non-zeros in each of P regions, at the same positions of all workers or at others."""
    gradients = torch.zeros(workers, workers, region, dtype=torch.float64)
    for rank in range(workers):
        first = rank * share if disjoint else 0
        gradients[rank, :, first : first + share] = 1.0 + rank
    return list(gradients.view(workers, -1))


def synchronized(gradients: Sequence[Tensor], k: int, communicator: TopkDSA) -> tuple[Bench, SparseVector]:
    length = gradients[0].numel()
    bench = Bench.build(Method(TopK(k / length), communicator, LocalResidual()), len(gradients), length)
    average = bench.step(gradients)[0]
    assert isinstance(average, SparseVector)
    torch.testing.assert_close(average.dense() * len(gradients), torch.stack(list(gradients)).sum(0))
    check_limits(bench)
    return bench, average


def words_of_counts(workers: int) -> int:
    return sum(distance.bit_count() for distance in range(workers)) + workers - 1


@pytest.mark.parametrize("bucket", [1, 4])
@pytest.mark.parametrize("disjoint", [False, True], ids=["identical", "disjoint"])
@pytest.mark.parametrize("workers", [*WORKERS, 17])
def test_cost_of_even_load(workers: int, disjoint: bool, bucket: int) -> None:
    """From 4k(P-1)/P words to (2k+n)(P-1)/P, which is less than what kP entries would cost."""
    share = 2
    k, others, counts = share * workers, workers - 1, words_of_counts(workers)
    levels = (workers - 1).bit_length()
    for region in (3 * workers * share, 2 * workers * share + 1):
        bench, _ = synchronized(supports(workers, share, region, disjoint), k, TopkDSA(bucket=bucket))
        union = k * workers if disjoint else k
        dense = 3 * union > workers * region
        gathered = region * others if dense else 2 * union * others // workers
        held_by_region = (share, union // workers)
        for ledger in bench.cluster.ledgers:
            assert ledger.words == counts + 2 * k * others // workers + gathered
            assert ledger.rounds == 3 * levels + -(-others // bucket)
            split, blocks = (others * message_bytes(Slot(held, region), torch.float64) for held in held_by_region)
            assert ledger.bytes_sent == 8 * counts + split + (8 * gathered if dense else blocks)
        assert dense == (region < 3 * workers * share) or not disjoint


@pytest.mark.parametrize("workers", WORKERS)
def test_cost_of_uneven_load(workers: int) -> None:
    """Exact for every worker: its own region is sent in each round, the one after it in all but the first, ..."""
    length, k = 203, 10
    source = torch.Generator().manual_seed(workers)
    scale = torch.linspace(3, 0, length, dtype=torch.float64)
    gradients = [scale * torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]
    bench = Bench.build(Method(TopK(k / length), TopkDSA(dense_above=1), LocalResidual()), workers, length)
    average = bench.step(gradients)[0]
    assert isinstance(average, SparseVector)
    borders = [rank * length // workers for rank in range(workers + 1)]

    def inside(indices: Sequence[int], rank: int) -> int:
        return sum(borders[rank % workers] <= i < borders[rank % workers + 1] for i in indices)

    for rank, ledger in enumerate(bench.cluster.ledgers):
        split = k - inside(largest(gradients[rank].numpy(), k), rank)
        gathered, gap = 0, 1
        while gap < workers:
            bag = range(min(gap, workers - gap))
            gathered += sum(inside(average.indices.tolist(), rank + offset) for offset in bag)
            gap *= 2
        assert ledger.words == words_of_counts(workers) + 2 * split + 2 * gathered
    check_limits(bench)


@pytest.mark.parametrize(("dense_above", "entries"), [(0.5, 6), (1 / 3, 4), (0.25, 3), (0.0, 0), (1.0, 12)])
def test_dense_above(dense_above: float, entries: int) -> None:
    """Up to a number of 12 entries, regions are sent sparse; at one half, both formats take the same words."""
    for union in range(1, 13):
        gradient = torch.zeros(12, dtype=torch.float64)
        places = [i // 2 + 6 * (i % 2) for i in range(union)]
        gradient[places] = torch.arange(1.0, union + 1, dtype=torch.float64)
        bench, average = synchronized([gradient, gradient], union, TopkDSA(dense_above=dense_above))
        assert len(average) == union
        words = sum(ledger.words for ledger in bench.cluster.ledgers) - 2 * words_of_counts(2)
        assert words == 2 * union + (2 * union if union <= entries else 12)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_regions_without_entries(length: int) -> None:
    for dense_above in FORMS.values():
        method = Method(TopK(1.0), TopkDSA(dense_above=dense_above), GlobalResidual())
        gradients = [torch.full((length,), rank + 1.0, dtype=torch.float64) for rank in range(5)]
        bench = Bench.build(method, 5, length)
        assert to_dense(bench.step(gradients)[0]).tolist() == [3.0] * length
        check_limits(bench)


def test_has_no_state() -> None:
    assert TopkDSA().init_state().state_dict() == {}
    assert TopkDSA().cost(Context(Worker(0, 1), layout_of(9), 0), TopK(1.0)) == ((0, 0), (0, 0))


def test_bad_options() -> None:
    for bucket in (0, -1, 1.5, "four", True, None):
        with pytest.raises(ConfigError, match=f"communicator.bucket must be an integer, at least 1, got {bucket!r}"):
            TopkDSA(bucket=bucket)
    for share in (-0.1, 1.1, float("nan"), "half", True, None, [0.5]):
        with pytest.raises(ConfigError, match="dense_above must be a number from 0 to 1, got"):
            TopkDSA(dense_above=share)
