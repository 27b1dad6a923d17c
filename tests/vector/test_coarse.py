"""Values in a few bits: messages decode to the rounded values, and rounding is idempotent."""

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
    for room in (count, count + 3, count + 2 * CHUNK):
        assert same_bits(there_and_back(form, vector, Slot(room, length)), vector)


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
