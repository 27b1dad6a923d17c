"""Values of few bits: levels, 8-bit floats, rounding and packed bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError, ProgramError
from spardl.communicators import AllGather, OkTopk, TopkDSA
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, PartialResidual
from spardl.vector.bits import WIDTHS, ScaledCodes, pack_codes, packed_bytes, unpack_codes
from spardl.vector.levels import (
    HIGHEST,
    highest,
    in_blocks,
    pack_float8,
    pack_levels,
    read_float8,
    read_levels,
    round_stochastically,
)
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, concatenate
from spardl.vector.wire import CHUNK, COARSE, Coarse, CoarseValues, Wire
from tests.support.harness import same_bits

OWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = (8, 4, 2)


def drawn(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Heavy tails, as what a top-k leaves."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=source, dtype=torch.float64)
    return (values.sign() * (1 + values.abs() ** 3)).to(dtype)


def there_and_back(form: Coarse, vector: SparseVector, slot: Slot) -> SparseVector:
    message = form.pack(vector, slot)
    assert (message.dtype, message.numel()) == (torch.uint8, form.size(slot))
    return form.open(message, [slot])


def sparse(values: Tensor, length: int, seed: int = 0) -> SparseVector:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return SparseVector(order[: values.numel()].sort().values, values, length)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", OWN, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, CHUNK, CHUNK + 1, 1000])
def test_what_arrives_is_what_was_rounded(count: int, dtype: torch.dtype, bits: int) -> None:
    form, length = Coarse(dtype, CoarseValues(bits)), 5 * count + 9
    vector = sparse(CoarseValues(bits).rounded(drawn(count, dtype)), length)
    for capacity in (count, count + 3, count + 2 * CHUNK):
        assert same_bits(there_and_back(form, vector, Slot(capacity, length)), vector)


@pytest.mark.parametrize("bits", BITS)
def test_messages_end_to_end(bits: int) -> None:
    form = Coarse(torch.float32, CoarseValues(bits))
    blocks = [sparse(CoarseValues(bits).rounded(drawn(n, seed=n)), 1000 + n, seed=n) for n in (0, 3, 300, 256)]
    slots = [Slot(len(block) + extra, block.length) for extra, block in enumerate(blocks)]
    messages = torch.cat([form.pack(block, slot) for block, slot in zip(blocks, slots, strict=True)])
    assert same_bits(form.open(messages, slots), concatenate(blocks))
    for missing in (1, 40, messages.numel() // 2, messages.numel()):
        with pytest.raises(ProgramError, match="bytes, fewer than their slots require"):
            form.open(messages[: messages.numel() - missing], slots)
    with pytest.raises(ProgramError, match="message slot holds at most 299 entries, got 300"):
        form.pack(blocks[2], Slot(299, blocks[2].length))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30))
def test_rounding_is_done_once_and_to_the_nearest(dtype: torch.dtype, bits: int, numbers: list[float]) -> None:
    values, coarse = torch.tensor(numbers, dtype=dtype), CoarseValues(bits)
    before = values.clone()
    rounded = coarse.rounded(values)
    assert same_bits(values, before)
    assert same_bits(coarse.rounded(rounded), rounded)
    if numbers:
        low, high = values.abs().aminmax()
        assert {float(low), float(high)} <= set(rounded.abs().tolist())
        step = (high.double() - low.double()) / (2 ** (bits - 1) - 1)
        error = (rounded.double() - values.double()).abs()
        assert (error <= step / 2 * (1 + 1e-6) + high.double() * 1e-6 + 1e-44).all()
        assert torch.equal(rounded.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", OWN, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_limits_that_are_next_to_each_other(dtype: torch.dtype, bits: int) -> None:
    """Where steps are finer than the type, as they are of a chunk with nearly equal values."""
    # The border where the type gets coarser is among them.
    values = [torch.tensor(1.0, dtype=dtype)]
    for _ in range(20):
        values.insert(0, torch.nextafter(values[0], torch.tensor(0.0, dtype=dtype)))
    for _ in range(20):
        values.append(torch.nextafter(values[-1], torch.tensor(2.0, dtype=dtype)))
    for count in range(1, 41):
        near = torch.stack(values[: count + 1])
        rounded = CoarseValues(bits).rounded(near)
        assert same_bits(CoarseValues(bits).rounded(rounded), rounded)


def test_none_of_what_was_selected_becomes_zero() -> None:
    values = drawn(1000)
    assert (CoarseValues(2).rounded(values) != 0).all()
    assert CoarseValues(4).rounded(torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.25), (2, 0.8)])
def test_more_bits_are_nearer(bits: int, error: float) -> None:
    values = drawn(10_000)
    lost = (CoarseValues(bits).rounded(values) - values).norm() / values.norm()
    assert error / 4 < lost < error


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_in_its_chunk_only(bits: int, bad: float) -> None:
    values = drawn(2 * CHUNK)
    values[3] = bad
    form, length = Coarse(torch.float32, CoarseValues(bits)), 4 * CHUNK
    for found in (
        CoarseValues(bits).rounded(values),
        there_and_back(form, sparse(values, length), Slot(600, length)).values,
    ):
        assert found[:CHUNK].isnan().all()
        assert found[CHUNK:].isfinite().all()


@pytest.mark.parametrize(("name", "most"), [("int8", 2.3), ("int4", 1.8), ("int2", 1.5)])
def test_bytes_of_an_entry_at_one_percent(name: str, most: float) -> None:
    size = Wire(name).form(torch.float32).size(Slot(14_700, 1_470_000))
    assert most - 0.15 < size / 14_700 <= most


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("communicator", [OkTopk(), TopkDSA()], ids=["oktopk", "topkdsa"])
def test_who_cuts_up_what_it_rounds_says_so(name: str, communicator: OkTopk | TopkDSA) -> None:
    rule = PartialResidual() if isinstance(communicator, OkTopk) else LocalResidual()
    with pytest.raises(
        ConfigError,
        match=f"wire.values={name} needs a communicator that sends rounded entries whole.* use wire.values=",
    ):
        Method(TopK(0.1), communicator, rule, wire=Wire(name))
    assert Method(TopK(0.1), AllGather(), LocalResidual(), wire=Wire(name)).wire.coarse


DTYPES = [torch.float32, torch.float64]
LEVELS_BITS = [2, 4, 8]


def read(scales: Tensor, packed: Tensor, block: int, bits: int, count: int) -> Tensor:
    values = torch.empty(count, dtype=scales.dtype)
    read_levels(scales, packed, block, bits, values)
    return values


def drawn_of_levels(length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, a third of them zeros."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(dtype)
    values[: length // 3] = 0
    values[length // 2 :: 7] *= 1e30
    values[length // 2 :: 11] = 5e-324 if dtype is torch.float64 else 1e-45
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", LEVELS_BITS)
@pytest.mark.parametrize(("length", "block"), [(0, 4), (1, 4), (1000, 1), (1001, 64), (4096, 256), (300, 1000)])
def test_both_forms_have_the_same_bits(
    length: int, block: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, codes, decoded values, errors, and the sum of errors and decoded values."""
    pytest.importorskip("numba", reason="the compiled form needs numba")
    values, found = drawn_of_levels(length, dtype), []
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
    bits=st.sampled_from(LEVELS_BITS),
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


def drawn_of_float8(dtype: torch.dtype) -> Tensor:
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
def test_float8_both_forms_have_the_same_bits(
    length: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales, codes, decoded values, errors, and the sum of errors and decoded values."""
    pytest.importorskip("numba", reason="the compiled form needs numba")
    values, found = drawn_of_float8(dtype)[:length], []
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_draws_together_make_the_value(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every draw from {0, 1/64, ..., 63/64} once, the mean of the results is the value, exactly."""
    values = torch.arange(-7 * 64, 7 * 64 + 1, dtype=dtype) / 64
    results = []
    for number in range(64):
        monkeypatch.setattr(
            torch, "rand", lambda shape, number=number, **kind: torch.full(shape, number / 64, dtype=dtype)
        )
        results.append(round_stochastically(values.clone(), torch.Generator()))
    assert torch.equal(torch.stack(results).mean(0), values)


@given(st.lists(st.floats(-127, 127, width=32), max_size=20), st.integers(0, 1000))
def test_a_neighbouring_whole_number(numbers: list[float], seed: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = round_stochastically(values.clone(), torch.Generator().manual_seed(seed))
    assert bool(((found == values.floor()) | (found == values.ceil())).all())


def test_zeros_and_levels_stay() -> None:
    """Not even the largest draw lifts an integer, however large."""
    values = torch.cat((torch.tensor([0.0, -0.0, 1.0, -1.0, -127.0]).repeat(10_000), torch.full((3_000_000,), 127.0)))
    assert torch.equal(round_stochastically(values.clone(), torch.Generator().manual_seed(0)), values)


def test_small_chances_are_chances() -> None:
    """2^-20 of 2^22 entries, next to a whole part that has no room for it in float32 and a draw."""
    values = torch.full((1 << 22,), 2.0**-20)
    lifted = int(round_stochastically(values, torch.Generator().manual_seed(1)).sum())
    assert 0 < lifted < 20


def test_the_draws_are_the_generators() -> None:
    values = torch.rand(1000)

    def rounded(seed: int) -> Tensor:
        return round_stochastically(values.clone(), torch.Generator().manual_seed(seed))

    assert torch.equal(rounded(1), rounded(1))
    assert not torch.equal(rounded(1), rounded(2))


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
