"""Accumulators, and the sparse vectors that they send."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.method.residuals import GlobalResidual, LocalResidual, PartialResidual, Residual
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Range
from spardl.vector.norms import Bound
from spardl.vector.sparse import SparseVector, concatenate, merge
from spardl.vector.wire import EXACT, Wire
from tests.support.harness import same_bits
from tests.vector.test_selection import PATHS

INFINITY = float("inf")


def largest(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
    return accumulated.largest(parts)


def sparse(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values), length)


def test_a_block_goes_around_the_end() -> None:
    vector = Accumulator(torch.tensor([1.0, -6.0, 3.0, 4.0, -5.0, 2.0]))
    taken = vector.take([Range(4, 6, 1), Range(0, 2, 1)], largest)
    assert (taken.indices.tolist(), taken.values.tolist(), taken.length) == ([0, 3], [-5.0, -6.0], 4)
    assert vector.values.tolist() == [1.0, 0.0, 3.0, 4.0, 0.0, 2.0]
    assert vector.taken().tolist() == [1, 4]
    vector.add(4, sparse([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0], 4))
    assert vector.values.tolist() == [4.0, 4.0, 3.0, 4.0, 1.0, 4.0]
    # What it finds next knows of both.
    assert vector.largest([Range(0, 2, 1), Range(4, 6, 1)]).tolist() == [0, 5]
    vector.restore()
    assert vector.values.tolist() == [1.0, -6.0, 3.0, 4.0, -5.0, 2.0]


@pytest.mark.parametrize("wire", [EXACT, Wire("bfloat16")], ids=str)
@given(st.integers(0, 10**6), st.integers(1, 60), st.data())
def test_around_the_end_is_like_anywhere_else(wire: Wire, seed: int, length: int, data: st.DataObject) -> None:
    """Turning the vector changes nothing but the positions; and all of it can be undone."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=source)
    shift = data.draw(st.integers(0, length - 1))
    straight, turned = Accumulator(values.clone(), wire=wire), Accumulator(values.roll(shift), wire=wire)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, length - 1))
        stop = data.draw(st.integers(start + 1, length))
        k = data.draw(st.integers(0, stop - start))
        block = Range(start, stop, k)
        # A block that wraps around selects from two ranges; all or nothing gives the same result for both.
        picked = straight.largest([block])
        whole = [part._replace(k=0) for part in around(start + shift, stop - start, length)]
        one = straight.take([block], lambda accumulated, parts, picked=picked: picked)
        order = (picked + shift) % length
        other = turned.take(whole, lambda accumulated, parts, order=order: order)
        assert torch.equal(one.indices, other.indices)
        assert same_bits(one.values, other.values)
        assert one.length == other.length
        arrived = SparseVector(one.indices, torch.randn(len(one), generator=source), one.length)
        straight.add(start, arrived)
        turned.add((start + shift) % length, arrived)
        assert same_bits(straight.values.roll(shift), turned.values)
        check_largest(turned)
    straight.restore()
    turned.restore()
    assert same_bits(straight.values, values)
    assert same_bits(turned.values, values.roll(shift))


def around(start: int, size: int, length: int) -> list[Range]:
    """A range that may go around the end of the vector, as ranges that do not."""
    start %= length
    first = Range(start, min(start + size, length), 0)
    rest = size - (first.stop - first.start)
    return [first, Range(0, rest, 0)] if rest else [first]


def check_largest(vector: Accumulator) -> None:
    length = vector.values.numel()
    halves = [Range(0, length // 2, length // 4), Range(length // 2, length, 1)][length == 1 :]
    assert vector.largest(halves).tolist() == picked(vector, halves)


def by_hand(values: Tensor, part: Range) -> list[int]:
    order = sorted(range(part.start, part.stop), key=lambda place: (-abs(values[place].item()), place))
    return sorted(order[: part.k])


@pytest.mark.parametrize("name", PATHS)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(["take", "take_at", "add", "round"]), max_size=6), st.data())
def test_a_list_of_candidates_is_reported_of_every_change(
    name: str, seed: int, changes: list[str], data: st.DataObject
) -> None:
    length, halves = 300, [Range(0, 150, 6), Range(150, 300, 6)]
    source = torch.Generator().manual_seed(seed)
    values, candidates = torch.randn(length, generator=source), Candidates()
    with patch.dict("os.environ", SPARDL_KERNELS=name):
        for _ in range(2):
            candidates.add(values, None)
            vector = Accumulator(values, candidates, Wire("bfloat16"))
            assert vector.largest(halves).tolist() == picked(vector, halves)
        # It does not see changes that were not reported to it: there is a list.
        smallest = int(values.abs().argmin())
        values[smallest] += 100
        assert smallest not in vector.largest(halves).tolist()
        values[smallest] -= 100
        for change in changes:
            start, size = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 200))
            drawn = torch.randint(size, (20,), generator=source).unique()
            block = SparseVector(drawn, 3 * torch.randn(drawn.numel(), generator=source), size)
            if change == "take":
                parts = [part._replace(k=min(3, part.stop - part.start)) for part in around(start, size, length)]
                vector.take(parts, lambda *both: torch.tensor(picked(*both)))
            elif change == "take_at":
                vector.take_at((drawn + start)[drawn + start < length])
            elif change == "add":
                vector.add(start, block)
            elif start + size <= length:
                vector.rounded(start, block)
            assert vector.largest(halves).tolist() == picked(vector, halves)


def picked(vector: Accumulator, parts: Sequence[Range]) -> list[int]:
    return [place for part in parts for place in by_hand(vector.values, part)]


def test_entries_that_were_chosen_elsewhere() -> None:
    vector = Accumulator(torch.tensor([1.0, 2.0, 3.0]))
    assert vector.take_at(torch.tensor([0, 2])).tolist() == [1.0, 3.0]
    assert vector.values.tolist() == [0.0, 2.0, 0.0]
    assert vector.taken().tolist() == [0, 2]
    assert vector.largest([Range(0, 3, 1)]).tolist() == [1]
    vector.restore()
    assert vector.values.tolist() == [1.0, 2.0, 3.0]


# 1 + 2^-9 is not of bfloat16, whose numbers are 2^-7 apart there.
FINE = 1 + 2.0**-9


def test_an_exact_wire_changes_nothing() -> None:
    vector = Accumulator(torch.tensor([FINE, 2.0]))
    assert vector.take([Range(0, 2, 1)], lambda *_: torch.tensor([0])).values.tolist() == [FINE]
    assert vector.values.tolist() == [0.0, 2.0]
    block = sparse([1], [FINE], 2)
    assert vector.rounded(0, block) is block
    vector.add_errors(torch.tensor([0, 1]))
    assert vector.values.tolist() == [0.0, 2.0]


def test_what_rounding_takes_stays_in_the_vector() -> None:
    vector = Accumulator(torch.tensor([FINE, -4.0, 2.0, -FINE]), wire=Wire("bfloat16"))
    taken = vector.take([Range(3, 4, 1), Range(0, 2, 1)], lambda *_: torch.tensor([3, 0]))
    assert (taken.indices.tolist(), taken.values.tolist()) == ([0, 1], [-1.0, 1.0])
    assert vector.values.tolist() == [2.0**-9, -4.0, 2.0, -(2.0**-9)]
    sent = vector.rounded(1, sparse([0, 1], [FINE, 1.0], 2), holders=2)
    assert (sent.indices.tolist(), sent.values.tolist(), sent.length) == ([0, 1], [1.0, 1.0], 2)
    assert vector.values.tolist() == [2.0**-9, -4.0 + 2.0**-10, 2.0, -(2.0**-9)]
    vector.restore()
    assert vector.values.tolist() == [FINE, -4.0, 2.0, -FINE]
    # Of those in the result only.
    vector.add_errors(torch.tensor([0, 1]))
    assert vector.values.tolist() == [FINE + 2.0**-9, -4.0 + 2.0**-10, 2.0, -FINE]


def test_wire_overflow_is_kept_but_infinity_is_not() -> None:
    vector = Accumulator(torch.tensor([1e6, -INFINITY, 1e-9, 1.0]), wire=Wire("float16"))
    taken = vector.take_at(torch.tensor([0, 1, 2]))
    assert taken.tolist() == [65504.0, -INFINITY, 0.0]
    assert vector.values.tolist() == [1e6 - 65504, 0.0, torch.tensor(1e-9).item(), 1.0]
    sent = vector.rounded(0, sparse([3], [INFINITY], 4))
    assert sent.values.tolist() == [INFINITY]
    assert vector.values.tolist()[3] == 1.0


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # Taken: 0 and 1; the result: 1 and 2. Each number's rest of rounding is 2^-9.
        (LocalResidual(), [0.0, 2.0**-9, FINE + 2.0**-9]),
        (PartialResidual(), [FINE, 2.0**-9, FINE + 2.0**-9]),
        (GlobalResidual(), [FINE, 2.0**-9, FINE + 2.0**-9]),
    ],
    ids=["LRES", "PRES", "GRES"],
)
def test_each_rule_keeps_the_errors_of_what_it_clears(rule: Residual, expected: list[float]) -> None:
    vector = Accumulator(torch.full((3,), FINE), wire=Wire("bfloat16"))
    vector.take_at(torch.tensor([0, 1]))
    vector.rounded(0, sparse([2], [FINE], 3))
    rule.keep(vector, torch.tensor([1, 2]))
    assert vector.values.tolist() == expected


@pytest.mark.parametrize("wire", [EXACT, Wire("bfloat16")], ids=str)
@pytest.mark.parametrize("path", PATHS)
@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=1, max_size=4), st.booleans())
def test_what_was_cut_out_and_is_settled_becomes_zero(
    wire: Wire, path: str, seed: int, cuts: list[bool], whole: bool
) -> None:
    """Whatever was cut out and added, in any order, some of it twice: as if all were undone, and then made zero."""
    source = torch.Generator().manual_seed(seed)
    first = torch.randn(40, generator=source)
    vector = Accumulator(first.clone(), wire=wire)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARDL_KERNELS", path)
        for cut_out in cuts:
            positions = torch.randperm(40, generator=source)[:12].sort().values
            if cut_out:
                vector.take([Range(0, 40, 0)], lambda accumulated, parts, positions=positions: positions)
            else:
                vector.add(0, SparseVector(positions, torch.randn(12, generator=source), 40))
        final = torch.randperm(40, generator=source)[:20].sort().values
        settled = vector.taken() if whole else vector.taken()[torch.isin(vector.taken(), final)]
        first[settled] = 0
        for positions, error in vector._errors:
            kept = torch.isin(positions, final)
            first[positions[kept]] += error[kept]
        vector.restore_unsettled(final, whole=whole)
        vector.add_errors(final)
    assert same_bits(vector.values, first)


def test_a_look_that_is_not_needed_is_not_taken() -> None:
    """After the first one, or after it was said what entries can be."""
    vector = Accumulator(torch.tensor([1.0, torch.inf]))
    vector.forget_overflows()
    assert vector.values.tolist() == [1.0, 0.0]
    assert vector.bound.value == 1
    bounded = Accumulator(torch.tensor([1.0, 3.0]), bound=Bound(2.0))
    bounded.settle(3.0)
    vector.values[1] = bounded.values[1] = 5
    for each in (vector, bounded):
        before = each.bound.value
        each.forget_overflows()
        assert each.bound.value == before
    assert bounded.bound.value == 3


@st.composite
def sparse_vectors(draw: st.DrawFn, length: int) -> SparseVector:
    indices = sorted(draw(st.sets(st.integers(0, max(0, length - 1)), max_size=length))) if length else []
    values = draw(st.lists(st.integers(-8, 8), min_size=len(indices), max_size=len(indices)))
    return SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=torch.float64), length)


def is_sorted(vector: SparseVector) -> bool:
    return bool((vector.indices[1:] > vector.indices[:-1]).all())


@given(st.data(), st.integers(0, 20), st.integers(1, 5))
def test_merge_adds_up(data: st.DataObject, length: int, count: int) -> None:
    vectors = [data.draw(sparse_vectors(length)) for _ in range(count)]
    merged = merge(vectors)
    assert is_sorted(merged)
    assert set(merged.indices.tolist()) == {index for vector in vectors for index in vector.indices.tolist()}
    assert torch.equal(merged.dense(), torch.stack([vector.dense() for vector in vectors]).sum(0))


def test_merge_adds_in_the_order_given() -> None:
    """Float additions do not commute over three terms: the order is part of the contract."""
    parts = [SparseVector(torch.tensor([0]), torch.tensor([value]), 1) for value in (1e8, -1e8, 1.0)]
    assert merge(parts).values.item() == 1.0
    assert merge([parts[2], parts[0], parts[1]]).values.item() == 0.0


@given(st.data(), st.integers(0, 20), st.integers(0, 25))
def test_top_splits_without_loss(data: st.DataObject, length: int, k: int) -> None:
    vector = data.draw(sparse_vectors(length))
    kept, dropped = vector.top(k)
    assert len(kept) == min(k, len(vector))
    assert same_bits(vector.largest(k), kept)
    assert is_sorted(kept)
    assert is_sorted(dropped)
    assert torch.equal(kept.dense() + dropped.dense(), vector.dense())
    if len(kept) and len(dropped):
        assert kept.values.abs().min() >= dropped.values.abs().max()


@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_concatenate_puts_blocks_end_to_end(data: st.DataObject, lengths: list[int]) -> None:
    blocks = [data.draw(sparse_vectors(length)) for length in lengths]
    whole = concatenate(blocks)
    assert is_sorted(whole)
    assert torch.equal(whole.dense(), torch.cat([block.dense() for block in blocks]))


def test_divided() -> None:
    vector = SparseVector(torch.tensor([1, 3]), torch.tensor([2.0, -6.0]), 5)
    assert same_bits(vector.divided(2), SparseVector(vector.indices, torch.tensor([1.0, -3.0]), 5))
