"""Selection on a GPU without host reads, against a comparison of all entries, by Triton's interpreter."""

from __future__ import annotations

import random
from importlib.util import find_spec
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch

from spardl.vector import selection
from spardl.vector.layout import Range
from spardl.vector.selection import ListingRanges, UnreadFinder, finder_for
from tests.support.emulated_gpu import Meter, emulated_with_triton, on_device, on_host
from tests.vector.kernels.gpu_worker import Call, compile_selection_for_hopper, worker
from tests.vector.test_selection import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "number"), [(70, 3), (5000, 1), (9000, 5)])
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
        for k in range(40, 0, -1):
            parts = [Range(0, 200, k), Range(200, 400, 1)]
            finder.add(placed, zeros, NOTHING)
            assert on_host(finder.largest(placed, parts, []).positions).tolist() == exact(values, parts)
        assert len(finder._tables) <= 16


@pytest.mark.parametrize(
    ("kind", "flags", "integer"), [("fp32", True, "i32"), ("bf16", False, "i64"), ("fp16", True, "i32")]
)
def test_the_selection_compiles_for_hopper(kind: str, flags: bool, integer: str) -> None:
    with worker(interpreted=False) as call:
        texts = call(compile_selection_for_hopper, kind, flags, integer)
    assert {"_add", "_mark", "_select"} <= texts.keys()
    assert not any(".ftz" in text or "fma." in text for text in texts.values())
