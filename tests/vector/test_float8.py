"""8-bit floating point: compiled and portable code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector.levels import HIGHEST, in_blocks, pack_float8, read_float8
from tests.support.harness import same_bits

DTYPES = [torch.float32, torch.float64]


def drawn(dtype: torch.dtype) -> Tensor:
    """Entries of all magnitudes, all E4M3 numbers, and midpoints between adjacent ones."""
    source = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=source, dtype=torch.float64)
    values[:1000] *= torch.exp(20 * torch.randn(1000, generator=source, dtype=torch.float64))
    values[1000:1300], values[1300:1310] = 0, -0.0
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    exact = torch.cat((numbers, -numbers, (numbers[1:] + numbers[:-1]) / 2, -(numbers[1:] + numbers[:-1]) / 2))
    return torch.cat((exact, values)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "block"), [(0, 4), (1, 4), (506, 512), (1000, 1), (3506, 1000)])
def test_both_forms_have_the_same_bits(
    length: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, codes, decoded values, errors, and the sum of errors and decoded values."""
    pytest.importorskip("numba", reason="the compiled form needs numba")
    values, found = drawn(dtype)[:length], []
    for kernels in ("compiled", "portable"):
        monkeypatch.setenv("SPARDL_KERNELS", kernels)
        left = values.clone()
        scales, packed = pack_float8(left, block, leave=True)
        again, read = left.clone(), torch.empty_like(left)
        read_float8(scales, packed, block, again, add=True)
        read_float8(scales, packed, block, read)
        found.append((scales, packed, read, left, again))
        assert all(same_bits(*pair) for pair in zip(pack_float8(values, block), (scales, packed), strict=True))
    assert all(same_bits(first, second) for first, second in zip(*found, strict=True))
    assert same_bits(found[0][3], values - found[0][2])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=30), st.integers(1, 12))
def test_numbers_are_near(entries: list[float], block: int) -> None:
    values = torch.tensor(entries)
    scales, packed = pack_float8(values, block)
    assert torch.equal(scales, in_blocks(values.abs(), block).amax(1))
    read = torch.empty_like(values)
    read_float8(scales, packed, block, read)
    wide = scales.double().repeat_interleave(block)[: len(entries)]
    # Half of the last of four digits, or, near zero, half of the step there.
    limit = torch.maximum(values.double().abs() / 16, wide / HIGHEST * 2**-10)
    assert ((read.double() - values.double()).abs() <= limit * (1 + 1e-5) + 1e-44).all()
