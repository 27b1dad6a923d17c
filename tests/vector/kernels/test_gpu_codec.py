"""Messages that a GPU encodes and decodes, against torch, by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from spardl.vector.packing import Slot, pack, pack_indices, unpack_all
from spardl.vector.sparse import SparseVector
from tests.support.emulated_gpu import Meter, emulated, emulated_with_triton, on_device, on_host
from tests.vector.kernels.gpu_worker import Call, compile_codec_for_hopper, worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def written_and_read(triton: bool, vector: SparseVector, slot: Slot, messages: Tensor, full: bool) -> list[Tensor]:
    """Message and indices of a vector, and what three messages are decoded to, in host memory."""
    emulation, dtype = emulated_with_triton if triton else emulated, vector.values.dtype
    with emulation(meter := Meter()):
        own = SparseVector(on_device(vector.indices), on_device(vector.values), vector.length)
        placed = on_device(messages)
        meter.section = "here"
        results = [pack(own, slot, dtype), pack_indices(own.indices, slot)]
        opened = unpack_all(placed, [slot] * 3, dtype, dtype, full=full)
    if triton and full:
        # One more than the kernels if the table of the slots is not on the device yet.
        assert meter.totals <= (4, 0), meter.launches
    return [on_host(each).clone() for each in (*results, opened.indices, opened.values)]


def cases(seed: int) -> Iterator[tuple[SparseVector, Slot]]:
    draw = random.Random(seed)
    for _ in range(60):
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
        for arguments in ((torch.cat([message] * 3), full), (torch.cat([noise, message, noise]), True)):
            results, wanted = (call(written_and_read, triton, vector, slot, *arguments) for triton in (True, False))
            for one, other in zip(results, wanted, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (slot, vector.values.dtype)


@pytest.mark.parametrize(("raw", "integer", "full"), [("i32", "i32", True), ("i16", "i64", False)])
def test_the_codec_compiles_for_hopper(raw: str, integer: str, full: bool) -> None:
    with worker(interpreted=False) as call:
        texts = call(compile_codec_for_hopper, raw, integer, full)
    assert texts.keys() == {"_encode", "_decode"}
