"""How values travel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.vector.accumulator import Accumulator
from spardl.vector.packing import Slot, pack, unpack
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import EXACT, TYPES, Wire
from tests.support.harness import same_bits

SHORTER = ("bfloat16", "float16")
OWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("own", OWN)
def test_never_wider_than_in_memory(name: str, own: torch.dtype) -> None:
    chosen = Wire(name).dtype(own)
    assert chosen is own or chosen.itemsize < own.itemsize


def test_the_type_is_the_one_that_is_named() -> None:
    assert Wire("bfloat16").dtype(torch.float32) is torch.bfloat16
    assert Wire("float16").dtype(torch.float64) is torch.float16
    assert Wire("float32").dtype(torch.float64) is torch.float32
    assert Wire("float16").dtype(torch.bfloat16) is torch.bfloat16
    assert EXACT == Wire() == Wire("exact")
    assert EXACT.dtype(torch.float64) is torch.float64


@pytest.mark.parametrize("own", OWN)
def test_exact_values_are_not_touched(own: torch.dtype) -> None:
    values = torch.randn(9).to(own)
    assert EXACT.rounded(values) is values
    assert Wire("float32").rounded(values.float()).dtype is torch.float32


@pytest.mark.parametrize("name", SHORTER)
@given(numbers=st.lists(st.floats(width=32), max_size=40))
def test_rounded_is_what_the_receiver_sees(name: str, numbers: list[float]) -> None:
    wire, values = Wire(name), torch.tensor(numbers, dtype=torch.float32)
    before = values.clone()
    rounded = wire.rounded(values)
    assert rounded.dtype is torch.float32
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    slot, short = Slot(len(numbers), max(1, len(numbers))), wire.dtype(torch.float32)
    message = pack(SparseVector(torch.arange(len(numbers)), rounded, slot.length), slot, short)
    assert torch.equal(unpack(message, slot, short, torch.float32).values.nan_to_num(7.0), rounded.nan_to_num(7.0))
    # Rounding is done: a second time changes nothing.
    assert torch.equal(wire.rounded(rounded).nan_to_num(7.0), rounded.nan_to_num(7.0))


@pytest.mark.parametrize("name", SHORTER)
@given(numbers=st.lists(st.floats(-65504, 65504, width=32), max_size=40))
def test_what_rounding_takes_is_kept(name: str, numbers: list[float]) -> None:
    """Exactly: the rest of a rounding to the nearest fits into the longer type."""
    values = torch.tensor(numbers, dtype=torch.float32)
    rounded = Wire(name).rounded(values)
    rest = values - rounded
    assert torch.equal(rounded.double() + rest.double(), values.double())


@pytest.mark.parametrize(("name", "largest"), [("bfloat16", 2.0**127 * (2 - 2**-7)), ("float16", 65504.0)])
def test_large_values_are_cut_and_special_ones_pass(name: str, largest: float) -> None:
    infinity = float("inf")
    top = torch.finfo(torch.float32).max
    found = Wire(name).rounded(torch.tensor([top, -top, infinity, -infinity, -0.0]))
    assert found.tolist() == [largest, -largest, infinity, -infinity, 0.0]
    assert found[4].signbit()
    assert Wire(name).rounded(torch.tensor([float("nan")])).isnan().all()


def test_to_the_nearest_ties_to_even() -> None:
    step = 2.0**-7
    values = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2**-20, -(1 + step / 4)])
    assert Wire("bfloat16").rounded(values).tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]


@pytest.mark.parametrize("wrong", ["fp16", "", None, 16, ["exact"]])
def test_any_other_name_is_an_error_of_one_line(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Wire(wrong)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"wire.values must be one of exact, float32, bfloat16, float16, int8, int4, int2, got {wrong!r}"
    )


@given(numbers=st.lists(st.floats(width=32), max_size=40))
def test_cut_to_bfloat16_it_is_rounded_alike(numbers: list[float]) -> None:
    """The compiled kernel against portable operations: rounded values, errors and originals."""
    pytest.importorskip("numba")
    values, edges = torch.tensor(numbers, dtype=torch.float32), torch.tensor(EDGES, dtype=torch.int32)
    values = torch.cat((values, edges.view(torch.float32)))
    left, sent, stays = [], [], []
    for path in ("compiled", "portable"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPARDL_KERNELS", path)
            vector = Accumulator(values.clone(), wire=Wire("bfloat16"))
            sent.append(vector.take_at(torch.arange(len(values))))
            stays.append(vector.values.clone())
            vector.restore()
            left.append(vector.values)
    for one, other in (left, sent, stays):
        assert torch.equal(one.isnan(), other.isnan())
        assert same_bits(one[~one.isnan()], other[~one.isnan()])
    assert stays[0].isfinite().all()


# Ties, the largest and the least numbers, infinities and NaNs of all kinds.
EDGES = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, -0x800000, 0x7FFFFFFF]
EDGES += [0x7F800001, -1, 0, -(2**31), 1, 0x7FFF, 0x8000, 0x8001, -(2**31) + 0x8001]
