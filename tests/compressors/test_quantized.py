"""Block quantization."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import spardl
from spardl.basics.errors import ConfigError
from spardl.compressors import Quantized
from spardl.compressors.quantized import FORMATS, hadamard
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.layout import Layout
from tests.support.harness import Bench, same_bits

MODEL = Layout.of([(30, 20), (20,), (50, 10), (7,), (3, 4, 5)])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}


def sent(compressor: Quantized, vector: Tensor, layout: Layout = MODEL, step: int = 0) -> Tensor:
    """What the others get of a vector."""
    where = Context(Worker(0, 1), layout, step)
    message = compressor.encode(vector, where, State())
    assert (message.dtype, message.numel()) == (torch.uint8, compressor.size(where, vector.dtype))
    return compressor.decode(message, where, vector.dtype)


def drawn(layout: Layout = MODEL, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(layout.length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_equals_the_reference(name: str) -> None:
    """Each block divided by its largest magnitude, times the highest level, to the nearest."""
    values, top = drawn(), 2 ** (BITS[name] - 1) - 1
    coded = np.concatenate([values[:600], values[620:1120], values[1127:]])
    expected = []
    for block in np.split(coded, range(64, len(coded), 64)):
        scale = np.abs(block).max()
        expected.append(np.rint(block / scale * top) / top * scale)
    found = sent(Quantized(name, block=64), values)
    np.testing.assert_allclose(
        np.concatenate([found[:600], found[620:1120], found[1127:]]), np.concatenate(expected), rtol=1e-12
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
def test_norms_and_biases_are_exempt_and_the_rest_is_near(name: str, dtype: torch.dtype, rotate: bool) -> None:
    values = drawn(dtype=dtype)
    found = sent(Quantized(name, block=64, rotate=rotate), values)
    assert found.dtype == dtype
    for start, stop in ((600, 620), (1120, 1127)):
        assert torch.equal(found[start:stop], values[start:stop])
    error = ((found - values).double().norm() / values.double().norm()).item()
    assert error < {"int8": 0.02, "int4": 0.15, "int2": 0.8, "fp8": 0.05}[name]
    assert not torch.equal(found, values)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layout", [MODEL, Layout.of([(500,), (7,)]), Layout.of([(40, 40)])], ids=["mixed", "1d", "2d"])
def test_in_one_go_the_bits_are_those_of_two_steps(name: str, dtype: torch.dtype, rotate: bool, layout: Layout) -> None:
    compressor, where = Quantized(name, block=64, rotate=rotate), Context(Worker(0, 1), layout, 0)
    values, total = drawn(layout, dtype), drawn(layout, dtype, seed=1)
    message = compressor.encode(values, where, State())
    decoded = compressor.decode(message, where, dtype)
    left, added = values.clone(), total.clone()
    assert torch.equal(compressor.take(left, where, State()), message)
    assert same_bits(left, values - decoded)
    compressor.decode_into(added, message, where, add=True)
    assert same_bits(added, total + decoded)


def test_exemption_has_a_limit() -> None:
    values = drawn()
    found = sent(Quantized("int4", exempt=10), values)
    assert torch.equal(found[1120:1127], values[1120:1127])
    assert not torch.equal(found[600:620], values[600:620])
    assert not torch.equal(sent(Quantized("int4", exempt=0), values)[1120:1127], values[1120:1127])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("workers", [2, 4, 7])
def test_bytes_are_those_of_the_bits_and_scales(name: str, workers: int) -> None:
    """Within 2% of 2(P-1)/P x (n bits/8 + scales), plus exempt tensors."""
    method, entries = spardl.make_method(name), 100_000
    found = Bench.build(method, workers, entries, torch.float32)
    found.step([torch.randn(entries) for _ in range(workers)])
    wanted = 2 * (workers - 1) / workers * (entries * BITS[name] / 8 + entries / 256 * 4)
    for ledger in found.cluster.ledgers:
        assert ledger.bytes_sent == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    layout = Layout.of([(32, 1)])
    values, compressor = drawn(layout), Quantized(name, block=32, rounding="stochastic")
    found = torch.stack([sent(compressor, values, layout, step) for step in range(3000)])
    level = values.abs().max() / (2 ** (BITS[name] - 1) - 1)
    assert (found.mean(0) - values).abs().max() < 5 * level / math.sqrt(3000)
    assert found.std(0).max() > 0.1 * level


def test_error_feedback_sends_all_in_the_end() -> None:
    found = Bench.build(spardl.make_method("int2", exempt=0, block=8), 3, 64)
    gradients = [drawn(Layout.flat(64), seed=rank) for rank in range(3)]
    total = torch.zeros(64, dtype=torch.float64)
    for _ in range(200):
        total += found.step(gradients)[0]
    torch.testing.assert_close(total / 200, torch.stack(gradients).mean(0), atol=0.05, rtol=0)


def test_hadamard_is_its_own_inverse_and_spreads_a_spike() -> None:
    rows = torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(rows)), rows)
    torch.testing.assert_close(hadamard(rows).norm(), rows.norm())
    spike = torch.zeros(1, 16, dtype=torch.float64)
    spike[0, 3] = 4.0
    assert hadamard(spike).abs().tolist() == [[1.0] * 16]


def test_rotation_helps_where_single_entries_are_large() -> None:
    values = drawn()
    values[::50] *= 100
    errors = [(sent(Quantized("int4", block=64, rotate=rotate), values) - values).norm() for rotate in (False, True)]
    assert errors[1] < errors[0]


@given(
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40),
    name=st.sampled_from(sorted(FORMATS)),
    rotate=st.booleans(),
)
def test_finite_for_all_finite_vectors(numbers: list[float], name: str, rotate: bool) -> None:
    values = torch.tensor(numbers)
    found = sent(Quantized(name, block=8, rotate=rotate, exempt=0), values, Layout.flat(len(numbers)))
    assert found.isfinite().all()
    if not rotate:
        assert (found.abs() <= values.abs().max()).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "int3"}, "compressor.format must be"),
        ({"block": 0}, "compressor.block must be"),
        ({"rounding": "up"}, "compressor.rounding must be"),
        ({"rotate": True, "block": 100}, "block must be a power of two with rotate, got 100; use 256"),
        ({"format": "fp8", "rounding": "stochastic"}, "fp8 requires compressor.rounding=nearest; set it"),
        ({"exempt": -1}, "compressor.exempt must be"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Quantized(**options)
