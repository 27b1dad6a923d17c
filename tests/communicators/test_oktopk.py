"""Ok-Topk: regions, thresholds and costs."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.clusters import SimulatedCluster
from spardl.communicators import OkTopk
from spardl.communicators.oktopk import consensus_borders
from spardl.compressors import ReusedThreshold, SparseCompressor, TopK
from spardl.method.residuals import NoResidual, PartialResidual, Residual
from spardl.protocol.programs import Context, Worker, whole_team
from spardl.vector.sparse import SparseVector
from tests.communicators.oktopk_cluster import PUBLISHED, WORKERS, alike, cluster, count, published
from tests.support.harness import NETWORK, Bench, layout_of, same_bits


def test_configurations_hold_the_published_values() -> None:
    densities, steps = {"vgg": 0.02, "lstm": 0.02, "bert": 0.01}, {"vgg": 512, "lstm": 128, "bert": 0}
    bands = {
        "vgg": ((0.6667, 1.012, 1.25, 1.012), (0.6667, 1.008, 1.3333, 1.008)),
        "lstm": ((0.75, 1.012, 1.25, 1.012), (0.75, 1.01, 1.25, 1.008)),
        "bert": ((0.8, 1.025, 1.25, 1.025), (0.8, 1.036, 1.25, 1.025)),
    }
    before = {"vgg": (5, 1.3333, 1.03), "lstm": (5, 1.5, 1.03), "bert": (0, 1.3333, 1.03)}
    for name in PUBLISHED:
        parts = published(f"oktopk_{name}")
        local, whole = parts["compressor"], parts["communicator"]
        assert (local.density, parts["warmup"].steps) == (densities[name], steps[name])
        found = tuple((one.low, one.lower_factor, one.high, one.raise_factor) for one in (local, whole))
        assert found == bands[name]
        assert (local.pre_corrections, local.pre_limit, local.pre_factor) == before[name]
        assert local.period == whole.threshold_period == (128 if name == "bert" else 32)
        assert whole.repartition_period == 64
        assert local.reevaluate_beyond is whole.reevaluate_beyond is None
        assert isinstance(parts["residual"], PartialResidual)
    plain = published("oktopk")
    assert (plain["compressor"], plain["communicator"]) == (ReusedThreshold(), OkTopk())
    assert plain["warmup"].steps == 0


def test_no_mass_is_lost() -> None:
    bench = cluster(5, 400, ReusedThreshold(0.05, period=7), OkTopk(repartition_period=5, threshold_period=6))
    source = torch.Generator().manual_seed(5)
    for _ in range(20):
        gradients = alike(5, 400, source)
        before = bench.residuals() + torch.stack(gradients).sum(0)
        average = bench.step(gradients)[0]
        assert isinstance(average, SparseVector)
        torch.testing.assert_close(bench.residuals() + 5 * average.dense(), before, rtol=1e-12, atol=1e-11)


def spent(bench: Bench, gradients: list[Tensor]) -> tuple[int, list[int], list[int]]:
    """Entries in the result of a step, and every worker's words and rounds, which must be within bounds."""
    workers, method = len(gradients), bench.method
    before = [(ledger.words, ledger.rounds) for ledger in bench.cluster.ledgers]
    step = bench.states[0].step
    found = count(bench.step(gradients)[0])
    pairs = list(zip(bench.cluster.ledgers, before, strict=True))
    words = [ledger.words - old for ledger, (old, _) in pairs]
    rounds = [ledger.rounds - old for ledger, (_, old) in pairs]
    cost = method.cost(Context(Worker(0, workers), layout_of(gradients[0].numel()), step))
    assert all(number in cost.words for number in words), cost
    assert all(number in cost.rounds for number in rounds), cost
    return found, words, rounds


@pytest.mark.parametrize("factor", [4, 0])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_words_and_rounds(workers: int, factor: float) -> None:
    """At most 6k(P-1)/P words, counts and borders included; up to 2kP in steps that evaluate the threshold."""
    length, k = 12_000, 1200
    communicator = OkTopk(balance_factor=factor, threshold_period=8, repartition_period=16)
    bench = cluster(workers, length, ReusedThreshold(0.1, period=8), communicator, NoResidual())
    source = torch.Generator().manual_seed(workers)
    log = math.ceil(math.log2(workers))
    split = log + math.ceil((workers - 1) / 4)
    for step in range(20):
        found, words, rounds = spent(bench, alike(workers, length, source))
        if step % 8 == 0:
            assert found == k
            assert set(rounds) == {split + 2 * log + (2 * log if step % 16 == 0 else 0)}
            # Whoever owns the most sums sends them in every round.
            assert max(words) <= 2 * k + 2 * log * min(length, k * workers)
            assert sum(words) / workers <= 2 * k * (1 + workers) * (workers - 1) / workers
            continue
        assert set(rounds) == {split + 2 * log + (factor == 0)}
        assert 0.8 * k <= found <= 1.25 * k
        assert max(words) <= 6 * k * (workers - 1) / workers
        assert max(words) <= 4.8 * k * (workers - 1) / workers  # so well balanced are these


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
def test_without_entries_only_counts_are_sent(workers: int) -> None:
    """The lower limit of the formula."""
    bench = cluster(workers, 40, ReusedThreshold(0.1), OkTopk(repartition_period=2))
    for step in range(3):
        _, words, _ = spent(bench, [torch.zeros(40, dtype=torch.float64)] * workers)
        low, _ = bench.method.cost(Context(Worker(0, workers), layout_of(40), step)).words
        assert set(words) == {low}


def test_one_worker_sends_nothing() -> None:
    bench = cluster(1, 40, ReusedThreshold(0.1), OkTopk(balance_factor=0))
    source = torch.Generator().manual_seed(1)
    assert [spent(bench, alike(1, 40, source))[1:] for _ in range(3)] == [([0], [0])] * 3


def concentrated(workers: int, length: int, source: torch.Generator) -> list[Tensor]:
    """Gradients that are large in their first sixteenth only."""
    gradients = alike(workers, length, source)
    for gradient in gradients:
        gradient[: length // 16] *= 1000
    return gradients


def test_blocks_are_balanced_until_new_regions() -> None:
    """All weight moves into one region: balancing reduces the words of its owner and changes no value."""
    workers, length, k = 8, 4000, 160
    found: dict[float | None, list[tuple[int, list[int], list[int]]]] = {}
    for factor in (None, 4):
        communicator = OkTopk(balance_factor=factor, repartition_period=20, threshold_period=10)
        bench = cluster(workers, length, TopK(k / length), communicator, NoResidual())
        source = torch.Generator().manual_seed(1)
        found[factor] = []
        for step in range(26):
            make = alike if step < 2 else concentrated
            found[factor].append(spent(bench, make(workers, length, source)))
    for step in range(26):
        (plain, plain_words, plain_rounds), (balanced, words, rounds) = found[None][step], found[4][step]
        assert plain == balanced
        if 3 <= step < 20 and step % 10:
            assert rounds[0] == plain_rounds[0] + 1
            # One worker holds all: it sends k entries in each of three rounds, or 7k/8 and then its share.
            assert max(plain_words) > 5.5 * plain
            assert max(words) < 4.6 * balanced
        elif step > 20 and step % 10:
            assert rounds == plain_rounds
            assert words == plain_words
            assert max(words) < 5 * k * 7 / 8


def test_worked_example() -> None:
    """Two workers, six entries, exact top-2: steps that evaluate, reuse and balance."""
    bench = cluster(2, 6, TopK(1 / 3), OkTopk(balance_factor=1.5, reevaluate_beyond=None))
    first = [torch.tensor([9.0, 0, 0, 5, 1, 0]), torch.tensor([0.0, 4, 0, 7, 2, 0])]
    average = bench.step([vector.double() for vector in first])[0]
    # Proposals cut {0, 3} at 3 and {1, 3} at 3. Sums: 9, 4, 0, 12: the two largest stay.
    assert isinstance(average, SparseVector)
    assert (average.indices.tolist(), average.values.tolist()) == ([0, 3], [4.5, 6])
    state = bench.states[1].communication.state_dict()
    assert (state["borders"].tolist(), state["threshold"]) == ([0, 3, 6], 9.0)
    # The 4 was sent, but is not in the result: it stays with its worker.
    assert [one.memory.tolist() for one in bench.states] == [[0, 0, 0, 0, 1, 0], [0, 4, 0, 0, 2, 0]]

    second = [torch.tensor([0.0, 0, 0, 4, 7, 1]), torch.tensor([0.0, 0, 0, 8, 7, 1])]
    _, words, rounds = spent_by_hand(bench, second)
    # Worker 0 sends {3, 4} to worker 1, whose {3, 4} are its own. Sums 12 and 17 of {3, 4}, both above 9 and both
    # with worker 1: it passes one on. A count for the other, one of entries kept, and half of the result each.
    assert words == [1 + 4 + 1 + 0 + 2, 1 + 0 + 1 + 2 + 2]
    assert rounds == [1 + 1 + 1 + 1 + 1] * 2
    assert [one.memory.tolist() for one in bench.states] == [[0, 0, 0, 0, 0, 1], [0, 4, 0, 0, 0, 1]]
    assert bench.states[0].communication.state_dict()["threshold"] == 9.0

    third = [torch.tensor([10.0, 0, 0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 0, 0, 2])]
    average, _, _ = spent_by_hand(bench, third)
    # Sums: 10 and 4 of worker 0's region, 1 + 3 of the other: one of two reaches 9, which is below 2/3.
    assert (average.indices.tolist(), average.values.tolist()) == ([0], [5.0])
    assert bench.states[0].communication.state_dict()["threshold"] == 9.0 / 1.008
    assert [one.memory.tolist() for one in bench.states] == [[0, 0, 0, 0, 0, 1], [0, 4, 0, 0, 0, 3]]


def spent_by_hand(bench: Bench, gradients: list[Tensor]) -> tuple[SparseVector, list[int], list[int]]:
    before = [(ledger.words, ledger.rounds) for ledger in bench.cluster.ledgers]
    average = bench.step([vector.double() for vector in gradients])[0]
    assert isinstance(average, SparseVector)
    pairs = list(zip(bench.cluster.ledgers, before, strict=True))
    return average, [one.words - old for one, (old, _) in pairs], [one.rounds - old for one, (_, old) in pairs]


@pytest.mark.parametrize("residual", [NoResidual(), PartialResidual()])
@pytest.mark.parametrize("scale", [100.0, 0.01])
def test_jump_of_the_scale_is_detected(scale: float, residual: Residual) -> None:
    """Between two evaluations; the count of the result stays between k/2 and 2k, and the threshold follows."""
    length, k = 6000, 300
    counts, thresholds = {}, {}
    for beyond in (2.0, None):
        compressor = ReusedThreshold(0.05, period=1000, reevaluate_beyond=beyond)
        bench = cluster(4, length, compressor, OkTopk(threshold_period=1000, reevaluate_beyond=beyond), residual)
        source = torch.Generator().manual_seed(4)
        counts[beyond] = [
            count(bench.step([vector * (scale if step >= 10 else 1) for vector in alike(4, length, source)])[0])
            for step in range(25)
        ]
        thresholds[beyond] = bench.states[0].communication.state_dict()["threshold"]
    assert all(k / 2 <= found <= 2 * k for found in counts[2.0])
    if scale > 1:
        # Without a new threshold, all that reach the old one are cut in every step.
        assert counts[None][11:] == [k] * 14
        assert thresholds[2.0] > 20 * thresholds[None]
    elif not residual.remembers:  # else what was carried over keeps its scale for long
        assert not any(k / 2 <= found <= 2 * k for found in counts[None][11:])


def test_all_zeros_and_back() -> None:
    bench = cluster(3, 50, ReusedThreshold(0.2), OkTopk())
    zeros = [torch.zeros(50, dtype=torch.float64)] * 3
    source = torch.Generator().manual_seed(1)
    counts = [count(bench.step(zeros)[0]), count(bench.step(zeros)[0])]
    counts += [count(bench.step(alike(3, 50, source))[0])]
    assert counts == [0, 0, 10]


def test_sums_of_zero_are_dropped() -> None:
    bench = cluster(2, 4, TopK(0.5), OkTopk())
    ups = torch.tensor([5.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    average = bench.step([ups, torch.tensor([-5.0, 1.0, 0.0, 0.0], dtype=torch.float64)])[0]
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == [1]
    assert [state.memory.tolist() for state in bench.states] == [[5.0, 0, 0, 0], [-5.0, 0, 0, 0]]


def test_underflowing_threshold_keeps_no_zeros() -> None:
    bench = cluster(2, 4, TopK(0.5), OkTopk(reevaluate_beyond=None), dtype=torch.float32)
    bench.step([torch.ones(4)] * 2)
    for state in bench.states:
        state.memory.zero_()
        state.communication.load_state_dict({**state.communication.state_dict(), "threshold": 1e-60})
    average = bench.step([torch.tensor([5.0, 1, 0, 0]), torch.tensor([-5.0, 1, 0, 0])])[0]
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == [1]


@pytest.mark.parametrize("compressor", [TopK(1.0), ReusedThreshold(1.0)], ids=lambda one: one.name)
def test_density_one_is_the_dense_average(compressor: SparseCompressor) -> None:
    for workers in WORKERS:
        bench = cluster(workers, 37, compressor, OkTopk())
        source = torch.Generator().manual_seed(workers)
        for _ in range(3):
            gradients = alike(workers, 37, source)
            gradients[0][::2] = 0
            average = bench.step(gradients)[0]
            assert count(average) == 37
            assert isinstance(average, SparseVector)
            torch.testing.assert_close(average.dense(), torch.stack(gradients).mean(0))
            assert not bench.residuals().any()


def test_overflow_does_not_enter_the_threshold() -> None:
    largest = torch.finfo(torch.float32).max
    bench = cluster(4, 40, ReusedThreshold(0.1), OkTopk(), dtype=torch.float32)
    for _ in range(3):
        bench.step([torch.full((40,), largest)] * 4)
        assert math.isfinite(bench.states[0].communication.state_dict()["threshold"])
        assert all(bool(state.memory.isfinite().all()) for state in bench.states)
        for state in bench.states:
            state.memory.zero_()
    source = torch.Generator().manual_seed(1)
    average = bench.step([torch.randn(40, generator=source) for _ in range(4)])[0]
    assert count(average) == 4


@pytest.mark.parametrize("saved_at", [37, 64])
def test_state_round_trip(saved_at: int) -> None:
    """In the middle of a period, and before both events, through a file."""
    workers, length, dtype = 2, 120, torch.float32
    source = torch.Generator().manual_seed(3)
    steps = [[vector.float() for vector in alike(workers, length, source)] for _ in range(100)]
    undisturbed = cluster(workers, length, ReusedThreshold(0.1), OkTopk(), dtype=dtype)
    for gradients in steps[:saved_at]:
        undisturbed.step(gradients)
    resumed = cluster(workers, length, ReusedThreshold(0.1), OkTopk(), dtype=dtype)
    for old, new in zip(undisturbed.states, resumed.states, strict=True):
        file = io.BytesIO()
        torch.save(old.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
    for gradients in steps[saved_at:]:
        pairs = zip(undisturbed.step(gradients), resumed.step(gradients), strict=True)
        assert all(same_bits(one, other) for one, other in pairs)
    for old, new in zip(undisturbed.states, resumed.states, strict=True):
        assert same_bits(old.memory, new.memory)
        assert torch.equal(old.compression.state_dict()["thresholds"], new.compression.state_dict()["thresholds"])


def test_borders_of_long_vectors_are_exact() -> None:
    """The mean of 200 positions near 2^31: their sum needs 39 bits."""
    size, length = 200, 2**31 + 12345
    source = torch.Generator().manual_seed(7)
    indices = [
        length - 1 - (torch.randperm(9000, generator=source)[:500] * 50).sort(descending=True).values
        for _ in range(size)
    ]
    programs = [
        consensus_borders(whole_team(Worker(rank, size)), SparseVector(where, torch.ones(500), length))
        for rank, where in enumerate(indices)
    ]
    simulated = SimulatedCluster(size, NETWORK, count_local=False)
    found = simulated.run(programs)
    means = [sum(int(where[part * 500 // size]) for where in indices) // size for part in range(1, size)]
    assert all(borders == [0, *means, length] for borders in found)
    assert all(low <= high for low, high in zip(found[0], found[0][1:], strict=False))
    log = math.ceil(math.log2(size))
    assert all(ledger.rounds == 2 * log for ledger in simulated.ledgers)
    assert all(ledger.words <= log * size / 2 + size - 1 for ledger in simulated.ledgers)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repartition_period", 0, "repartition_period must be an integer, at least 1, got 0"),
        ("threshold_period", 2.5, "threshold_period must be an integer, at least 1, got 2.5"),
        ("bucket", True, "bucket must be an integer, at least 1, got True"),
        ("balance_factor", -1, "balance_factor must be a number, at least 0, got -1"),
        ("balance_factor", "always", "balance_factor must be a number"),
        ("lower_factor", 0.9, "lower_factor must be a number, at least 1, got 0.9"),
        ("reevaluate_beyond", 0, "reevaluate_beyond must be a number, at least 1, got 0"),
    ],
)
def test_bad_values(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"communicator.{message}"):
        OkTopk(**{name: value})
