"""Scaled signs, with and without error feedback."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGatherCodes
from spardl.compressors import SignSGD
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual, Residual
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.layout import Layout
from tests.support.harness import Bench, context, layout_of

DTYPES = [torch.float32, torch.float64]


def bench(
    workers: int,
    length: int,
    scope: str = "layer",
    residual: Residual | None = None,
    dtype: torch.dtype = torch.float64,
) -> Bench:
    method = Method(SignSGD(scope), AllGatherCodes(), residual or LocalResidual())
    return Bench.build(method, workers, length, dtype)


def sent(compressor: SignSGD, vector: Tensor, layout: Layout) -> Tensor:
    """What the others get of a vector."""
    where = Context(Worker(0, 1), layout, 0)
    return compressor.decode(compressor.encode(vector, where, State()), where, vector.dtype)


def reference(vector: npt.NDArray[np.float64], ranges: list[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """The scaled signs of a vector, as published; the sign of 0 is +."""
    signs = np.empty_like(vector)
    for start, stop in ranges:
        for i in range(start, stop):
            signs[i] = np.abs(vector[start:stop]).sum() / (stop - start) * (1 if vector[i] >= 0 else -1)
    return signs


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("residual", [LocalResidual(), NoResidual()], ids=["with", "without"])
@pytest.mark.parametrize(("workers", "length"), [(1, 5), (2, 24), (3, 61), (8, 200)])
def test_equals_the_reference(scope: str, residual: Residual, workers: int, length: int) -> None:
    """A whole cluster over several steps: averages and what every worker keeps."""
    source = np.random.default_rng(length)
    ranges = layout_of(length).tensors if scope == "layer" else [(0, length)]
    found, errors = bench(workers, length, scope, residual), np.zeros((workers, length))
    for step in range(5):
        gradients = source.standard_normal((workers, length))
        if step == 0:
            gradients[0, ::3] = -0.0
        corrected = gradients + errors
        signs = np.stack([reference(row, ranges) for row in corrected])
        for average in found.step([torch.from_numpy(gradient) for gradient in gradients]):
            assert isinstance(average, Tensor)
            np.testing.assert_allclose(average.numpy(), signs.mean(0), rtol=1e-12, atol=1e-14)
        if residual.remembers:
            errors = corrected - signs
            kept = np.stack([state.memory.numpy() for state in found.states])
            np.testing.assert_allclose(kept, errors, rtol=1e-12, atol=1e-14)


def test_by_hand() -> None:
    layout = Layout.of([(3,), (0,), (2,), (1,)])
    vector = torch.tensor([1.0, -3.0, 2.0, 0.0, -0.0, -5.0])
    assert sent(SignSGD(), vector, layout).tolist() == [2.0, -2.0, 2.0, 0.0, 0.0, -5.0]
    vector = torch.tensor([-1.0, 0.0, -0.0, 3.0])
    assert sent(SignSGD("model"), vector, Layout.of([(2,), (2,)])).tolist() == [-1.0, 1.0, 1.0, 1.0]


def test_error_feedback_sends_all_in_the_end() -> None:
    """With one constant gradient, the mean of the messages approaches it, but not without error feedback."""
    gradient, steps = torch.linspace(-1, 3, 50, dtype=torch.float64), 100
    gaps = []
    for residual in (LocalResidual(), NoResidual()):
        found = bench(2, 50, residual=residual)
        mean = sum(found.step([gradient, gradient])[0] for _ in range(steps)) / steps
        assert isinstance(mean, Tensor)
        gaps.append((mean - gradient).abs().max().item())
    assert gaps[0] < 0.25
    assert gaps[1] > 0.5


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30),
    st.sampled_from(["layer", "model"]),
    st.sampled_from(DTYPES),
)
def test_finite_for_all_finite_vectors(numbers: list[float], scope: str, dtype: torch.dtype) -> None:
    """From the smallest denormal to the largest number, zeros, and no entries; the residual stays finite."""
    vector = torch.tensor(numbers, dtype=dtype)
    copy = vector.clone()
    found = sent(SignSGD(scope), vector, layout_of(len(numbers)))
    assert torch.equal(vector, copy)
    assert found.shape == vector.shape
    assert found.dtype is dtype
    assert bool(found.isfinite().all())
    assert bool((vector - found).isfinite().all())
    assert bool(((found == 0) | ((found > 0) == (vector >= 0))).all())


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype, scope: str) -> None:
    for number in (torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        vector = torch.full((600,), -number, dtype=dtype)
        assert torch.equal(sent(SignSGD(scope), vector, layout_of(600)), vector)


def test_an_overflow_of_gradient_plus_residual_does_not_stay() -> None:
    found, largest = bench(2, 40, dtype=torch.float32), torch.finfo(torch.float32).max
    huge = torch.where(torch.arange(40) % 3 == 0, largest, 0.0)
    for _ in range(3):
        found.step([huge, huge])
        assert all(bool(state.memory.isfinite().all()) for state in found.states)


def test_size() -> None:
    """A scale per tensor or for all, and a byte for eight entries."""
    where = context(50)
    assert len(where.layout.tensors) == 4
    for scope, scales in (("layer", 4), ("model", 1)):
        for dtype in DTYPES:
            size = scales * dtype.itemsize + 7
            assert SignSGD(scope).size(where, dtype) == size
            assert SignSGD(scope).encode(torch.ones(50, dtype=dtype), where, State()).numel() == size
    assert SignSGD().size(Context(Worker(0, 1), Layout(()), 0)) == 0


def test_bad_options() -> None:
    for scope in ("bucket", "", None, 1):
        with pytest.raises(ConfigError, match=f"compressor.scope must be one of layer, model, got {scope!r}"):
            SignSGD(scope)
