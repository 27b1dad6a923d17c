"""The kernels for a GPU, against torch: on a GPU if there is one, else by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spardl.vector.layout import Range
from tests.vector.kernels.gpu_worker import (
    add_and_list,
    compile_for_hopper,
    has_gpu,
    list_far_out,
    step_of_finder,
    worker,
)
from tests.vector.test_selection import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WHOLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
SMALL = 64, 2  # entries of a tile, tiles of a group
TILE, GROUP = 4096, 8

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    with worker() as function:
        yield function


def reference(
    memory: Tensor,
    gradient: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    bounds: Sequence[float],
    room: int,
) -> tuple[Tensor, Tensor, list[int]]:
    memory = memory.clone() if gradient is None else memory + gradient
    listed, counts = [torch.empty(0, dtype=torch.int64)], []
    for start, stop, bound in zip(starts, stops, bounds, strict=True):
        found = (memory[start:stop].abs() >= bound).nonzero().squeeze(1) + start
        fits = sum(map(len, listed)) + len(found) <= room
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
    room = draw(st.just(length) | st.integers(0, length))
    return memory, draw(st.sampled_from([gradient, None])), starts, stops, bounds, room


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
    ("room", "counts"),
    [(30, [10, 10, 0, 10]), (29, [10, 10, 0, -1]), (20, [10, 10, 0, -1]), (9, [-1, -1, 0, -1]), (0, [-1, -1, 0, -1])],
)
def test_a_range_without_room_is_left_out(call: Call, room: int, counts: list[int]) -> None:
    problem = torch.ones(100), None, [0, 10, 50, 80], [10, 20, 60, 90], [1.0, 1.0, 2.0, 1.0], room
    assert call(add_and_list, SMALL, *problem)[2] == counts
    check(call, SMALL, *problem)


def test_ranges_after_one_without_room_are_listed(call: Call) -> None:
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
        pytest.param("fp32", "fp32", True, "i32", marks=pytest.mark.slow),
        pytest.param("fp64", "fp64", True, "i32", marks=pytest.mark.slow),
        pytest.param("fp32", "fp32", False, "i32", marks=pytest.mark.slow),
    ],
)
def test_compiles_for_a_gpu_as_meant(
    kind: str, wide: str, has_gradient: bool, integer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreters run what compilers refuse. Loads and stores of whole tiles are 16 bytes wide; nothing is flushed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with worker(interpreted=False) as call:
        texts = call(compile_for_hopper, kind, wide, has_gradient, integer)
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
