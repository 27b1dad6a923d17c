"""Integer levels that a GPU packs and reads, against torch, by Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from spardl.vector.levels import pack_levels, read_levels
from tests.support.emulated_gpu import Meter, emulated, emulated_with_triton, on_device, on_host
from tests.vector.kernels.gpu_worker import Call, compile_rest_for_hopper, worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


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
def test_kernels_of_entries_compile_for_hopper(kind: str, bits: int) -> None:
    with worker(interpreted=False) as call:
        texts = call(compile_rest_for_hopper, kind, bits)
    assert len(texts) == (11 if kind == "fp32" else 8)
    assert not any(".ftz" in text or "div.full" in text or "div.approx" in text for text in texts.values())
