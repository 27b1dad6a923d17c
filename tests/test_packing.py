"""Sparse blocks as bytes, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.packing import Slot, message_bytes, message_words, pack, unpack
from spardl.sparse import SparseVector
from tests.harness import same_bits
from tests.test_sparse import sparse_vectors

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=4), DTYPES, st.integers(0, 7))
def test_round_trip_at_any_offset(data: st.DataObject, lengths: list[int], dtype: torch.dtype, offset: int) -> None:
    """Also where a message is cut out of a longer one at an odd byte, and with room to spare."""
    blocks, slots = [], []
    for length in lengths:
        block = data.draw(sparse_vectors(length))
        blocks.append(SparseVector(block.indices, block.values.to(dtype), length))
        slots.append(Slot(data.draw(st.integers(len(block), length)), length))
    message = pack(blocks, slots, dtype)
    assert message.dtype is torch.uint8
    assert message.numel() == message_bytes(slots, dtype)
    shifted = torch.cat((torch.zeros(offset, dtype=torch.uint8), message))[offset:]
    found = unpack(shifted, slots, dtype)
    assert all(same_bits(one, other) for one, other in zip(found, blocks, strict=True))
    assert [vector.length for vector in found] == lengths


def test_sizes() -> None:
    slots = [Slot(3, 100), Slot(2, 50)]
    assert message_words(slots) == 10
    assert message_bytes(slots, torch.float32) == 5 * (4 + 4)
    assert message_bytes(slots, torch.float64) == 5 * (4 + 8)


def test_indices_beyond_int32_are_not_cut() -> None:
    length = 2**31 + 5
    block = SparseVector(torch.tensor([1, 2**31 + 3]), torch.tensor([1.0, 2.0]), length)
    slot = Slot(3, length)
    message = pack([block], [slot], torch.float32)
    assert message.numel() == 3 * (8 + 4)
    assert same_bits(unpack(message, [slot], torch.float32)[0], block)


def test_too_many_entries_are_an_error() -> None:
    block = SparseVector(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), 4)
    with pytest.raises(RuntimeError):
        pack([block], [Slot(1, 4)], torch.float32)
