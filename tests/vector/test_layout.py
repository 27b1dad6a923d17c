"""Layouts, and parts of them."""

from __future__ import annotations

import pytest

from spardl.vector.layout import Layout, Range, Ranges

WHOLE = Layout.of([(3, 4), (5,), (), (0,), (2, 3, 1)])


@pytest.mark.parametrize(
    ("start", "stop", "shapes"),
    [
        (0, 24, ((3, 4), (5,), (), (2, 3, 1))),
        (0, 12, ((3, 4),)),
        (2, 14, ((10, 1), (2,))),
        (15, 20, ((2,), (), (2, 1))),
        (7, 7, ()),
    ],
)
def test_a_part_keeps_the_kind_of_each_tensor(start: int, stop: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    part = WHOLE.part(start, stop)
    assert part.shapes == shapes
    assert part.length == stop - start
    assert part.part(0, 1).wholes in ((), (12,), (5,))


def test_a_piece_knows_how_large_its_tensor_is() -> None:
    assert WHOLE.wholes == (12, 5, 1, 0, 6)
    assert WHOLE.part(10, 15).part(1, 4).wholes == (12, 5)


def test_ranges_as_columns_are_the_same_ranges() -> None:
    parts = [Range(4, 9, 2), Range(9, 9, 0), Range(9, 12, 7), Range(0, 3, 1)]
    found = Ranges.of(parts)
    assert list(found) == parts
    assert (len(found), found[2], list(found[1:3])) == (4, parts[2], parts[1:3])
    assert Ranges.of(found) is found
    assert (found.length, found.wanted) == (11, 10)
    assert found.spans == [(4, 12), (0, 3)]
    assert list(found.sending) == [parts[0], Range(9, 12, 3), parts[3]]
    assert found.sending.sending is found.sending
    nothing = Ranges.of([])
    assert (list(nothing), nothing.length, nothing.spans) == ([], 0, [])
