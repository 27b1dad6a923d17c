"""The compiled codec and merging, compared with their portable versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.packing import Slot, pack, unpack_all
from spardl.vector.sparse import SparseVector, merge
from tests.vector.test_packing import WIRE, assert_same, loaded, path

pytest.importorskip("numba")


@pytest.mark.parametrize("dtype", WIRE)
@given(data=st.data())
def test_same_bytes_and_vectors_as_in_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    loads = data.draw(st.lists(loaded(dtype), min_size=1, max_size=3))
    slots = [slot for _, slot in loads]
    with path("compiled"):
        messages = torch.cat([pack(vector, slot, dtype) for vector, slot in loads])
        found = unpack_all(messages, slots, dtype, torch.float64)
    with path("portable"):
        assert torch.equal(torch.cat([pack(vector, slot, dtype) for vector, slot in loads]), messages)
        assert_same(unpack_all(messages, slots, dtype, torch.float64), found)


@pytest.mark.parametrize("density", [0.9, 0.1, 0.01, 0.001, 0.0001])
@pytest.mark.parametrize("missing", [0, 1, 700])
def test_many_entries(density: float, missing: int) -> None:
    """Whole words of the bitmap, words that are empty, and entries that are missing at the end."""
    length = 1_000_003
    indices = (torch.rand(length, generator=torch.Generator().manual_seed(1)) < density).nonzero().squeeze(1)
    slot = Slot(indices.numel() + missing, length)
    vector = SparseVector(indices, torch.arange(indices.numel(), dtype=torch.float32), length)
    with path("compiled"):
        message = pack(vector, slot, torch.float32)
        assert_same(unpack_all(message, [slot], torch.float32, torch.float32), vector)
    with path("portable"):
        assert torch.equal(pack(vector, slot, torch.float32), message)


merging = pytest.importorskip("spardl.vector.kernels.entries")

SPECIAL = st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e8, -1e8])


@st.composite
def vectors(draw: st.DrawFn, dtype: torch.dtype) -> list[SparseVector]:
    """Some of one length, crowded or far apart."""
    length = draw(st.integers(1, 30) | st.integers(31, 20_000) | st.integers(2**33, 2**40))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        indices = sorted(draw(st.sets(st.integers(0, length - 1), max_size=20)))
        values = draw(st.lists(SPECIAL | st.floats(-3, 3), min_size=len(indices), max_size=len(indices)))
        found.append(SparseVector(torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=dtype), length))
    return found


def assert_same_of_merging(one: SparseVector, other: SparseVector) -> None:
    """To the last bit; any NaN is like any other."""
    assert one.length == other.length
    assert torch.equal(one.indices, other.indices)
    assert one.values.dtype is other.values.dtype
    assert torch.equal(one.values.isnan(), other.values.isnan())
    numbers = ~one.values.isnan()
    assert torch.equal(one.values[numbers].view(torch.uint8), other.values[numbers].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(data=st.data())
def test_same_bits_as_in_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    chosen = data.draw(vectors(dtype))
    with path("compiled"):
        found = merge(chosen)
    with path("portable"):
        assert_same_of_merging(found, merge(chosen))


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("density", [0.5, 0.02, 0.0005])
def test_merging_many_entries(count: int, density: float) -> None:
    """Whole windows, and windows that only some vectors have entries in."""
    source, length = torch.Generator().manual_seed(1), 200_001
    chosen = []
    for _ in range(count):
        indices = (torch.rand(length, generator=source) < density).nonzero().squeeze(1)
        chosen.append(SparseVector(indices, torch.randn(indices.numel(), generator=source), length))
    with path("compiled"):
        found = merge(chosen)
    with path("portable"):
        assert_same_of_merging(found, merge(chosen))


@pytest.mark.parametrize("name", ["compiled", "portable"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_is_never_negative_zero(name: str, count: int) -> None:
    """In one vector, in all, and behind the end of the others."""
    chosen = [SparseVector(torch.arange(i + 1), torch.full((i + 1,), -0.0), 3) for i in range(count)]
    with path(name):
        for order in (chosen, chosen[::-1]):
            merged = merge(order)
            assert len(merged) == count
            assert not merged.values.signbit().any()


def test_what_is_merged_stays_what_it_is() -> None:
    one, other = (SparseVector(torch.tensor([0, 3]), torch.tensor([1.0, value]), 9) for value in (2.0, 5.0))
    for chosen in ([one], [one, other], [one, other, one]):
        merged = merge(chosen)
        merged.values.zero_()
        merged.indices.zero_()
    assert one.values.tolist() == [1.0, 2.0]
    assert one.indices.tolist() == [0, 3]


@pytest.mark.parametrize("indices", [[5, 3, 9000, 1], [-7, 2, 4, 6], [2**62, 1, 2**63 - 1, 0]])
def test_indices_out_of_order_lead_to_no_wrong_access(indices: list[int]) -> None:
    """Invalid input gives arbitrary output, but terminates and stays within the output arrays."""
    wild, values = np.array(indices), np.ones(4, np.float32)
    out = np.full(8, -1), np.full(8, -1, np.float32)
    assert merging.add_two(wild, values, wild[::-1].copy(), values, *out) <= 8
    assert merging.add_all(np.concatenate((wild, wild)), np.ones(8, np.float32), np.array([4, 8]), *out) <= 8
