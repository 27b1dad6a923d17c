"""PowerSGD: a slow reference of the whole cluster, torch's communication hook in real processes, and hard cases."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # DistributedDataParallel imports it: here, once for all workers that are forked
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster, SimulatedCluster
from spardl.communicators import Backend, Dense
from spardl.compressors import PowerSGD
from spardl.compressors.powersgd import PowerSGDState
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual
from spardl.protocol.programs import Worker
from spardl.vector.layout import Layout
from tests.support.harness import NETWORK, Bench, context, run_method, run_workers, same_bits, to_dense
from tests.support.quick import some_quick

# Two convolutions of one shape, another, a wide and a tall matrix, and uncompressed tensors: vectors, a scalar,
# matrices that would not shrink, empty tensors.
CONVOLUTIONS = [(8, 4, 3, 3), (8,), (0,), (8, 4, 3, 3), (), (6, 8, 2)]
LAYOUT = Layout.of([*CONVOLUTIONS, (3, 4), (5, 40), (11,), (4, 4), (40, 7), (0, 5), (5, 0), (9, 1)])


def is_compressed(shape: tuple[int, ...], rank: int) -> bool:
    return len(shape) >= 2 and rank * (shape[0] + math.prod(shape[1:])) < math.prod(shape)


def gradients_of(layout: Layout, workers: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(layout.length, generator=source, dtype=torch.float64).to(dtype) for _ in range(workers)]


class Cluster(Bench):
    """A method's workers in a simulated cluster, on any layout."""

    def __init__(self, method: Method, layout: Layout, workers: int, dtype: torch.dtype = torch.float64) -> None:
        states = [method.init_state(layout, dtype) for _ in range(workers)]
        super().__init__(method, SimulatedCluster(workers, NETWORK, count_local=False), states)

    def average(self, gradients: list[Tensor]) -> Tensor:
        averages = self.step(gradients)
        assert all(same_bits(average, averages[0]) for average in averages)
        bases = [self.basis(rank) for rank in range(len(self.states))]
        assert all(same_bits(basis, bases[0]) and bool(basis.isfinite().all()) for basis in bases)
        return to_dense(averages[0])

    def basis(self, rank: int = 0) -> Tensor:
        state = self.states[rank].compression
        assert isinstance(state, PowerSGDState)
        return state.basis


def powersgd(rank: int, *, residual: bool = True, **options: Any) -> Method:
    return Method(PowerSGD(rank, **options), Dense(), LocalResidual() if residual else NoResidual())


class Reference:
    """The published algorithms with whole matrices, one after the other, all workers in plain arrays."""

    def __init__(self, layout: Layout, rank: int, workers: int, basis: Tensor, residual: bool) -> None:
        self.layout, self.rank, self.workers, self.residual = layout, rank, workers, residual
        self.errors = [np.zeros(layout.length) for _ in range(workers)]
        # The factors of matrices of one shape lie together, so the shapes come in the order of their first matrix.
        compressed = [i for i, shape in enumerate(layout.shapes) if is_compressed(shape, rank)]
        matrices = [(layout.shapes[i][0], math.prod(layout.shapes[i][1:])) for i in compressed]
        order = sorted(zip(matrices, compressed, strict=True), key=lambda entry: (matrices.index(entry[0]), entry[1]))
        self.q, begin = {}, 0
        for (_, columns), i in order:
            self.q[i] = basis.numpy()[begin : begin + columns * rank].reshape(columns, rank).copy()
            begin += columns * rank
        assert begin == basis.numel()

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        inputs = [g + e if self.residual else g for g, e in zip(gradients, self.errors, strict=True)]
        average = np.zeros(self.layout.length)
        for i, (shape, (start, stop)) in enumerate(zip(self.layout.shapes, self.layout.tensors, strict=True)):
            parts = [vector[start:stop] for vector in inputs]
            if i in self.q:
                matrices = [part.reshape(shape[0], -1) for part in parts]
                average[start:stop] = self._low_rank(i, matrices).reshape(-1)
            else:
                average[start:stop] = sum(parts) / self.workers
        self.errors = [vector - average for vector in inputs]
        for i, (start, stop) in enumerate(self.layout.tensors):
            if i not in self.q:
                for error in self.errors:
                    error[start:stop] = 0
        return average

    def _low_rank(self, i: int, matrices: list[np.ndarray]) -> np.ndarray:
        p = sum(matrix @ self.q[i] for matrix in matrices) / self.workers
        for column in range(self.rank):
            for earlier in range(column):
                p[:, column] -= (p[:, earlier] @ p[:, column]) * p[:, earlier]
            p[:, column] /= np.sqrt((p[:, column] ** 2).sum())
        self.q[i] = sum(matrix.T @ p for matrix in matrices) / self.workers
        return p @ self.q[i].T


@pytest.mark.parametrize("workers,rank,residual", some_quick(product([1, 2, 3, 5, 8], range(1, 5), [True, False]), 3))
def test_equals_the_reference(workers: int, rank: int, residual: bool) -> None:
    cluster = Cluster(powersgd(rank, residual=residual), LAYOUT, workers)
    reference = Reference(LAYOUT, rank, workers, cluster.basis(), residual)
    for step in range(6):
        gradients = gradients_of(LAYOUT, workers, seed=10 * workers + step)
        expected = reference.step([gradient.numpy() for gradient in gradients])
        torch.testing.assert_close(cluster.average(gradients), torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
        if residual:
            for state, error in zip(cluster.states, reference.errors, strict=True):
                torch.testing.assert_close(state.memory, torch.from_numpy(error), rtol=1e-9, atol=1e-9)


def test_what_is_sent_as_it_is_leaves_no_residual() -> None:
    cluster = Cluster(powersgd(2), LAYOUT, 3)
    gradients = gradients_of(LAYOUT, 3, seed=0)
    average = cluster.average(gradients)
    for shape, (start, stop) in zip(LAYOUT.shapes, LAYOUT.tensors, strict=True):
        if not is_compressed(shape, 2):
            torch.testing.assert_close(average[start:stop], torch.stack(gradients)[:, start:stop].mean(0))
            assert not any(state.memory[start:stop].any() for state in cluster.states)


@pytest.mark.parametrize("communicator", [Dense(), Backend()], ids=["dense", "backend"])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_costs(workers: int, communicator: Dense | Backend) -> None:
    """Two dense sums: 4(P-1) rounds, and 2(P-1)/P words for each entry of a factor or of a small tensor."""
    rank, layout = 2, Layout.of([(8, 16), (24,), (12, 4, 6), (8, 16), (2, 4)])
    compressed = rank * (8 + 16) * 2 + rank * (12 + 24)
    method = Method(PowerSGD(rank), communicator, LocalResidual())
    cluster = Cluster(method, layout, workers)
    cluster.average(gradients_of(layout, workers, seed=0))
    for ledger in cluster.cluster.ledgers:
        assert ledger.rounds == 4 * (workers - 1)
        assert ledger.words == 2 * (workers - 1) * (compressed + 24 + 8) // workers
        assert ledger.bytes_sent == 8 * ledger.words


def test_sizes_of_the_sums() -> None:
    compressor, whole = PowerSGD(2), context(0)._replace(layout=LAYOUT)
    rows = 8 + 8 + 6 + 5 + 40
    columns = 36 + 36 + 16 + 40 + 7
    assert compressor.sizes(whole) == [2 * rows + 8 + 1 + 12 + 11 + 16 + 9, 2 * columns]
    assert compressor.sizes(whole._replace(layout=Layout.of([(5,), (2, 2)]))) == [9]
    assert compressor.sizes(context(0)) == [0]


def test_without_matrices_there_is_one_exact_sum() -> None:
    layout = Layout.of([(7,), (2, 3), (0,)])
    cluster = Cluster(powersgd(4), layout, 3)
    gradients = gradients_of(layout, 3, seed=1)
    torch.testing.assert_close(cluster.average(gradients), torch.stack(gradients).mean(0))
    assert cluster.cluster.ledgers[0].rounds == 4
    assert cluster.basis().numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sum_of_low_rank_is_sent_exactly(dtype: torch.dtype) -> None:
    """Each worker's matrix has rank 1, their sum rank 3; a residual would add rounding errors of full rank."""
    layout, source = Layout.of([(20, 3, 5), (20, 15)]), torch.Generator().manual_seed(2)
    cluster = Cluster(powersgd(3, residual=False), layout, 3, dtype)
    for _ in range(3):
        pairs = [torch.randn(2, 2, 20, generator=source, dtype=dtype) for _ in range(3)]
        gradients = [torch.cat([torch.outer(p, q[:15]).view(-1) for p, q in pair]) for pair in pairs]
        torch.testing.assert_close(cluster.average(gradients), torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-4)


def test_warm_start_converges_to_the_best_approximation() -> None:
    """Subspace iteration on one matrix finds its largest singular values; one step from random columns does not."""
    matrix = gradients_of(Layout.of([(30, 20)]), 1, seed=3)[0].view(30, 20)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    found = {}
    for warm_start in (True, False):
        cluster = Cluster(powersgd(2, residual=False, warm_start=warm_start), Layout.of([(30, 20)]), 2)
        for _ in range(200):
            found[warm_start] = cluster.average([matrix.view(-1)] * 2).view(30, 20)
    torch.testing.assert_close(found[True], best, rtol=1e-6, atol=1e-6)
    assert torch.dist(found[False], matrix) > 1.05 * torch.dist(best, matrix)


def test_equal_workers_give_the_result_of_one_worker() -> None:
    one, many = Cluster(powersgd(2), LAYOUT, 1), Cluster(powersgd(2), LAYOUT, 6)
    for step in range(4):
        (gradient,) = gradients_of(LAYOUT, 1, seed=step)
        torch.testing.assert_close(many.average([gradient] * 6), one.average([gradient]), rtol=1e-9, atol=1e-9)


def test_a_power_of_two_on_the_gradients_changes_no_other_bit() -> None:
    """Very small and very large gradients are approximated as well as any."""
    plain = [gradients_of(LAYOUT, 3, seed, torch.float32) for seed in range(3)]
    expected = Cluster(powersgd(2), LAYOUT, 3, torch.float32)
    averages = [expected.average(gradients) for gradients in plain]
    for factor in (2.0**-90, 2.0**90):
        cluster = Cluster(powersgd(2), LAYOUT, 3, torch.float32)
        for gradients, average in zip(plain, averages, strict=True):
            assert same_bits(cluster.average([gradient * factor for gradient in gradients]), average * factor)


def test_zero_gradients_leave_the_basis_alone() -> None:
    cluster = Cluster(powersgd(2), LAYOUT, 4)
    for step in range(3):
        before = cluster.basis()
        zeros = [torch.zeros(LAYOUT.length, dtype=torch.float64)] * 4
        if step == 2:  # all four are refused
            zeros = [torch.full_like(zero, math.nan) for zero in zeros]
        assert not cluster.average(zeros).any()
        torch.testing.assert_close(cluster.basis().abs(), before.abs())
    gradients = gradients_of(LAYOUT, 4, seed=0)
    fresh = Cluster(powersgd(2), LAYOUT, 4)
    torch.testing.assert_close(cluster.average(gradients), fresh.average(gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_of_lower_rank_than_the_factors(dtype: torch.dtype) -> None:
    """Dead rows and columns, one entry, equal rows: orthonormal columns are still found, and later steps recover."""
    layout = Layout.of([(12, 10), (12, 10), (12, 10)])
    first = torch.zeros(3, 12, 10, dtype=dtype)
    first[0, 3:, 4] = 1
    first[1, 11, 9] = -2
    first[2] = 0.5
    cluster = Cluster(powersgd(4), layout, 2, dtype)
    for _ in range(4):
        torch.testing.assert_close(cluster.average([first.view(-1)] * 2), first.view(-1))
    for basis in cluster.basis().view(3, 10, 4):
        torch.testing.assert_close(basis.t() @ basis, torch.eye(4, dtype=dtype))
    low = [torch.randn(12, 4, dtype=dtype) @ torch.randn(4, 10, dtype=dtype) for _ in range(3)]
    later = torch.stack(low).view(-1)
    for _ in range(2):
        average = cluster.average([later] * 2)
    torch.testing.assert_close(average, later, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [7, 1])
def test_an_overflow_is_counted_and_goes_no_further(columns: int) -> None:
    """With one large column, only the right factor overflows."""
    layout = Layout.of([(40, 7), (3,)])
    cluster = Cluster(powersgd(2), layout, 2, torch.float32)
    cluster.average(gradients_of(layout, 2, seed=0, dtype=torch.float32))
    huge = torch.zeros(layout.length)
    huge[:280].view(40, 7)[:, :columns] = 1e38
    average = cluster.average([huge, huge])
    assert bool(average.isfinite().all())
    assert not average[:280].view(40, 7)[:, :columns].any()
    assert [state.refused for state in cluster.states] == [1, 1]
    assert all(bool(state.memory.isfinite().all()) for state in cluster.states)
    assert bool(cluster.average(gradients_of(layout, 2, seed=1, dtype=torch.float32)).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype) -> None:
    """The same approximation, to the digits that the type has."""
    half, whole = Cluster(powersgd(2), LAYOUT, 2, dtype), Cluster(powersgd(2), LAYOUT, 2)
    for step in range(3):
        gradients = gradients_of(LAYOUT, 2, seed=step, dtype=dtype)
        found, expected = half.average(gradients), whole.average([gradient.double() for gradient in gradients])
        assert found.dtype == half.basis().dtype == dtype
        assert torch.dist(found.double(), expected) < 0.1 * expected.norm()


def test_the_first_basis_comes_from_the_seed() -> None:
    one, same, other, far = (PowerSGD(2, seed=s).init_state(LAYOUT, torch.float64, "cpu") for s in (0, 0, 1, 1 << 32))
    assert same_bits(one.basis, same.basis)
    assert same_bits(one.basis.float(), PowerSGD(2).init_state(LAYOUT, torch.float32, "cpu").basis)
    assert not torch.allclose(one.basis, other.basis)
    assert not torch.allclose(one.basis, far.basis)


def test_without_warm_start_every_step_has_columns_of_its_own() -> None:
    gradients = gradients_of(LAYOUT, 2, seed=0)
    cold = Cluster(powersgd(2, residual=False, warm_start=False), LAYOUT, 2)
    averages = [cold.average(gradients) for _ in range(3)]
    assert cold.basis().numel() == 0
    assert not torch.allclose(averages[0], averages[1])
    assert not torch.allclose(averages[1], averages[2])
    assert same_bits(averages[0], Cluster(powersgd(2), LAYOUT, 2).average(gradients))
    resumed = Cluster(powersgd(2, residual=False, warm_start=False), LAYOUT, 2)
    for state in resumed.states:
        state.step = 2
    assert same_bits(averages[2], resumed.average(gradients))


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_saved_state_continues_to_the_bit(warm_start: bool) -> None:
    one = Cluster(powersgd(2, warm_start=warm_start), LAYOUT, 3)
    one.average(gradients_of(LAYOUT, 3, seed=0))
    other = Cluster(powersgd(2, warm_start=warm_start, seed=0), LAYOUT, 3)
    for state, saved in zip(other.states, one.states, strict=True):
        state.load_state_dict(saved.state_dict())
    for step in range(1, 4):
        gradients = gradients_of(LAYOUT, 3, seed=step)
        assert same_bits(one.average(gradients), other.average(gradients))


def test_bad_options() -> None:
    for rank in (0, -1, 1.5, "two", True, None):
        with pytest.raises(ConfigError, match=r"compressor\.rank must be an integer, at least 1, got"):
            PowerSGD(rank=rank)
    for seed in (-1, 0.5, "x", False):
        with pytest.raises(ConfigError, match=r"compressor\.seed must be an integer, at least 0, got"):
            PowerSGD(seed=seed)
    with pytest.raises(ConfigError, match=r"compressor\.warm_start must be true or false, got 1"):
        PowerSGD(warm_start=1)


class Hooked:
    """A model in torch's own data parallelism, with its PowerSGD hook."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(14, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()]
        self.model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(24, 9)).double())
        self.state = torch_hooks.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.register_comm_hook(None, self._hook)

    def _hook(self, _, bucket):  # torch reads the annotations, and takes no strings
        assert bucket.is_last()
        self.gradient = bucket.buffer().clone()
        self.parameters = bucket.parameters()
        return torch_hooks.powerSGD_hook(self.state, bucket)

    def step(self, number: int, batch: int, worker: Worker) -> tuple[Tensor, Tensor]:
        """This worker's gradient and the average that torch makes of all."""
        source = torch.Generator().manual_seed(100 * number + worker.rank)
        inputs, targets = (torch.randn(batch, size, generator=source, dtype=torch.float64) for size in (14, 9))
        self.model.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        average = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.optimizer.step()
        return self.gradient, average


def _train_with_both(cluster: ProcessGroupCluster, rank: int) -> list[Any]:
    """Copies torch's first basis and residual, and goes on from there with the same gradients."""
    (worker,), found, theirs, method = cluster.local_workers, [], Hooked(rank), powersgd(rank)
    for step in range(3):  # two dense ones, and the first compressed one
        theirs.step(step, batch=8, worker=worker)
    mine = method.init_state(Layout.of(parameter.shape for parameter in theirs.parameters), torch.float64)
    assert isinstance(mine.compression, PowerSGDState)
    assert mine.compression.basis.shape == theirs.state.q_memory_dict[0].shape
    mine.compression.basis = theirs.state.q_memory_dict[0].clone()
    mine.memory.copy_(theirs.state.error_dict[0])
    for step in range(3, 9):
        gradient, expected = theirs.step(step, batch=8, worker=worker)
        method.accumulate(gradient, mine)
        (average,) = run_method(method, cluster, [mine])
        # Of what it sends as it is torch keeps the difference from the average: zero, all workers taken together.
        errors = torch.stack((mine.memory, theirs.state.error_dict[0]))
        matrices = torch.cat([torch.full((p.numel(),), p.dim() > 1) for p in theirs.parameters])
        found.append((average, expected, errors[:, matrices], errors[:, ~matrices]))
    return found


def _low_rank_with_both(cluster: ProcessGroupCluster) -> list[Any]:
    """One sample per worker: the gradient of a layer has rank 1, the sum over the workers at most P."""
    (worker,), found, theirs, method = cluster.local_workers, [], Hooked(cluster.size), powersgd(cluster.size)
    for step in range(2):
        theirs.step(step, batch=1, worker=worker)
    mine = method.init_state(Layout.of(parameter.shape for parameter in theirs.parameters), torch.float64)
    for step in range(2, 6):
        gradient, average = theirs.step(step, batch=1, worker=worker)
        method.accumulate(gradient, mine)
        dist.all_reduce(gradient)
        found.append((gradient / cluster.size, average, *run_method(method, cluster, [mine])))
    return found


def test_equals_torchs_hook_while_training() -> None:
    per_rank = run_workers(3, lambda cluster: [step for rank in (1, 2, 3) for step in _train_with_both(cluster, rank)])
    assert [len(found) for found in per_rank] == [18, 18, 18]
    for found in zip(*per_rank, strict=True):
        for average, expected, matrices, others in found:
            torch.testing.assert_close(average, expected, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(matrices[0], matrices[1], rtol=1e-8, atol=1e-10)
            assert not others[0].any()
        left = torch.stack([others[1] for *_, others in found]).sum(0)
        torch.testing.assert_close(left, torch.zeros_like(left), rtol=0, atol=1e-10)


def test_low_ranks_are_exact_with_torchs_hook_and_with_ours() -> None:
    for found in run_workers(3, _low_rank_with_both):
        for exact, theirs, ours in found:
            assert exact.abs().max() > 0.01
            torch.testing.assert_close(theirs, exact, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-9)
