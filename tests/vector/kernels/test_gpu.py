"""The GPU kernels, interpreted or compiled, compared with their portable versions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.compressors.powersgd import _scaled
from spardl.vector import selection
from spardl.vector.layout import Range
from spardl.vector.levels import pack_levels, read_levels
from spardl.vector.packing import Slot, pack, pack_indices, unpack_all
from spardl.vector.selection import ListingRanges, UnreadFinder, finder_for
from spardl.vector.sparse import SparseVector
from tests.support.emulated_gpu import Meter, emulated, emulated_with_triton, on_device, on_host
from tests.vector.kernels.gpu_worker import (
    Call,
    add_and_list,
    compile_codec_for_hopper,
    compile_for_hopper,
    compile_rest_for_hopper,
    compile_selection_for_hopper,
    has_gpu,
    list_far_out,
    step_of_finder,
    worker,
)
from tests.vector.test_selection import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WHOLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
SMALL = 64, 2  # entries of a tile, tiles of a group
TILE, GROUP = 4096, 8


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    with worker() as function:
        yield function


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Calls functions in a process where Triton compiles, and finds nothing that was compiled before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with worker(interpreted=False) as function:
            yield function


def reference(
    memory: Tensor,
    gradient: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    bounds: Sequence[float],
    capacity: int,
) -> tuple[Tensor, Tensor, list[int]]:
    memory = memory.clone() if gradient is None else memory + gradient
    listed, counts = [torch.empty(0, dtype=torch.int64)], []
    for start, stop, bound in zip(starts, stops, bounds, strict=True):
        found = (memory[start:stop].abs() >= bound).nonzero().squeeze(1) + start
        fits = sum(map(len, listed)) + len(found) <= capacity
        counts.append(len(found) if fits else -1)
        listed.append(found[: len(found) * fits])
    return memory, torch.cat(listed), counts


def check(call: Call, sizes: tuple[int, int] | None, *arguments: Any) -> None:
    memory, positions, counts = call(add_and_list, sizes, *arguments)
    wanted_memory, wanted, wanted_counts = reference(*arguments)
    whole = WHOLE[memory.dtype]
    assert torch.equal(memory.view(whole), wanted_memory.view(whole))
    assert counts == wanted_counts
    assert positions.dtype == torch.int64
    assert torch.equal(positions, wanted)
    assert bool((positions[1:] > positions[:-1]).all())


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    """Halves of small integers, so that many a magnitude is just the bound."""
    length = draw(st.sampled_from([0, 1, 63, 64, 65, 128, 129]) | st.integers(0, 260))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    memory, gradient = (torch.randint(-4, 5, (2, length), generator=generator) / 2).to(dtype)
    if length and draw(st.booleans()):
        memory[draw(st.integers(0, length - 1))] = draw(st.sampled_from([torch.inf, -torch.inf]))
    edges = sorted(draw(st.lists(st.integers(0, length) | st.sampled_from([0, length]), max_size=8)))
    starts, stops = edges[: len(edges) // 2 * 2 : 2], edges[1::2]
    bounds = [draw(st.sampled_from([0.0, 0.5, 1.0, 2.5, 3.5, torch.inf])) for _ in starts]
    capacity = draw(st.just(length) | st.integers(0, length))
    return memory, draw(st.sampled_from([gradient, None])), starts, stops, bounds, capacity


@given(problem=problems())
@settings(max_examples=30)
def test_lists_what_torch_finds(call: Call, problem: tuple[Any, ...]) -> None:
    check(call, SMALL, *problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_groups_as_they_are(call: Call, dtype: torch.dtype) -> None:
    """Edges within a tile, at the ends of one and of a group, over several groups, and a last tile in part."""
    generator = torch.Generator().manual_seed(1)
    length = TILE * GROUP + 2 * TILE + 7
    memory, gradient = torch.randn(2, length, generator=generator, dtype=torch.float64).to(dtype)
    starts = [0, 5, TILE, TILE + 100, TILE * GROUP - 1, TILE * GROUP + 3, length - 1]
    stops = [1, TILE, TILE + 100, TILE * GROUP - 1, TILE * GROUP, length - 2, length]
    check(call, None, memory, gradient, starts, stops, [0.0, 1.5, 2.0, 4.0, 0.0, 0.5, 0.0], length)


@pytest.mark.parametrize("listed", [[], [0], [130], [255, 256], [64, 383, 384], [511]])
def test_few_among_many(call: Call, listed: list[int]) -> None:
    """Tiles and groups without any, before and after those with one."""
    memory = torch.zeros(512)
    memory[listed] = -1
    check(call, SMALL, memory, None, [0, 300], [300, 512], [0.5, 1.0], len(listed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0, 7])
def test_sums_of_any_bits(call: Call, dtype: torch.dtype, scale: int) -> None:
    """Every exponent, subnormal numbers too; and exponents so close to each other that most sums are rounded."""
    generator = torch.Generator().manual_seed(2)
    whole = WHOLE[dtype]
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max, (2, 3 * TILE), generator=generator, dtype=whole)
    memory, gradient = bits.view(dtype).nan_to_num(1.0, 1.0, 1.0)
    if scale:
        memory, gradient = ((vector.frexp().mantissa * 2.0**scale).to(dtype) for vector in (memory, gradient))
        gradient /= 2 ** torch.randint(0, 2 * scale, (3 * TILE,), generator=generator)
    check(call, None, memory, gradient, [0], [3 * TILE], [1.0], 3 * TILE)


def test_rounds_ties_to_even_and_keeps_what_is_not_finite(call: Call) -> None:
    last = torch.finfo(torch.bfloat16).max
    memory = torch.tensor([1.0, 1 + 2**-7, last, -last, torch.inf, torch.inf], dtype=torch.bfloat16)
    gradient = torch.tensor([2**-8, 2**-8, last, -last, -1.0, -torch.inf], dtype=torch.bfloat16)
    summed, positions, _ = call(add_and_list, None, memory, gradient, [0], [6], [0.0], 6)
    assert summed[:5].tolist() == [1.0, 1 + 2**-6, torch.inf, -torch.inf, torch.inf]
    assert summed[5].isnan()
    assert positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("capacity", "counts"),
    [(30, [10, 10, 0, 10]), (29, [10, 10, 0, -1]), (20, [10, 10, 0, -1]), (9, [-1, -1, 0, -1]), (0, [-1, -1, 0, -1])],
)
def test_a_range_that_exceeds_the_capacity_is_left_out(call: Call, capacity: int, counts: list[int]) -> None:
    problem = torch.ones(100), None, [0, 10, 50, 80], [10, 20, 60, 90], [1.0, 1.0, 2.0, 1.0], capacity
    assert call(add_and_list, SMALL, *problem)[2] == counts
    check(call, SMALL, *problem)


def test_ranges_after_one_that_exceeds_the_capacity_are_listed(call: Call) -> None:
    problem = torch.ones(400), None, [0, 70, 75, 300, 310], [3, 75, 299, 310, 312], [1.0] * 5, 11
    assert call(add_and_list, SMALL, *problem)[2] == [3, 5, -1, -1, 2]
    check(call, SMALL, *problem)


def test_many_ranges(call: Call) -> None:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, 800, (128,), generator=generator).sort().values.tolist()
    memory, gradient = torch.randn(2, 800, generator=generator)
    bounds = torch.rand(64, generator=generator).tolist()
    check(call, SMALL, memory, gradient, edges[::2], edges[1::2], bounds, 800)


def test_positions_that_do_not_fit_in_32_bits(call: Call) -> None:
    if not has_gpu():
        pytest.skip("takes a GPU: an interpreter would be at it for an hour")
    length = 2**31 + 5
    marks = [0, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 4]
    found = call(list_far_out, length, marks, [0, 2**31], [2**31, length])
    if found is None:
        pytest.skip("takes a GPU with 12 GiB of free memory")
    assert found == (marks, [3, 2], True)


@pytest.mark.parametrize(
    ("kind", "wide", "has_gradient", "integer"),
    [
        ("bf16", "fp32", True, "i64"),
        ("fp32", "fp32", True, "i32"),
        ("fp64", "fp64", True, "i32"),
        ("fp32", "fp32", False, "i32"),
    ],
)
def test_compiles_for_a_gpu_as_meant(compiling: Call, kind: str, wide: str, has_gradient: bool, integer: str) -> None:
    """Interpreters run what compilers refuse. Loads and stores of whole tiles are 16 bytes wide; nothing is flushed."""
    texts = compiling(compile_for_hopper, kind, wide, has_gradient, integer)
    assert texts.keys() == {"_add_tile", "_count_below", "_list_group"}
    text = texts["_add_tile"]
    assert any(f"ld.global.{shape}" in text for shape in ("v4.b32", "v2.b64"))
    assert any(f"st.global.{shape}" in text for shape in ("v4.b32", "v2.b64")) == has_gradient
    assert ".ftz" not in text
    assert "fma." not in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_are_scanned_together(call: Call, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    memory, gradient = torch.randn(2, 220, generator=generator).to(dtype)
    edges = [0, *range(20, 200, 16), 212, 220]
    starts, stops = edges[:-1], edges[1:]
    values, counts, positions, looked = call(step_of_finder, memory, gradient, starts, stops, 1.0, 3)
    total = memory + gradient
    assert torch.equal(values, total)
    alone = [stop - start != 16 for start, stop in zip(starts, stops, strict=True)]
    reached = [int((total[start:stop].abs() >= 1).sum()) for start, stop in zip(starts, stops, strict=True)]
    assert counts == [count if single else -1 for count, single in zip(reached, alone, strict=True)]
    assert looked == [count if single and count >= 3 else -1 for count, single in zip(reached, alone, strict=True)]
    assert positions == exact(total, [Range(*pair, 3) for pair in zip(starts, stops, strict=True)])


TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def written_and_read(
    triton: bool, vector: SparseVector, slot: Slot, readings: Sequence[tuple[Tensor, bool]]
) -> list[Tensor]:
    """Message and indices of a vector, and what three messages are decoded to in each reading, in host memory."""
    emulation, dtype = emulated_with_triton if triton else emulated, vector.values.dtype
    with emulation(meter := Meter()):
        own = SparseVector(on_device(vector.indices), on_device(vector.values), vector.length)
        placed = [(on_device(messages), full) for messages, full in readings]
        meter.section = "here"
        results = [pack(own, slot, dtype), pack_indices(own.indices, slot)]
        for number, (messages, full) in enumerate(placed):
            opened = unpack_all(messages, [slot] * 3, dtype, dtype, full=full)
            results += [opened.indices, opened.values]
            if triton and full:
                # One more than the kernels if the table of the slots is not on the device yet.
                assert meter.totals <= (4 + number, 0), meter.launches
    return [on_host(each).clone() for each in results]


def cases(seed: int) -> Iterator[tuple[SparseVector, Slot]]:
    draw = random.Random(seed)
    for _ in range(20):
        length = draw.choice([1, 5, 40, 300, 5000, 2**17 + 3, 2**40])
        count = draw.randint(0, min(length, draw.choice([3, 80, 1500])))
        indices = sorted({draw.randrange(length) for _ in range(count)})
        values = torch.randn(len(indices), generator=torch.Generator().manual_seed(seed))
        slot = Slot(len(indices) + draw.randint(0, min(20, length - len(indices))), length, draw.choice([1, 4]))
        yield SparseVector(torch.tensor(indices, dtype=torch.int64), values.to(draw.choice(TYPES)), length), slot


@pytest.mark.parametrize("seed", [1, 2])
def test_messages_have_the_bytes_of_torch(call: Call, seed: int) -> None:
    for vector, slot in cases(seed):
        message = pack(vector, slot, vector.values.dtype)
        noise = torch.randint(0, 256, message.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        full = slot.capacity == len(vector)
        readings = (torch.cat([noise, message, noise]), True), (torch.cat([message] * 3), full)
        results, wanted = (call(written_and_read, triton, vector, slot, readings) for triton in (True, False))
        for one, other in zip(results, wanted, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (slot, vector.values.dtype)


@pytest.mark.parametrize(("raw", "integer", "full"), [("i32", "i32", True), ("i16", "i64", False)])
def test_the_codec_compiles_for_hopper(compiling: Call, raw: str, integer: str, full: bool) -> None:
    texts = compiling(compile_codec_for_hopper, raw, integer, full)
    assert texts.keys() == {"_encode", "_decode"}


def scaled(triton: bool, factors: Tensor, old: Tensor | None) -> tuple[Tensor, int]:
    """The scaled columns, and the launches."""
    emulation = emulated_with_triton if triton else emulated
    with emulation(meter := Meter()):
        given = [None if each is None else on_device(each) for each in (factors, old)]
        meter.section = "here"
        found = _scaled(*given)
    return on_host(found).clone(), meter.totals[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7, 3), (3, 40, 1), (2, 2100, 4)])
def test_columns_have_the_bits_of_torch(call: Call, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(sum(shape))
    factors, old = (torch.randn(shape, generator=source) for _ in range(2))
    factors[0, :, 0] = 0
    factors[-1, :, -1] *= 1e-30
    factors[-1, 3, -1] = -0.0
    for harm in (None, torch.nan, torch.inf):
        if harm is not None:
            factors[-1, 5, 0] = harm
        for before in (None, old) if harm != torch.inf else (None,):
            given = (factors.to(dtype), None if before is None else before.to(dtype))
            (found, launches), (wanted, _) = (call(scaled, triton, *given) for triton in (True, False))
            assert launches == 1
            assert found.dtype == wanted.dtype == torch.float32
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            numbers = ~wanted.isnan()
            assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


def coded(triton: bool, values: Tensor, block: int, bits: int, leave: bool, add: bool) -> tuple[list[Tensor], int]:
    """Values after packing, scales, codes and what they are read to; and the launches."""
    emulation = emulated_with_triton if triton else emulated
    with emulation(meter := Meter()):
        own, out = on_device(values), on_device(torch.ones_like(values))
        meter.section = "here"
        scales, packed = pack_levels(own, block, bits, leave=leave)
        read_levels(scales, packed, block, bits, out, add=add)
    return [on_host(each).clone() for each in (own, scales, packed, out)], meter.totals[0]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("leave", "add"), [(True, False), (False, True)])
def test_levels_have_the_bits_of_torch(call: Call, bits: int, leave: bool, add: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    for count, block in ((0, 8), (1, 1), (257, 256), (1000, 7), (3000, 300)):
        for exponent in (-38, 0, 37):
            values = torch.randn(count, generator=generator).mul_(10.0**exponent)
            values[: count // 3] = -0.0
            values[::7].mul_(2).round_()
            (found, launches), (wanted, _) = (
                call(coded, triton, values, block, bits, leave, add) for triton in (True, False)
            )
            assert launches <= (2 if bits == 8 else 3)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (count, block, exponent)


@pytest.mark.parametrize(("kind", "bits"), [("fp32", 8), ("fp32", 4), ("bf16", 8), ("fp16", 2)])
def test_kernels_of_entries_compile_for_hopper(compiling: Call, kind: str, bits: int) -> None:
    texts = compiling(compile_rest_for_hopper, kind, bits)
    assert len(texts) == (11 if kind == "fp32" else 8)
    assert not any(".ftz" in text or "div.full" in text or "div.approx" in text for text in texts.values())


GPU_SELECT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTHING = ListingRanges(np.empty(0, np.int64), np.empty(0, np.int64), torch.empty(0), np.empty(0, np.int64))


def ranges_of(length: int, number: int, draw: random.Random) -> list[Range]:
    edges = [0, *sorted(draw.sample(range(length), number - 1)), length]
    return [Range(a, b, draw.choice([0, 1, min(b - a, 7), (b - a) // 20, b - a])) for a, b in pairwise(edges)]


def select_for_steps(length: int, number: int, dtype: torch.dtype, seed: int) -> int:
    """Compares the sums and the selections of some steps; returns the host reads."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parts, memory = ranges_of(length, number, draw), torch.zeros(length, dtype=dtype)
    with emulated_with_triton(meter := Meter()):
        placed = on_device(memory)
        finder = finder_for(placed)
        assert isinstance(finder, UnreadFinder)
        for step in range(4):
            # Many equal magnitudes in every other step.
            gradient = torch.randn(length, generator=generator)
            gradient = (gradient.mul_(2).round_() if step % 2 else gradient).to(dtype)
            changed = torch.tensor(sorted(draw.sample(range(length), 20)))
            new = torch.randn(20, generator=generator).mul_(3).to(dtype)
            memory.add_(gradient)[changed] = new
            arrived = on_device(gradient)
            meter.section = "here"
            finder.add(placed, arrived, NOTHING)
            meter.section = None
            on_host(placed)[changed] = new
            touched = on_device(changed)
            meter.section = "here"
            found = finder.largest(placed, parts, [touched]).positions
            meter.section = None
            assert torch.equal(memory.view(torch.uint8), on_host(placed).view(torch.uint8))
            wanted = exact(memory, parts)
            assert on_host(found).tolist() == wanted, (parts, step)
            memory[torch.tensor(wanted)] = 0
            on_host(placed)[torch.tensor(wanted)] = 0
    return meter.totals[1]


@pytest.mark.parametrize(
    ("length", "number", "dtype"),
    [
        *((70, 3, dtype) for dtype in GPU_SELECT_DTYPES),
        *((5000, 1, dtype) for dtype in (torch.float32, torch.float16)),
        (9000, 5, torch.bfloat16),
    ],
    ids=str,
)
def test_selection_is_exact_in_every_step(call: Call, length: int, number: int, dtype: torch.dtype) -> None:
    assert call(select_for_steps, length, number, dtype, length + number) == 0


def test_a_wrong_bound_costs_time_only() -> None:
    """Bounds that mark too little or too much give the same selection."""
    with worker(needs_cpu=True) as call:
        call(select_with_wrong_bounds)


def select_with_wrong_bounds() -> None:
    parts = [Range(0, 700, 9), Range(700, 1500, 30)]
    values = torch.randn(1500, generator=torch.Generator().manual_seed(4))
    with emulated_with_triton(Meter()):
        placed, zeros = on_device(values), on_device(torch.zeros(1500))
        finder = finder_for(placed)
        assert isinstance(finder, UnreadFinder)
        for bound in (None, None, 0, 1, 2**31 - 1, 2**30):
            finder.add(placed, zeros, NOTHING)
            if bound is not None:
                on_host(finder._following).fill_(bound)
                finder.add(placed, zeros, NOTHING)
                finder._selected.update(part[:2] for part in parts)
            found = on_host(finder.largest(placed, parts, []).positions)
            assert found.tolist() == exact(values, parts), bound


def test_gradients_with_strides_long_ranges_and_many_tables(call: Call) -> None:
    call(add_with_strides)
    call(select_from_long_ranges)
    call(select_with_many_budgets)


def add_with_strides() -> None:
    with emulated_with_triton(Meter()):
        values = on_device(torch.zeros(40))
        finder = finder_for(values)
        gradient = on_device(torch.arange(80.0))[::2]
        assert finder.check_next(gradient) is not None
        finder.add(values, gradient, NOTHING, clear=True)
        assert torch.equal(on_host(values), torch.arange(80.0)[::2])
        assert not on_host(gradient).any()


def select_from_long_ranges() -> None:
    """Torch selects in them; the other entries of the steps are as before."""
    parts = [Range(0, 700, 9), Range(700, 1500, 30)]
    with emulated_with_triton(meter := Meter()), patch.object(selection, "MOST_PER_PROGRAM", 750):
        values, gradient = torch.zeros(1500), torch.randn(1500, generator=torch.Generator().manual_seed(4))
        placed = on_device(values)
        finder = finder_for(placed)
        for _ in range(3):
            values.add_(gradient)
            meter.section = "here"
            finder.add(placed, on_device(gradient), NOTHING)
            found = finder.largest(placed, parts, []).positions
            meter.section = None
            assert on_host(found).tolist() == exact(values, parts)
        assert finder.marks is None
        assert meter.totals[1] == 0


def select_with_many_budgets() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(4))
    with emulated_with_triton(Meter()):
        placed, zeros = on_device(values), on_device(torch.zeros(400))
        finder = finder_for(placed)
        assert isinstance(finder, UnreadFinder)
        for k in range(20, 0, -1):
            parts = [Range(0, 200, k), Range(200, 400, 1)]
            finder.add(placed, zeros, NOTHING)
            assert on_host(finder.largest(placed, parts, []).positions).tolist() == exact(values, parts)
        assert len(finder._tables) <= 16


@pytest.mark.parametrize(
    ("kind", "flags", "integer"), [("fp32", True, "i32"), ("bf16", False, "i64"), ("fp16", True, "i32")]
)
def test_the_selection_compiles_for_hopper(compiling: Call, kind: str, flags: bool, integer: str) -> None:
    texts = compiling(compile_selection_for_hopper, kind, flags, integer)
    assert {"_add", "_mark", "_select"} <= texts.keys()
    assert not any(".ftz" in text or "fma." in text for text in texts.values())
