"""TernGrad."""

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
from spardl.compressors import Mass, TernGrad
from spardl.method.method import Method
from spardl.method.residuals import NoResidual
from spardl.protocol.programs import Context, State, Worker, seeded_generator
from spardl.vector.layout import Layout
from tests.support.harness import Bench, context, layout_of

DTYPES = [torch.float32, torch.float64]
LAYOUT = Layout.of([(3, 5), (4,), (0,), (1,), (2, 8)])


def sent(compressor: TernGrad, vector: Tensor, step: int = 0, rank: int = 0, layout: Layout = LAYOUT) -> Tensor:
    """What the others get of a vector."""
    where = Context(Worker(rank, 8), layout, step)
    return compressor.decode(compressor.encode(vector, where, State()), where, vector.dtype)


def clipped(layer: npt.NDArray[np.float64], clip: float | None) -> npt.NDArray[np.float64]:
    if clip is None or not len(layer):
        return layer
    limit = clip * np.sqrt(np.mean(layer**2))
    return np.clip(layer, -limit, limit)


def reference(
    vector: npt.NDArray[np.float64], draws: npt.NDArray[np.float64], layout: Layout, clip: float | None
) -> None:
    """Overwrites a vector with its ternary form, layer by layer and entry by entry, for given draws."""
    for start, stop in layout.tensors:
        layer = clipped(vector[start:stop].copy(), clip)
        scale = np.abs(layer).max(initial=0)
        for i in range(stop - start):
            ratio = layer[i] / scale if scale else 0.0
            low = np.floor(ratio)
            vector[start + i] = scale * (low + (draws[start + i] < ratio - low))


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
@pytest.mark.parametrize(("workers", "length"), [(1, 5), (2, 24), (3, 61), (8, 200)])
def test_equals_the_reference(clip: float | None, workers: int, length: int) -> None:
    """A whole cluster over several steps, with the draws of every worker and step."""
    source = np.random.default_rng(length)
    bench = Bench.build(Method(TernGrad(clip, seed=5), AllGatherCodes(), NoResidual()), workers, length)
    for step in range(3):
        gradients = source.standard_normal((workers, length)) ** 3
        gradients[0, : length // 2] = 0
        expected = gradients.copy()
        for rank, row in enumerate(expected):
            draws = torch.rand(length, generator=seeded_generator(5, step, rank), dtype=torch.float64).numpy()
            reference(row, draws, layout_of(length), clip)
        for average in bench.step([torch.from_numpy(gradient) for gradient in gradients]):
            assert isinstance(average, Tensor)
            np.testing.assert_allclose(average.numpy(), expected.mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [None, 2.5, 0.5])
def test_right_on_average(clip: float | None, dtype: torch.dtype) -> None:
    """Without clipping the mean is the vector, with it the clipped one: of layers that hold the same many times."""
    times = 5000
    layers = [torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype) for size in (15, 1, 4)]
    layers[0][4] = 20
    layout = Layout.of([(times, len(layer)) for layer in layers])
    found = sent(TernGrad(clip), torch.cat([layer.repeat(times) for layer in layers]), layout=layout)
    for layer, (start, stop) in zip(layers, layout.tensors, strict=True):
        rows = found[start:stop].view(times, -1).double().numpy()
        true = clipped(layer.double().numpy(), clip)
        scale = np.abs(true).max()
        assert {*np.abs(rows).round(3).flat} <= {0.0, scale.round(3)}
        chance = np.abs(true / scale)
        deviation = scale * np.sqrt(chance * (1 - chance).clip(0) / times)
        assert np.all(np.abs(rows.mean(0) - true) <= 5 * deviation + 1e-5 * scale)


@pytest.mark.parametrize("clip", [None, 2.5])
def test_it_declares_whether_it_is_biased(clip: float | None) -> None:
    """By the mean of a layer with an entry far out, which clipping alone moves."""
    layer, times = torch.cat((torch.full((99,), 0.1), torch.tensor([20.0]))), 400
    compressor, layout = TernGrad(clip), Layout.of([(100,)] * times)
    rows = sent(compressor, layer.repeat(times), layout=layout).view(times, -1)
    off = float(rows[:, -1].mean() - layer[-1])
    assert (abs(off) < 1e-3) == (compressor.own_mass is Mass.UNBIASED)
    assert (off < -10) == (compressor.own_mass is Mass.CLIPPED)


def test_clipping_moves_what_is_far_out_and_nothing_else() -> None:
    """And a layer of equal entries, or of one, has no entry far out."""
    layout = Layout.of([(100,), (1,), (3,)])
    vector = torch.cat((torch.full((99,), 0.0), torch.tensor([10.0, 7.0, -2.0, -2.0, -2.0])))
    assert sent(TernGrad(None), vector, layout=layout).tolist() == vector.tolist()
    found = sent(TernGrad(2.5), vector, layout=layout)
    assert found[:99].tolist() == [0.0] * 99
    # The deviation of 99 zeros and 10 is 1.
    torch.testing.assert_close(found[99:], torch.tensor([2.5, 7.0, -2.0, -2.0, -2.0]))


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30),
    st.sampled_from([None, 2.5, 0.1, 1e-300]),
    st.sampled_from(DTYPES),
)
def test_finite_for_all_finite_vectors(numbers: list[float], clip: float | None, dtype: torch.dtype) -> None:
    """From the smallest denormal to the largest number, zeros, and no entries at all."""
    vector = torch.tensor(numbers, dtype=dtype)
    copy, where = vector.clone(), context(len(numbers))
    found = sent(TernGrad(clip), vector, layout=where.layout)
    assert torch.equal(vector, copy)
    assert found.shape == vector.shape
    assert found.dtype is dtype
    for start, stop in where.layout.tensors:
        if stop > start:
            assert found[start:stop].abs().max() <= vector[start:stop].abs().max()
    assert bool(((found == 0) | (found.sign() == vector.sign())).all())


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype, clip: float | None) -> None:
    for number in (torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        vector = torch.full((LAYOUT.length,), -number, dtype=dtype)
        assert torch.equal(sent(TernGrad(clip), vector), vector)


@pytest.mark.parametrize("clip", [None, 2.5])
def test_the_message_by_hand(clip: float | None) -> None:
    """Scales, then signs + 1: of a layer of zeros all 1, and a scale of 0."""
    where = Context(Worker(0, 1), Layout.of([(2,), (0,), (2,)]), 0)
    message = TernGrad(clip).encode(torch.tensor([0.0, -0.0, 3.0, -3.0]), where, State())
    assert message[:12].view(torch.float32).tolist() == [0.0, 0.0, 3.0]
    assert message[12:].tolist() == [1 + 1 * 4 + 2 * 16 + 0 * 64]


def test_a_clip_below_all_numbers_leaves_the_signs() -> None:
    vector = torch.tensor([3.0, -2.0, 0.0])
    found = sent(TernGrad(1e-300), vector, layout=Layout.flat(3))
    assert found.sign().tolist() == [1.0, -1.0, 0.0]


def test_draws_differ_by_worker_step_and_seed() -> None:
    vector = torch.randn(LAYOUT.length)
    first = sent(TernGrad(), vector)
    assert torch.equal(first, sent(TernGrad(), vector))
    assert not torch.equal(first, sent(TernGrad(), vector, step=1))
    assert not torch.equal(first, sent(TernGrad(), vector, rank=1))
    assert not torch.equal(first, sent(TernGrad(seed=1), vector))


def test_size() -> None:
    """A scale per tensor, and a byte for four entries."""
    where = Context(Worker(0, 1), LAYOUT, 0)
    assert LAYOUT.length == 36
    for dtype, size in ((torch.float32, 5 * 4 + 9), (torch.float64, 5 * 8 + 9)):
        assert TernGrad().size(where, dtype) == size
        assert TernGrad().encode(torch.ones(36, dtype=dtype), where, State()).numel() == size
    assert TernGrad().size(Context(Worker(0, 1), Layout(()), 0)) == 0


def test_bad_options() -> None:
    for clip in (0, -1, float("nan"), float("inf"), True, "x"):
        with pytest.raises(
            ConfigError, match=f"compressor.clip must be above 0, or null for no clipping, got {clip!r}"
        ):
            TernGrad(clip)
    with pytest.raises(ConfigError, match=r"compressor.seed must be an integer, got 1.5"):
        TernGrad(seed=1.5)
