"""Packed codes, and messages of scales and codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.bits import WIDTHS, ScaledCodes, pack_codes, packed_bytes, unpack_codes


@given(st.sampled_from(WIDTHS), st.data())
def test_round_trip(bits: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    codes = torch.tensor(numbers, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype is torch.uint8
    assert packed.numel() == packed_bytes(len(numbers), bits) == (len(numbers) * bits + 7) // 8
    assert unpack_codes(packed, bits, len(numbers)).tolist() == numbers
    assert codes.tolist() == numbers


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (1, [1, 0, 1, 1], [0b1101]),
        (1, [1, 0, 1, 1, 0, 0, 0, 0, 1, 1], [0b1_00_11, 0b1_00_10]),
        (2, [1, 2, 3, 0, 3], [0b11_11_01, 0b00_10]),
        (4, [5, 15, 9], [0x95, 0x0F]),
        (8, [0, 255], [0, 255]),
    ],
)
def test_planes_by_hand(bits: int, codes: list[int], packed: list[int]) -> None:
    """With m bytes, byte i holds codes i, i + m, ..., the first in its lowest bits."""
    assert pack_codes(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == packed


def test_packing_leaves_its_argument_alone() -> None:
    codes = torch.tensor([7, 1], dtype=torch.uint8)
    pack_codes(codes, 8).zero_()
    assert codes.tolist() == [7, 1]


@given(st.integers(0, 5), st.integers(0, 33), st.sampled_from(WIDTHS), st.sampled_from([torch.float32, torch.float64]))
def test_a_message_reads_back_wherever_it_lies(scales: int, codes: int, bits: int, dtype: torch.dtype) -> None:
    form = ScaledCodes(scales, codes, bits)
    numbers, small = torch.randn(scales, dtype=dtype), torch.randint(2**bits, (codes,), dtype=torch.uint8)
    message = form.write(numbers, small)
    assert message.numel() == form.size(dtype) == scales * dtype.itemsize + packed_bytes(codes, bits)
    # Behind one byte of another message, the scales are not where their type wants them.
    cut = torch.cat((torch.zeros(1, dtype=torch.uint8), message, message))[1 : 1 + message.numel()]
    found = form.read(cut, dtype)
    assert torch.equal(found[0], numbers)
    assert torch.equal(found[1], small)
