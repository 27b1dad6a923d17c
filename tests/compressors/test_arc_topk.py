"""ARC-Top-K: whole matrices as a reference, the conditions of its proof, and hard cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import SimulatedCluster
from spardl.communicators import Dense
from spardl.compressors import ARCTopK
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual
from spardl.protocol.programs import Worker, seeded_generator
from spardl.vector.layout import Layout
from tests.support.harness import NETWORK, Bench, context, same_bits, to_dense

# Two matrices of equal width, a convolution, and uncompressed tensors: vectors, a scalar, a matrix that would grow.
LAYOUT = Layout.of([(20, 30), (20,), (), (0,), (10, 4, 3, 3), (40, 30), (6, 2), (7,)])
MATRICES = {0: (20, 30), 4: (10, 36), 5: (40, 30)}


def bench(workers: int, compressor: ARCTopK, dtype: torch.dtype = torch.float64, *, residual: bool = True) -> Bench:
    method = Method(compressor, Dense(), LocalResidual() if residual else NoResidual())
    states = [method.init_state(LAYOUT, dtype) for _ in range(workers)]
    return Bench(method, SimulatedCluster(workers, NETWORK, count_local=False), states)


def drawn(workers: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUT.length, generator=source, dtype=torch.float64).to(dtype) for _ in range(workers)]


def kept(total: np.ndarray, compressor: ARCTopK, step: int) -> np.ndarray:
    """Which entries of a sum are sent, matrix by matrix."""
    found = np.ones(LAYOUT.length, dtype=bool)
    for number, (rows, cols) in MATRICES.items():
        generator = seeded_generator(compressor.seed, step, cols)
        random = torch.randn(cols, compressor.sketch, generator=generator).double().numpy()
        start, stop = LAYOUT.tensors[number]
        lengths = np.linalg.norm(total[start:stop].reshape(rows, cols) @ random, axis=1)
        sent = np.zeros((rows, cols), dtype=bool)
        sent[np.argsort(-lengths)[: max(1, round(compressor.density * rows))]] = True
        found[start:stop] = sent.reshape(-1)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("residual", [True, False], ids=["local", "none"])
def test_equals_the_reference(workers: int, residual: bool) -> None:
    compressor = ARCTopK(density=0.2, sketch=2, seed=3)
    found = bench(workers, compressor, residual=residual)
    errors = [np.zeros(LAYOUT.length) for _ in range(workers)]
    for step in range(5):
        gradients = drawn(workers, 10 * workers + step)
        inputs = [
            gradient.numpy() + (error if residual else 0) for gradient, error in zip(gradients, errors, strict=True)
        ]
        sent = kept(sum(inputs), compressor, step)
        averages = found.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        np.testing.assert_allclose(to_dense(averages[0]), np.where(sent, sum(inputs) / workers, 0), rtol=1e-12)
        errors = [np.where(sent, 0, each) for each in inputs]


def test_a_wide_sketch_finds_the_largest_rows() -> None:
    total = drawn(1, 0)[0].view(-1)
    start, stop = LAYOUT.tensors[5]
    total[start:stop].view(40, 30)[[3, 17, 39]] *= 3
    (average,) = bench(1, ARCTopK(density=3 / 40, sketch=20)).step([total.clone()])
    rows = to_dense(average)[start:stop].view(40, 30).any(1).nonzero().view(-1)
    assert rows.tolist() == [3, 17, 39]


@pytest.mark.parametrize("sketch", [1, 4])
def test_contracts_at_least_as_much_as_random_rows(sketch: int) -> None:
    """On average over the sketches, the residual of a matrix is at most 1 - k / rows of it."""
    compressor = ARCTopK(density=0.1, sketch=sketch)
    found, (gradient,) = bench(1, compressor, residual=False), drawn(1, 1)
    start, stop = LAYOUT.tensors[5]
    left = []
    for _ in range(60):
        (average,) = found.step([gradient.clone()])
        lost = (gradient - to_dense(average))[start:stop]
        left.append(float(lost.square().sum() / gradient[start:stop].square().sum()))
    assert max(left) < 1
    assert np.mean(left) < 1 - 4 / 40
    assert len(set(left)) > 1, "each step has another sketch"


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_cost(workers: int) -> None:
    """The sketches, then the rows: 2(P-1)/P words of each."""
    found = bench(workers, ARCTopK(density=0.2, sketch=2))
    found.step(drawn(workers, 0))
    sketches = 2 * (20 + 10 + 40)
    values = 4 * 30 + 2 * 36 + 8 * 30 + 20 + 1 + 12 + 7
    for rank, ledger in enumerate(found.cluster.ledgers):
        where = context(LAYOUT.length, Worker(rank, workers))._replace(layout=LAYOUT)
        cost = found.method.cost(where)
        assert ledger.rounds == cost.rounds.high == 4 * (workers - 1)
        assert cost.words.low <= ledger.words <= cost.words.high
        assert ledger.words == pytest.approx(2 * (workers - 1) / workers * (sketches + values), abs=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    averages = bench(3, ARCTopK(density=0.1), dtype).step(drawn(3, 2, dtype))
    assert all(same_bits(average, averages[0]) for average in averages)
    assert to_dense(averages[0]).dtype == dtype


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_matrices_of_any_size(size: float) -> None:
    """Matrices of zeros, and of entries whose squares underflow or overflow."""
    gradients = [gradient * size for gradient in drawn(2, 4, torch.float32)]
    (average, _) = bench(2, ARCTopK(density=0.1), torch.float32).step(gradients)
    assert to_dense(average).isfinite().all()
    assert bool(to_dense(average)[slice(*LAYOUT.tensors[4])].any()) == (size > 0)


@pytest.mark.parametrize("layout", [Layout.of([(7,)]), Layout.of([]), Layout.of([(0, 3)]), Layout.of([(3, 2)])])
def test_where_there_is_nothing_to_compress_there_is_one_sum(layout: Layout) -> None:
    method = spardl.make_method("arc_topk")
    states = [method.init_state(layout, torch.float64) for _ in range(2)]
    found = Bench(method, SimulatedCluster(2, NETWORK, count_local=False), states)
    gradients = [torch.full((layout.length,), value, dtype=torch.float64) for value in (1.0, 3.0)]
    assert to_dense(found.step(gradients)[0]).tolist() == [2.0] * layout.length


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"density": 0}, "compressor.density must be above 0 and at most 1, got 0; 0.01 keeps 1% of the rows"),
        ({"density": math.nan}, "compressor.density must be above 0"),
        ({"sketch": 0}, "compressor.sketch must be an integer, at least 1"),
        ({"seed": 1.5}, "compressor.seed must be an integer"),
    ],
)
def test_bad_options(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        spardl.make_method("arc_topk", **options)
