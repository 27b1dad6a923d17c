"""Quantization levels: compiled and portable code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector.bits import unpack_codes
from spardl.vector.levels import highest, in_blocks, pack_levels, read_levels
from tests.support.harness import same_bits

DTYPES = [torch.float32, torch.float64]
BITS = [2, 4, 8]


def read(scales: Tensor, packed: Tensor, block: int, bits: int, count: int) -> Tensor:
    values = torch.empty(count, dtype=scales.dtype)
    read_levels(scales, packed, block, bits, values)
    return values


def drawn(length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, a third of them zeros."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(dtype)
    values[: length // 3] = 0
    values[length // 2 :: 7] *= 1e30
    values[length // 2 :: 11] = 5e-324 if dtype is torch.float64 else 1e-45
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("length", "block"), [(0, 4), (1, 4), (1000, 1), (1001, 64), (4096, 256), (300, 1000)])
def test_both_forms_have_the_same_bits(
    length: int, block: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, codes, decoded values, errors, and the sum of errors and decoded values."""
    pytest.importorskip("numba", reason="the compiled form needs numba")
    values, found = drawn(length, dtype), []
    for kernels in ("compiled", "portable"):
        monkeypatch.setenv("SPARDL_KERNELS", kernels)
        left = values.clone()
        scales, packed = pack_levels(left, block, bits, leave=True)
        again = left.clone()
        read_levels(scales, packed, block, bits, again, add=True)
        found.append((scales, packed, read(scales, packed, block, bits, length), left, again))
        assert all(same_bits(*pair) for pair in zip(pack_levels(values, block, bits), (scales, packed), strict=True))
    assert all(same_bits(first, second) for first, second in zip(*found, strict=True))
    assert same_bits(found[0][3], values - found[0][2])


@given(
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30),
    bits=st.sampled_from(BITS),
    block=st.integers(1, 12),
)
def test_levels_are_the_nearest(numbers: list[float], bits: int, block: int) -> None:
    values, top = torch.tensor(numbers), highest(bits)
    scales, packed = pack_levels(values, block, bits)
    assert torch.equal(scales, in_blocks(values.abs(), block).amax(1))
    assert (unpack_codes(packed, bits, len(numbers)) <= 2 * top).all()
    error = (read(scales, packed, block, bits, len(numbers)).double() - values.double()).abs()
    # Half a level, and what the type rounds off.
    assert (error <= scales.double().repeat_interleave(block)[: len(numbers)] * (0.5 / top + 1e-6) + 1e-44).all()


def test_levels_can_be_rounded_otherwise() -> None:
    values = torch.tensor([1.0, 0.4, -0.4, -1.0])
    _, packed = pack_levels(values, 4, 4, torch.floor)
    assert unpack_codes(packed, 4, 4).tolist() == [14, 9, 4, 0]
