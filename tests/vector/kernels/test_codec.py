"""The code of indices, compiled: the same bytes and vectors as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.vector.packing import Slot, pack, unpack_all
from spardl.vector.sparse import SparseVector
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
