"""Columns that a GPU scales, against torch, by Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from spardl.compressors.powersgd import _scaled
from tests.support.emulated_gpu import Meter, emulated, emulated_with_triton, on_device, on_host
from tests.vector.kernels.gpu_worker import Call

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


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
