"""Set operations on increasing positions: compiled and portable code agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.sparse import increasing, split, within

PATHS = ("compiled", "portable")
SOME = st.sets(st.integers(0, 40), max_size=30).map(sorted)
T = TypeVar("T")


def on_both_paths(work: Callable[[], T]) -> list[T]:
    found = []
    for path in PATHS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARDL_KERNELS", path)
            found.append(work())
    return found


def positions(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@given(SOME, SOME, st.integers(0, 40))
def test_within_others_even_around_the_end(own: list[int], others: list[int], turn: int) -> None:
    """Of blocks that go on at the beginning, positions fall once."""
    turned = own[turn:] + own[:turn]
    expected = [place for place, position in enumerate(turned) if position in others]
    for found in on_both_paths(lambda: within(positions(turned), positions(others))):
        assert (found.dtype, found.tolist()) == (torch.int64, expected)


@pytest.mark.parametrize("share", [1e-5, 0.01, 1.0])
def test_within_others_of_a_long_vector(share: float) -> None:
    """More than 255 windows, after which marks restart; the first run ends in the window where the second starts."""
    length, source = 300 << 15, torch.Generator().manual_seed(0)
    own, others = (torch.randint(length, (int(share * 1e6),), generator=source).unique() for _ in range(2))
    turned = torch.cat((own[own.numel() // 3 :], own[: own.numel() // 3]))
    expected = torch.isin(turned, others).nonzero().squeeze(1)
    for found in on_both_paths(lambda: within(turned, others)):
        assert torch.equal(found, expected)
    assert all(torch.equal(found, torch.arange(turned.numel())) for found in on_both_paths(lambda: within(turned, own)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@given(st.integers(0, 41), SOME)
def test_split_in_two(dtype: torch.dtype, length: int, places: list[int]) -> None:
    tensor, places = torch.arange(length).to(dtype), [place for place in places if place < length]
    others = [place for place in range(length) if place not in places]
    for chosen, rest in on_both_paths(lambda: split(tensor, positions(places))):
        assert chosen.dtype is rest.dtype is dtype
        assert (chosen.tolist(), rest.tolist()) == (places, others)


def test_increasing() -> None:
    assert all(increasing(positions(numbers)) for numbers in ([], [3], [0, 1, 7]))
    assert not any(increasing(positions(numbers)) for numbers in ([1, 1], [0, 7, 1], [7, 0, 1]))
