"""Sparse vectors as bytes, and back."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ProgramError
from spardl.vector.bits import low_bits
from spardl.vector.packing import Slot, index_bytes, message_bytes, message_words, pack, unpack, unpack_all
from spardl.vector.sparse import SparseVector, concatenate

WIRE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = st.sampled_from(WIRE)
PATHS = ("compiled", "portable")
# Also such that a code of indices has each number of whole bytes and a nibble or none.
LENGTHS = st.one_of(st.integers(1, 40), st.integers(41, 2**17), st.integers(2**17, 2**40))


def path(name: str) -> patch.dict[str]:
    """Chooses kernels or torch while it lasts."""
    return patch.dict(os.environ, {"SPARDL_KERNELS": name})


@st.composite
def loaded(draw: st.DrawFn, dtype: torch.dtype, lengths: st.SearchStrategy[int] = LENGTHS) -> tuple[SparseVector, Slot]:
    """A vector of values of a type, special ones among them, and a slot that it fits into."""
    length = draw(lengths)
    dense = length <= 300 and draw(st.booleans())
    places = st.integers(0, length - 1)
    indices = list(range(length)) if dense else sorted(draw(st.sets(places, max_size=80)))
    spare = draw(st.integers(0, min(20, length - len(indices))))
    numbers = st.floats(width=16) | st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    values = draw(st.lists(numbers, min_size=len(indices), max_size=len(indices)))
    vector = SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=dtype), length)
    return vector, Slot(len(indices) + spare, length, draw(st.sampled_from([1, 4])))


def assert_same(one: SparseVector, other: SparseVector) -> None:
    """To the last bit, NaN included."""
    assert one.length == other.length
    assert torch.equal(one.indices, other.indices)
    assert one.values.dtype is other.values.dtype
    assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))


@pytest.mark.parametrize("name", PATHS)
@given(st.data(), DTYPES, st.integers(0, 9))
def test_round_trip_at_any_offset(name: str, data: st.DataObject, dtype: torch.dtype, offset: int) -> None:
    """Also where a message is cut out of a longer one at an odd byte, and with unused capacity."""
    vector, slot = data.draw(loaded(dtype))
    with path(name):
        message = pack(vector, slot, dtype)
        assert message.dtype is torch.uint8
        assert message.numel() == message_bytes(slot, dtype)
        shifted = torch.cat((torch.zeros(offset, dtype=torch.uint8), message))[offset:]
        assert_same(unpack(shifted, slot, dtype, dtype), vector)


@pytest.mark.parametrize("name", PATHS)
@given(st.data(), st.integers(0, 9))
def test_a_buffer_is_written_and_no_byte_outside_it(name: str, data: st.DataObject, offset: int) -> None:
    vector, slot = data.draw(loaded(torch.bfloat16))
    with path(name):
        message = pack(vector, slot, torch.bfloat16)
        buffer = torch.full((offset + message.numel() + 9,), 0xAB, dtype=torch.uint8)
        part = buffer[offset : offset + message.numel()]
        written = pack(vector, slot, torch.bfloat16, out=part)
    assert written.data_ptr() == part.data_ptr()
    assert torch.equal(part, message)
    assert (buffer[:offset] == 0xAB).all()
    assert (buffer[offset + message.numel() :] == 0xAB).all()


@pytest.mark.parametrize("name", PATHS)
@given(st.data(), DTYPES, st.integers(1, 5))
def test_messages_end_to_end_are_one_vector(name: str, data: st.DataObject, dtype: torch.dtype, count: int) -> None:
    loads = [data.draw(loaded(dtype, st.integers(1, 5000))) for _ in range(count)]
    with path(name):
        messages = torch.cat([pack(vector, slot, dtype) for vector, slot in loads])
        found = unpack_all(messages, [slot for _, slot in loads], dtype, dtype)
    assert_same(found, concatenate([vector for vector, _ in loads]))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("wire", "own"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_values_are_rounded_to_the_type_on_the_wire(name: str, wire: torch.dtype, own: torch.dtype) -> None:
    vector = SparseVector(torch.arange(0, 300, 3), torch.randn(100, dtype=own), 300)
    with path(name):
        found = unpack(pack(vector, Slot(110, 300), wire), Slot(110, 300), wire, own)
    assert_same(found, SparseVector(vector.indices, vector.values.to(wire).to(own), 300))


@pytest.mark.parametrize("name", PATHS)
def test_what_is_read_is_in_memory_of_its_own(name: str) -> None:
    """Buffers of messages are used again."""
    vector = SparseVector(torch.tensor([1, 4]), torch.tensor([1.0, 2.0]), 5)
    with path(name):
        message = pack(vector, Slot(2, 5), torch.float32)
        found = unpack(message, Slot(2, 5), torch.float32, torch.float32)
    message.zero_()
    assert_same(found, vector)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("length", [1, 7, 2**31 + 5, 2**40])
def test_nothing_one_and_the_last(name: str, length: int) -> None:
    empty = SparseVector(torch.empty(0, dtype=torch.int64), torch.empty(0), length)
    last = SparseVector(torch.tensor([length - 1]), torch.tensor([-0.0]), length)
    with path(name):
        assert pack(empty, Slot(0, length), torch.float32).numel() == 0
        for vector, capacity in ((empty, 0), (empty, 1), (last, 1)):
            message = pack(vector, Slot(capacity, length), torch.float32)
            assert_same(unpack(message, Slot(capacity, length), torch.float32, torch.float32), vector)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("chunks", [1, 5])
@given(data=st.data())
def test_an_index_of_64_among_4096_takes_8_bits(name: str, chunks: int, data: st.DataObject) -> None:
    """Whatever the indices are; 9 bits with whole nibbles."""
    slot = Slot(64 * chunks, 4096 * chunks, step=1)
    assert index_bytes(slot) == 64 * chunks
    assert index_bytes(slot._replace(step=4)) == 72 * chunks
    places = st.sets(st.integers(0, slot.length - 1), min_size=slot.capacity, max_size=slot.capacity)
    indices = torch.tensor(sorted(data.draw(places)), dtype=torch.int64)
    vector = SparseVector(indices, torch.arange(slot.capacity).float(), slot.length)
    with path(name):
        message = pack(vector, slot, torch.float32)
        assert message.numel() == (4 + 1) * slot.capacity
        assert_same(unpack(message, slot, torch.float32, torch.float32), vector)


@pytest.mark.parametrize(
    ("density", "float32", "bfloat16"), [(0.1, 4.71, 2.71), (0.01, 5.18, 3.18), (0.001, 5.62, 3.62), (1e-4, 5.95, 3.95)]
)
def test_bytes_per_entry(density: float, float32: float, bfloat16: float) -> None:
    for length in (14_700_000, 3_675_000, 133_000_000):
        slot = Slot(int(density * length), length)
        assert message_bytes(slot, torch.float32) / slot.capacity <= float32
        assert message_bytes(slot, torch.bfloat16) / slot.capacity <= bfloat16


@given(st.integers(1, 2**30), st.integers(0, 2**40))
def test_low_bits_make_the_smallest_message(capacity: int, more: int) -> None:
    length = capacity + more
    low = low_bits(capacity, length, 4)
    assert low % 4 == 0
    chosen = low_bits(capacity, length, 1)

    def bits(chosen: int) -> int:
        return capacity * (chosen + 1) + (length >> chosen)

    assert all(bits(low) <= bits(other) for other in range(0, 48, 4))
    # Against every other number of bits, for float32 values: the nibble costs little.
    least = min(bits(other) for other in range(48))
    assert bits(chosen) == least
    assert 32 * capacity + bits(low) <= 1.04 * (32 * capacity + least)


def test_sizes() -> None:
    assert message_words(Slot(3, 100)) == 6
    # 3 values, a nibble of each index and a bitmap of 3 + 100 // 16 bits, filled up to whole values.
    assert message_bytes(Slot(3, 100), torch.float64) == 24 + 8
    assert message_bytes(Slot(3, 100), torch.float32) == 12 + 4
    assert message_bytes(Slot(3, 100), torch.bfloat16) == 6 + 4
    assert message_bytes(Slot(0, 100), torch.float32) == 0


@pytest.mark.parametrize("name", PATHS)
def test_what_does_not_fit_is_an_error(name: str) -> None:
    vector = SparseVector(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), 4)
    with path(name):
        with pytest.raises(ProgramError, match="message slot holds at most 1 entries, got 2"):
            pack(vector, Slot(1, 4), torch.float32)
        message = pack(vector, Slot(2, 4), torch.float32)
        with pytest.raises(ProgramError, match=f"{message.numel() - 4} bytes, fewer"):
            unpack_all(message[:-4], [Slot(2, 4)], torch.float32, torch.float32)


def garble(change: Callable[[Tensor], object], data: st.DataObject) -> tuple[Tensor, Slot]:
    vector, slot = data.draw(loaded(torch.float32))
    message = pack(vector, slot, torch.float32)
    change(message[4 * slot.capacity :])
    return message, slot


@pytest.mark.parametrize("name", PATHS)
@given(st.data(), st.integers(0, 255))
def test_damage_leads_to_no_wrong_access(name: str, data: st.DataObject, byte: int) -> None:
    """Any bits, too many or too few, decode to at most as many entries as fit the capacity."""
    message, slot = garble(lambda code: code.fill_(byte), data)
    with path(name):
        found = unpack(message, slot, torch.float32, torch.float32)
    assert len(found) <= slot.capacity
    assert found.values.shape == found.indices.shape
