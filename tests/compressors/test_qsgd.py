"""QSGD."""

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
from spardl.compressors import QSGD
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from spardl.protocol.programs import State, Worker, seeded_generator
from tests.support.harness import Bench, context

DTYPES = [torch.float32, torch.float64]
FORMS = [(bits, norm) for bits in (2, 4, 8) for norm in ("l2", "max")]


def sent(compressor: QSGD, vector: Tensor, step: int = 0, worker: Worker = Worker(0, 1)) -> Tensor:  # noqa: B008
    """What the others get of a vector."""
    where = context(vector.numel(), worker, step)
    return compressor.decode(compressor.encode(vector, where, State()), where, vector.dtype)


def norms_of(vector: Tensor, compressor: QSGD) -> npt.NDArray[np.float64]:
    """For each entry the norm of its bucket, in numpy."""
    order = 2 if compressor.norm == "l2" else np.inf
    values, width = vector.double().numpy(), compressor.bucket_entries
    buckets = [values[start : start + width] for start in range(0, len(values), width)]
    return np.concatenate([np.full(len(b), np.linalg.norm(b, order)) for b in buckets] or [np.empty(0)])


def reference(
    vector: npt.NDArray[np.float64], draws: npt.NDArray[np.float64], s: int, width: int, order: float
) -> None:
    """Overwrites a vector with its quantization, entry by entry as published, for given draws."""
    for start in range(0, len(vector), width):
        norm = np.linalg.norm(vector[start : start + width], order)
        for i in range(start, min(start + width, len(vector))):
            level = vector[i] * s / norm if norm else 0.0
            low = np.floor(level)
            vector[i] = norm * (low + (draws[i] < level - low)) / s


@pytest.mark.parametrize(("bits", "norm"), FORMS)
@pytest.mark.parametrize(("workers", "length"), [(1, 5), (2, 24), (3, 61), (8, 200)])
def test_equals_the_reference(bits: int, norm: str, workers: int, length: int) -> None:
    """A whole cluster over several steps, with the draws of every worker and step."""
    source = np.random.default_rng(length)
    bench = Bench.build(Method(QSGD(bits, 24, norm, seed=5), AllGatherCodes(), NoResidual()), workers, length)
    for step in range(3):
        gradients = source.standard_normal((workers, length))
        gradients[0, : length // 2] = 0
        expected = gradients.copy()
        for rank, row in enumerate(expected):
            draws = torch.rand(length, generator=seeded_generator(5, step, rank), dtype=torch.float64).numpy()
            reference(row, draws, 2 ** (bits - 1) - 1, 24, 2 if norm == "l2" else np.inf)
        for average in bench.step([torch.from_numpy(gradient) for gradient in gradients]):
            assert isinstance(average, Tensor)
            np.testing.assert_allclose(average.numpy(), expected.mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "norm"), FORMS)
def test_right_on_average(bits: int, norm: str, dtype: torch.dtype) -> None:
    """The mean of many is as near as its standard deviation says, and each of them as far off as one level."""
    compressor, times = QSGD(bits, 10, norm), 5000
    bucket = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=dtype)
    bucket[3] = 0
    found = sent(compressor, bucket.repeat(times)).view(times, 10).double().numpy()
    step_size = norms_of(bucket, compressor) / compressor.levels
    true = bucket.double().numpy()
    assert np.all(np.abs(found - true) <= step_size * (1 + 1e-5))
    chance = np.abs(true / step_size) % 1
    deviation = step_size * np.sqrt(chance * (1 - chance) / times)
    assert np.all(np.abs(found.mean(0) - true) <= 5 * deviation + 1e-5 * step_size)
    assert np.all(found[:, 3] == 0)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30),
    st.sampled_from(FORMS),
    st.sampled_from(DTYPES),
)
def test_finite_for_all_finite_vectors(numbers: list[float], form: tuple[int, str], dtype: torch.dtype) -> None:
    """From the smallest denormal to the largest number, zeros, no entries at all, and a short last bucket."""
    compressor = QSGD(form[0], 7, form[1])
    vector = torch.tensor(numbers, dtype=dtype)
    copy = vector.clone()
    found = sent(compressor, vector)
    assert torch.equal(vector, copy)
    assert found.shape == vector.shape
    assert found.dtype is dtype
    assert bool(found.isfinite().all())
    step_size = np.minimum(norms_of(vector, compressor), torch.finfo(dtype).max) / compressor.levels
    error = np.abs(found.double().numpy() - vector.double().numpy())
    assert np.all(error <= step_size * (1 + 1e-5) + torch.finfo(dtype).smallest_normal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    largest = torch.full((600,), kind.max, dtype=dtype)
    # The 2-norm is beyond the type, and sent as its largest number: the entries themselves.
    assert torch.equal(sent(QSGD(), largest), largest)
    assert torch.equal(sent(QSGD(norm="max"), -largest), -largest)
    mean = (sent(QSGD(8), largest.repeat(50) / 3) / kind.max).mean()
    assert mean.item() == pytest.approx(1 / 3, abs=1e-3)
    # 1e30 and its like: squares overflow float32, the norm does not.
    far = torch.tensor([3.0, 4.0, -5.0, 0.0], dtype=dtype)
    for scale in (kind.max / 16, kind.tiny * 16):
        expected = sent(QSGD(8), far).double() * scale
        torch.testing.assert_close(sent(QSGD(8), far * scale).double(), expected, rtol=1e-5, atol=0)


def test_levels_are_exact() -> None:
    """Values that are an integer number of levels are sent exactly."""
    vector = torch.tensor([7.0, -7.0, 3.0, 0.0, -0.0, -1.0, 14.0, 2.0])
    for step in range(20):
        assert sent(QSGD(4, 6, "max"), vector, step).tolist() == [7.0, -7.0, 3.0, 0.0, 0.0, -1.0, 14.0, 2.0]
    assert sent(QSGD(2, 1), vector).tolist() == vector.tolist()


def test_the_message_by_hand() -> None:
    """Norms, then levels + s: of a bucket of zeros all s, and a norm of 0."""
    vector = torch.tensor([0.0, -0.0, 2.0, -2.0])
    message = QSGD(4, 2, "max").encode(vector, context(4), State())
    assert message[:8].view(torch.float32).tolist() == [0.0, 2.0]
    assert message[8:].tolist() == [7 + 14 * 16, 7 + 0 * 16]


def test_encoding_leaves_the_vector_alone() -> None:
    """With a short last bucket, and without."""
    for length in (13, 14):
        vector = torch.randn(length)
        copy = vector.clone()
        sent(QSGD(bucket_entries=7), vector)
        assert torch.equal(vector, copy)


def test_draws_differ_by_worker_step_and_seed() -> None:
    vector = torch.randn(500)
    first = sent(QSGD(), vector)
    assert torch.equal(first, sent(QSGD(), vector))
    assert not torch.equal(first, sent(QSGD(), vector, step=1))
    assert not torch.equal(first, sent(QSGD(), vector, worker=Worker(1, 2)))
    assert not torch.equal(first, sent(QSGD(seed=1), vector))


@pytest.mark.parametrize(
    ("compressor", "length", "single", "double"),
    [
        (QSGD(), 14_700_000, 4 * 28_711 + 7_350_000, 8 * 28_711 + 7_350_000),
        (QSGD(8), 512, 516, 520),
        (QSGD(2), 513, 8 + 129, 16 + 129),
        (QSGD(4, 3), 7, 12 + 4, 24 + 4),
        (QSGD(), 0, 0, 0),
    ],
)
def test_size(compressor: QSGD, length: int, single: int, double: int) -> None:
    where = context(length)
    for dtype, size in ((torch.float32, single), (torch.float64, double)):
        assert compressor.size(where, dtype) == size
        if length < 1000:
            assert compressor.encode(torch.ones(length, dtype=dtype), where, State()).numel() == size
    assert compressor.size(where) == single


def test_bad_options() -> None:
    for bits in (1, 3, 16, 4.0, True, None, "4"):
        with pytest.raises(ConfigError, match=f"compressor.bits must be one of 2, 4, 8, got {bits!r}"):
            QSGD(bits)
    with pytest.raises(ConfigError, match=r"compressor.norm must be one of l2, max, got 'l1'"):
        QSGD(norm="l1")
    for entries in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=r"compressor.bucket_entries must be an integer, at least 1"):
            QSGD(bucket_entries=entries)
    with pytest.raises(ConfigError, match=r"compressor.seed must be an integer, got 'x'"):
        QSGD(seed="x")
