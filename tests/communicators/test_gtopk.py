"""gTopk: both variants against a reference implementation, and their costs for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.gtopk import VARIANTS, GTopk
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual, LocalResidual, PartialResidual, Residual
from spardl.protocol.programs import Context, State
from spardl.vector.accumulator import Select
from spardl.vector.packing import Slot, message_bytes
from spardl.vector.sparse import SparseVector
from tests.support.harness import NETWORK, Bench, context, same_bits, to_dense

WORKERS = [*range(1, 10), 12, 16]
RULES = [LocalResidual(), PartialResidual(), GlobalResidual()]
Vector = npt.NDArray[np.float64]
Entries = dict[int, float]


def largest(entries: Entries, k: int) -> Entries:
    return {i: entries[i] for i in sorted(entries, key=lambda i: (-abs(entries[i]), i))[:k]}


@dataclass
class Cluster:
    """All workers in plain arrays: entries to send, dropped entries, and workers that only wait for the result."""

    k: int
    held: list[Entries]
    dropped: list[Vector]
    gone: set[int] = field(default_factory=set)

    def meet(self, workers: Sequence[int], others: Sequence[int]) -> None:
        """Two groups with one vector each sum up; all holders of the sum share its dropped entries."""
        one, other = self.held[workers[0]], self.held[others[0]]
        union = {i: one.get(i, 0.0) + other.get(i, 0.0) for i in {*one, *other}}
        kept = largest(union, self.k)
        holders = [rank for rank in (*workers, *others) if rank not in self.gone]
        for rank in holders:
            self.held[rank] = kept
            for i in set(union) - set(kept):
                self.dropped[rank][i] += union[i] / len(holders)


def run_tree(cluster: Cluster, workers: int) -> Entries:
    step = 1
    while step < workers:
        for rank in range(0, workers - step, 2 * step):
            cluster.gone.add(rank + step)
            cluster.meet([rank], [rank + step])
        step *= 2
    return cluster.held[0]


def run_doubling(cluster: Cluster, workers: int) -> Entries:
    core = 1
    while 2 * core <= workers:
        core *= 2
    for rank in range(core, workers):
        cluster.gone.add(rank)
        cluster.meet([rank - core], [rank])
    group = 1
    while group < core:
        for first in range(0, core, 2 * group):
            cluster.meet(range(first, first + group), range(first + group, first + 2 * group))
        group *= 2
    return cluster.held[0]


MODELS: dict[str, Callable[[Cluster, int], Entries]] = {"tree": run_tree, "doubling": run_doubling}


def reference(inputs: Sequence[Vector], k: int, variant: str, rule: Residual) -> tuple[Entries, list[Vector]]:
    """One synchronization of vectors that hold the old residuals already: the sum, and the new residuals."""
    chosen = [largest(dict(enumerate(vector.tolist())), k) for vector in inputs]
    cluster = Cluster(k, list(chosen), [np.zeros_like(vector) for vector in inputs])
    total = MODELS[variant](cluster, len(inputs))
    residuals = []
    for vector, own, dropped in zip(inputs, chosen, cluster.dropped, strict=True):
        residual = vector.copy()
        for i in range(len(vector)):
            sent = i in own
            if isinstance(rule, GlobalResidual) and i in total:
                residual[i] = (0.0 if sent else vector[i]) + dropped[i]
            elif sent and (i in total or isinstance(rule, LocalResidual)):
                residual[i] = 0.0
        residuals.append(residual)
    return total, residuals


def compare(gradients: Sequence[Sequence[Tensor]], density: float, variant: str, rule: Residual) -> None:
    """Compares several steps with the reference; gradients by step and worker."""
    workers, length = len(gradients[0]), gradients[0][0].numel()
    method = Method(TopK(density), GTopk(variant), rule)
    bench = Bench.build(method, workers, length)
    k = method.compressor.count(context(length))
    memory = [np.zeros(length) for _ in range(workers)]
    for step in gradients:
        averages = bench.step(step)
        inputs = [old + gradient.numpy() for old, gradient in zip(memory, step, strict=True)]
        total, memory = reference(inputs, k, variant, rule)
        assert all(same_bits(average, averages[0]) for average in averages)
        assert isinstance(averages[0], SparseVector)
        assert averages[0].indices.tolist() == sorted(total)
        expected = torch.tensor([total[i] for i in sorted(total)], dtype=torch.float64)
        torch.testing.assert_close(averages[0].values * workers, expected)
        for state, residual in zip(bench.states, memory, strict=True):
            torch.testing.assert_close(state.memory, torch.from_numpy(residual))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("workers", WORKERS)
def test_equals_the_reference(workers: int, variant: str, rule: Residual) -> None:
    source = torch.Generator().manual_seed(workers)
    length, steps = 60, 3
    common = torch.randn(length, generator=source, dtype=torch.float64)
    noise = torch.randn(steps, workers, length, generator=source, dtype=torch.float64)
    compare([list(step + common) for step in noise], 0.1, variant, rule)


@given(
    data=st.data(),
    workers=st.integers(1, 9),
    length=st.integers(1, 12),
    density=st.floats(0.05, 1.0),
    variant=st.sampled_from(list(VARIANTS)),
    rule=st.sampled_from(RULES),
)
@hypothesis_settings(max_examples=80)
def test_equals_the_reference_for_small_shapes(
    data: st.DataObject, workers: int, length: int, density: float, variant: str, rule: Residual
) -> None:
    """Ties, zeros, sums that cancel out."""
    numbers = st.integers(-3, 3).map(float)
    size = workers * length
    steps = [data.draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(2)]
    gradients = [list(torch.tensor(step, dtype=torch.float64).view(workers, length)) for step in steps]
    compare(gradients, density, variant, rule)


def test_worked_example_of_three_workers() -> None:
    """k = 1. Worker 0 exchanges with 1 first in the tree, and with 2 first when folding, so other entries win."""
    gradients = [torch.tensor(values) for values in ([3.0, 0, 1], [0, 4.0, 1], [2.0, 0, 1])]
    left = {
        ("tree", "partial"): [[3, 0, 1], [0, 0, 1], [2, 0, 1]],  # 4 wins over 3, then over 2
        ("tree", "global"): [[3, 0, 1], [0, 0, 1], [2, 0, 1]],
        ("doubling", "partial"): [[0, 0, 1], [0, 4, 1], [0, 0, 1]],  # 3 + 2 wins over 4
        ("doubling", "global"): [[0, 0, 1], [0, 4, 1], [0, 0, 1]],
    }
    for variant in VARIANTS:
        for rule in (PartialResidual(), GlobalResidual()):
            bench = Bench.build(Method(TopK(1 / 3), GTopk(variant), rule), 3, 3, torch.float32)
            average = bench.step(gradients)[0]
            expected = [0, 4 / 3, 0] if variant == "tree" else [5 / 3, 0, 0]
            torch.testing.assert_close(to_dense(average), torch.tensor(expected))
            assert [state.memory.tolist() for state in bench.states] == left[variant, rule.name]


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_variants_agree_for_a_power_of_two(workers: int) -> None:
    """The same pairs exchange; they differ only in the owner of dropped entries, which the partial rule ignores."""
    benches = [Bench.build(Method(TopK(0.1), GTopk(variant), PartialResidual()), workers, 50) for variant in VARIANTS]
    source = torch.Generator().manual_seed(workers)
    for _ in range(3):
        gradients = list(torch.randn(workers, 50, generator=source, dtype=torch.float64))
        one, other = (bench.step(gradients)[0] for bench in benches)
        assert same_bits(one, other)


def test_partial_residual_loses_dropped_entries() -> None:
    """Workers 0 and 1 drop position 0, but workers 2 and 3 bring its index into the result."""
    gradients = [torch.tensor(values) for values in ([1.0, 0, 0], [0, 2.0, 0], [5.0, 0, 0], [5.0, 0, 0])]
    for rule, lost in ((PartialResidual(), 1.0), (GlobalResidual(), 0.0)):
        for variant in VARIANTS:
            bench = Bench.build(Method(TopK(1 / 3), GTopk(variant), rule), 4, 3, torch.float32)
            average = bench.step(gradients)[0]
            missing = torch.stack(gradients).sum(0) - bench.residuals() - 4 * to_dense(average)
            assert missing.tolist() == [lost, 0, 0]


@dataclass(frozen=True)
class Reluctant(TopK):
    """Selects fewer entries than it may, and some workers none."""

    def selector(self, context: Context, state: State) -> Select:
        select = super().selector(context, state)
        return lambda accumulated, parts: select(
            accumulated, [part._replace(k=min(part.k, context.worker.rank)) for part in parts]
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("workers", [1, 3, 4, 7])
def test_fewer_entries_than_the_slot_holds(workers: int, variant: str) -> None:
    gradients = list(torch.randn(workers, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    bench = Bench.build(Method(Reluctant(0.1), GTopk(variant), GlobalResidual()), workers, 50)
    averages = bench.step(gradients)
    assert all(same_bits(average, averages[0]) for average in averages)
    total = bench.residuals() + workers * to_dense(averages[0])
    torch.testing.assert_close(total, torch.stack(gradients).sum(0))


# Bytes of 10 of 100 entries: all that is sent below.
MESSAGE = message_bytes(Slot(10, 100), torch.float64)


def measured(workers: int, variant: str) -> tuple[Bench, int]:
    length = 100
    bench = Bench.build(Method(TopK(0.1), GTopk(variant), GlobalResidual()), workers, length)
    source = torch.Generator().manual_seed(workers)
    bench.step(list(torch.randn(workers, length, generator=source, dtype=torch.float64)))
    return bench, 10


@pytest.mark.parametrize("workers", [*range(1, 18), 32])
def test_cost_of_the_tree(workers: int) -> None:
    """A worker sends 2k words to its parent and to each child, and receives 2k words from each."""
    bench, k = measured(workers, "tree")
    for rank, ledger in enumerate(bench.cluster.ledgers):
        neighbours = sum(child & (child - 1) == rank for child in range(1, workers)) + (rank > 0)
        assert ledger.rounds == 2 * neighbours
        assert ledger.messages == neighbours
        assert ledger.words == 2 * k * neighbours
        assert ledger.bytes_sent == neighbours * MESSAGE
    levels = (workers - 1).bit_length()
    assert bench.cluster.ledgers[0].rounds == 2 * levels
    assert sum(ledger.words for ledger in bench.cluster.ledgers) == 4 * k * (workers - 1)
    longest = 2 * levels * (NETWORK.alpha + NETWORK.beta * MESSAGE)
    assert bench.cluster.seconds() <= longest * 1.001
    if workers == 1 << levels:
        assert bench.cluster.seconds() == pytest.approx(longest)


@pytest.mark.parametrize("workers", [*range(1, 18), 32])
def test_cost_of_doubling(workers: int) -> None:
    """log2 P rounds and 2k log2 P words; workers beyond a power of two take two more rounds."""
    bench, k = measured(workers, "doubling")
    levels = workers.bit_length() - 1
    core = 1 << levels
    for rank, ledger in enumerate(bench.cluster.ledgers):
        hosts = rank < core and rank + core < workers
        assert ledger.rounds == (2 if rank >= core else levels + 2 * hosts)
        assert ledger.messages == (1 if rank >= core else levels + hosts)
        assert ledger.words == 2 * k * ledger.messages
        assert ledger.bytes_sent == MESSAGE * ledger.messages
    message = NETWORK.beta * MESSAGE
    rounds = levels + 2 * (workers > core)
    longest = rounds * (NETWORK.alpha + message)
    if workers == core:
        assert bench.cluster.seconds() == pytest.approx(longest)
    # A guest's message and a peer's can reach a worker at once, and then share its link.
    assert bench.cluster.seconds() <= (longest + message) * 1.001


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("workers", [*range(1, 18), 32])
def test_formula_bounds_all_workers(workers: int, variant: str) -> None:
    bench, _ = measured(workers, variant)
    rounds, words = bench.method.cost(Context(bench.cluster.local_workers[0], bench.states[0].layout, 0))
    ledgers = bench.cluster.ledgers
    assert rounds == (min(one.rounds for one in ledgers), max(one.rounds for one in ledgers))
    assert words == (min(one.words for one in ledgers), max(one.words for one in ledgers))


def test_has_no_state() -> None:
    assert GTopk().init_state().state_dict() == {}


def test_bad_options() -> None:
    for variant in ("ring", "", None, 2, ["tree"]):
        with pytest.raises(ConfigError, match=r"communicator.variant must be one of tree, doubling, got"):
            GTopk(variant=variant)
