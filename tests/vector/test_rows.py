"""The largest entries of many short ranges at once: the same as range by range."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector import rows
from spardl.vector.layout import Range, Ranges
from spardl.vector.rows import in_rows, largest_of_rows, runs_of
from spardl.vector.selection import ListingRanges, PortableFinder
from tests.vector.test_selection import DTYPES, exact, vectors


def adjoining(start: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    borders = np.cumsum([start, *lengths])
    return borders[:-1], borders[1:]


def test_which_ranges_are_rows() -> None:
    starts, stops = adjoining(5, [3, *[4] * 8, 3, *[4] * 7, *[0] * 9])
    assert [slice_.stop - slice_.start for slice_ in runs_of(starts, stops)] == [1, 8, *[1] * 17]
    assert in_rows(starts, stops).tolist() == [False, *[True] * 8, *[False] * 17]
    assert runs_of(starts[:0], stops[:0]) == []
    # A gap parts them, and so does another length; long ones are no rows.
    starts, stops = np.arange(0, 200, 10), np.arange(0, 200, 10) + 9
    assert not in_rows(starts, stops).any()
    starts, stops = adjoining(0, [(1 << 14) + 1] * 8)
    assert not in_rows(starts, stops).any()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=6))
def test_runs_are_all_ranges_in_order(groups: list[tuple[int, int, bool]]) -> None:
    starts, stops, at = [], [], 0
    for length, count, gap in groups:
        at += gap
        for _ in range(count):
            starts.append(at)
            at += length
            stops.append(at)
    found = runs_of(np.array(starts, np.int64), np.array(stops, np.int64))
    assert [place for run in found for place in range(run.start, run.stop)] == list(range(len(starts)))
    for run in found:
        lengths = {stops[place] - starts[place] for place in range(run.start, run.stop)}
        if run.stop - run.start > 1:
            assert len(lengths) == 1
            assert all(stops[one] == starts[other] for one, other in pairwise(range(run.start, run.stop)))


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Tensor, list[Range]]:
    """Rows of a vector, which may begin before them and go on behind."""
    count, length = draw(st.integers(8, 20)), draw(st.integers(1, 12))
    before, behind = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    values = draw(vectors(dtype, before + count * length + behind, infinite=True))
    starts = [before + row * length for row in range(count)]
    return values, [Range(start, start + length, draw(st.integers(0, length))) for start in starts]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["cpu", "as on cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_same_as_range_by_range(dtype: torch.dtype, elsewhere: bool, data: st.DataObject) -> None:
    values, parts = data.draw(matrices(dtype))
    before = values.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spardl.vector.rows._BLOCK", data.draw(st.sampled_from([7, 40, 1 << 17])))
        if elsewhere:
            patch.setattr(rows, "least_of_rows", rows._least_of_rows)
        positions, cuts = largest_of_rows(values, Ranges.of(parts))
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))
    assert positions.dtype is torch.int64
    assert positions.tolist() == exact(values, parts)
    assert cuts.dtype is dtype
    for (start, stop, k), cut in zip(parts, cuts.tolist(), strict=True):
        largest_first = sorted(values[start:stop].abs().tolist(), reverse=True)
        assert cut == (largest_first[k - 1] if 0 < k < stop - start else 0)


def test_a_finder_lists_nothing_of_rows_and_finds_their_largest() -> None:
    """Between ranges that it does list, with a gradient to add, and after entries were changed."""
    source = torch.Generator().manual_seed(1)
    values, gradient = torch.randn(200, generator=source), torch.randn(200, generator=source)
    total = values + gradient
    starts, stops = adjoining(0, [20, *[16] * 10, 20])
    finder = PortableFinder()
    bounds = torch.full((12,), 1.5)
    counts = finder.add(values, gradient, ListingRanges(starts, stops, bounds, np.full(12, 64)), clear=True)
    reached = [int((total[start:stop].abs() >= 1.5).sum()) for start, stop in zip(starts, stops, strict=True)]
    assert counts.tolist() == [reached[0], *[-1] * 10, reached[-1]]
    assert torch.equal(values, total)
    assert not gradient.any()
    values[100] = 9.0
    parts = [
        Range(int(start), int(stop), 1 + place % 2)
        for place, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]
    found = finder.largest(values, parts, [torch.tensor([100])])
    assert 100 in found.positions.tolist()
    assert found.positions.tolist() == exact(values, parts)
    assert found.looked.tolist() == [reached[0], *[-1] * 10, reached[-1]]
