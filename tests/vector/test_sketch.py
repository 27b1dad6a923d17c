"""The count sketch: its documented hashes in plain numbers, its linearity, and what theory promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.compressors import count_sketch as module
from spardl.compressors.count_sketch import Sketch, derive, rankable
from spardl.vector.selection import top_k

G = 0x9E3779B97F4A7C15
ALL = 2**64 - 1


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & ALL
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & ALL
    return z ^ z >> 31


def key(*numbers: int) -> int:
    z = 0
    for number in numbers:
        z = mix((z + (number + 1) * G) & ALL)
    return z


def bucket_and_sign(seed: int, row: int, columns: int, position: int) -> tuple[int, int]:
    """The documented hash, in Python's own numbers."""
    word = mix((key(seed, 0) + position * G) & ALL)
    upper = (word * (key(seed, row + 1) | 1) & ALL) // 2**32
    slot = upper * 2 * columns // 2**32
    return slot // 2, -1 if slot % 2 else 1


def slow_table(values: list[float], rows: int, columns: int, seed: int, start: int) -> np.ndarray:
    table = np.zeros((rows, columns))
    for row, (offset, value) in itertools.product(range(rows), enumerate(values)):
        bucket, sign = bucket_and_sign(seed, row, columns, start + offset)
        table[row, bucket] += sign * value
    return table


def slow_estimates(table: np.ndarray, seed: int, start: int, stop: int) -> list[float]:
    rows, columns = table.shape
    found = []
    for position in range(start, stop):
        places = [bucket_and_sign(seed, row, columns, position) for row in range(rows)]
        found.append(float(np.median([sign * table[row, bucket] for row, (bucket, sign) in enumerate(places)])))
    return found


def student(length: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Heavy tails: Student's t with three degrees of freedom."""
    normal = torch.randn(4, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normal[0] / normal[1:].square().mean(0).sqrt()).to(dtype)


def test_mix_is_splitmix64() -> None:
    """The first numbers of the published generator with seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix((1234567 + (n + 1) * G) & ALL) for n in range(3)] == published


@given(st.lists(st.integers(0, 2**70), max_size=4))
def test_derive(numbers: list[int]) -> None:
    assert derive(*numbers) == key(*numbers)


@given(
    rows=st.sampled_from([1, 3, 5, 7]),
    columns=st.one_of(st.integers(1, 50), st.just(2**30)),
    seed=st.integers(0, 2**64 - 1),
    start=st.one_of(st.integers(0, 100), st.integers(2**33, 2**40)),
    length=st.integers(0, 40),
    block=st.integers(1, 41),
)
def test_slots_are_the_documented_ones(rows: int, columns: int, seed: int, start: int, length: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", block)
        blocks = list(Sketch(rows, columns, seed)._blocks(start, start + length, torch.device("cpu")))
    assert [begin for begin, _ in blocks] == list(range(start, start + length, block))
    for row in range(rows):
        slots = [slot for _, all_slots in blocks for slot in all_slots[row].tolist()]
        expected = [bucket_and_sign(seed, row, columns, position) for position in range(start, start + length)]
        assert [(slot // 2, -1 if slot % 2 else 1) for slot in slots] == expected


@pytest.mark.parametrize("rows", [1, 3, 5, 9])
@pytest.mark.parametrize(("length", "start"), [(0, 0), (1, 5), (77, 1000)])
def test_table_and_estimates_by_hand(rows: int, length: int, start: int) -> None:
    sketch, values = Sketch(rows, 13, seed=9), student(length, seed=1)
    table = sketch.insert(values, start)
    expected = slow_table(values.tolist(), rows, 13, 9, start)
    np.testing.assert_allclose(table.view(rows, 13).numpy(), expected, atol=1e-12)
    estimates = sketch.estimate(table, start, start + length)
    np.testing.assert_allclose(estimates.numpy(), slow_estimates(expected, 9, start, start + length), atol=1e-12)


@pytest.mark.parametrize("block", [7, 64, 1 << 16])
@pytest.mark.parametrize("count", [1, 10, 99, 200, 300])
def test_largest_is_the_top_of_all_estimates(block: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block as in one piece, with ties (few columns, integers) and zeros."""
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    for columns, values in ((3, student(200, 0).round()), (60, student(200, 1)), (60, torch.zeros(200))):
        sketch = Sketch(3, columns, seed=4)
        table = sketch.insert(values)
        expected = top_k(sketch.estimate(table, 0, 200), count)
        assert torch.equal(sketch.largest(table, 0, 200, count), expected)
        assert torch.equal(sketch.largest(table, 20, 30, 4), 20 + top_k(sketch.estimate(table, 20, 30), 4))
    assert sketch.largest(table, 5, 5, count).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_add_up(dtype: torch.dtype) -> None:
    sketch, (one, other) = Sketch(5, 40, seed=2), (student(3000, seed, dtype) for seed in (1, 2))
    both = sketch.insert(one) + 3 * sketch.insert(other)
    assert both.dtype is dtype
    torch.testing.assert_close(both, sketch.insert(one + 3 * other), rtol=1e-4, atol=1e-4)
    halves = sketch.insert(one[:1234]) + sketch.insert(one[1234:], start=1234)
    torch.testing.assert_close(halves, sketch.insert(one), rtol=1e-4, atol=1e-4)


def test_estimates_are_right_on_average() -> None:
    """Over the hashes: no bias, and in one row the variance that theory gives, (|v|^2 - v_i^2) / c."""
    values, columns, draws = student(300, seed=3), 50, 3000
    for rows in (1, 3):
        sketches = [Sketch(rows, columns, seed) for seed in range(draws)]
        errors = torch.stack([s.estimate(s.insert(values), 0, 300) for s in sketches]) - values
        if rows == 1:
            predicted = (values.square().sum() - values.square()) / columns
            torch.testing.assert_close(errors.square().mean(0).mean(), predicted.mean(), rtol=0.02, atol=0)
            assert float((errors.square().mean(0) / predicted).sub(1).abs().max()) < 0.25
        deviations = errors.mean(0) / errors.std(0) * math.sqrt(draws)
        assert float(deviations.abs().max()) < 4.5
        assert abs(float(deviations.square().mean()) - 1) < 0.4


def test_heavy_hitters_are_found() -> None:
    """Twenty entries far above all others, in a table much smaller than the vector."""
    values = student(50_000, seed=5).clamp(-3, 3)
    heavy = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:20].sort().values
    values[heavy] = 100.0
    sketch = Sketch(5, 2000, seed=1)
    table = sketch.insert(values)
    assert torch.equal(sketch.largest(table, 0, 50_000, 20), heavy)
    assert float((sketch.estimate(table, 0, 50_000)[heavy] - 100).abs().max()) < 25


def test_more_rows_rarely_miss() -> None:
    """The median makes large errors rare: fewer with five rows than with one of the same width."""
    values = student(20_000, seed=6)
    shares = []
    for rows in (1, 3, 5):
        sketch = Sketch(rows, 2000, seed=3)
        errors = sketch.estimate(sketch.insert(values), 0, 20_000) - values
        shares.append(float((errors.abs() > 10).double().mean()))
    assert shares[0] > 2 * shares[1] > 4 * shares[2]


@pytest.mark.parametrize("columns", [2, 97, 1000])
def test_buckets_are_uniform_and_signs_balanced(columns: int) -> None:
    """Chi-squared over all slots, for each row, and for each seed of a few."""
    length = 200_000
    for seed, begin in ((0, 0), (1, 0), (0, 10**9)):
        ((_, rows),) = list(_one_block(Sketch(5, columns, seed), begin, length))
        for slots in rows:
            counts = torch.bincount(slots, minlength=2 * columns).double()
            assert counts.numel() == 2 * columns
            expected = length / (2 * columns)
            freedom = 2 * columns - 1
            chi = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


def _one_block(sketch: Sketch, begin: int, length: int) -> list[tuple[int, list[Tensor]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", length)
        return list(sketch._blocks(begin, begin + length, torch.device("cpu")))


def test_pairs_collide_as_independent_ones_do() -> None:
    """Neighbours, rows, seeds: pairs of slots are equal as often as chance has it, and signs do not correlate."""
    columns, length = 64, 200_000
    ((_, rows),) = _one_block(Sketch(5, columns, 0), 0, length)
    ((_, others),) = _one_block(Sketch(5, columns, derive(0, 1)), 0, length)
    pairs = list(itertools.combinations(rows, 2)) + list(zip(rows, others, strict=True))
    pairs += [(row[:-shift], row[shift:]) for row in rows for shift in (1, 2, 3, 64, 1 << 16)]
    for one, other in pairs:
        sigma = 1 / math.sqrt(one.numel())
        assert abs(float((one // 2 == other // 2).double().mean()) - 1 / columns) < 5 * sigma / math.sqrt(columns)
        assert abs(float(((1 - 2 * (one % 2)) * (1 - 2 * (other % 2))).double().mean())) < 5 * sigma


def test_all_pairs_collide_as_often_as_they_should() -> None:
    """The number of pairs in a bucket, over all pairs of 20,000 positions."""
    columns, length = 1000, 20_000
    ((_, rows),) = _one_block(Sketch(5, columns, 7), 0, length)
    for slots in rows:
        counts = torch.bincount(slots // 2).double()
        pairs, expected = float((counts * (counts - 1) / 2).sum()), length * (length - 1) / 2 / columns
        assert abs(pairs - expected) < 5 * math.sqrt(expected)


def test_rows_collide_independently() -> None:
    """Pairs that share a bucket in two rows, and pairs that share it in three, over all pairs of positions."""
    columns, length = 40, 20_000
    for seed in range(3):
        ((_, rows),) = _one_block(Sketch(5, columns, seed), 0, length)
        for together in (*itertools.combinations(rows, 2), *itertools.combinations(rows, 3)):
            joint = torch.zeros(length, dtype=torch.int64)
            for slots in together:
                joint = joint * columns + slots // 2
            counts = torch.bincount(joint).double()
            pairs = float((counts * (counts - 1) / 2).sum())
            expected = length * (length - 1) / 2 / columns ** len(together)
            assert abs(pairs - expected) < 5 * math.sqrt(expected)


def test_no_hash_outlives_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time are there more slots than those of one block."""
    sizes, block = [], 1 << 10
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    original = module._mix_
    monkeypatch.setattr(module, "_mix_", lambda words: sizes.append(words.numel()) or original(words))
    sketch = Sketch(5, 100, seed=0)
    sketch.largest(sketch.insert(student(100_000, 0)), 0, 100_000, 50)
    assert max(sizes) == block
    assert sum(sizes) == 2 * 100_000


def test_overflows_rank_first() -> None:
    values = torch.tensor([1.0, -math.inf, math.nan, -2.0, -0.0])
    assert rankable(values).tolist() == [1.0, -math.inf, math.inf, -2.0, 0.0]
    assert bool(values[2].isnan())
    largest = torch.finfo(torch.float32).max
    values = torch.full((100,), largest)
    sketch = Sketch(3, 5, seed=0)
    assert len(sketch.largest(sketch.insert(values), 0, 100, 7)) == 7


@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (0, 5), (-1, 5), (3, 0), (3, 2**30 + 1)])
def test_shapes_that_make_no_sense(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match="odd number of rows and 1 to 2\\^30 columns"):
        Sketch(rows, columns, 0)
