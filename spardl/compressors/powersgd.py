"""PowerSGD: low-rank approximation of each gradient matrix, with one subspace iteration per step.

Source: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019, Algorithms 1 and 2. Two dense sums: with ``dense`` 4(P-1) rounds and 2(P-1)/P (s + m) words per worker,
where s is the sum of rank * (rows + columns) over the compressed matrices and m the number of other entries.

In the paper, the right factor itself is the next basis, so its columns scale with the singular values. Here they are
orthonormalized after each step; torch's communication hook does so before each step. The columns span the same space,
but this variant also works for very small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_bool, check_integer
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.protocol.programs import Combination, Context, Phase, Program, State, seeded_generator
from spardl.vector.accumulator import Accumulator
from spardl.vector.kernels import runs_triton
from spardl.vector.layout import Layout
from spardl.vector.sparse import Sum

__all__ = ["METHODS", "PowerSGD", "PowerSGDState"]

METHODS = (Combination("powersgd", compressor="powersgd", communicator="dense", residual="local"),)


@dataclass
class PowerSGDState(State):
    """State of PowerSGD, equal on all workers.

    Attributes:
        basis: Orthonormal bases of the row spaces found in the last step, one per compressed matrix, flattened and
            concatenated: shape (sum of rank * columns,); empty without warm start.
    """

    basis: Tensor


@dataclass(frozen=True)
class PowerSGD(DenseCompressor):
    """Sends two thin factors of every matrix; their product approximates it.

    A tensor with two or more dimensions is treated as a matrix, whose rows are the first dimension. Other tensors, and
    those that would not shrink, are sent uncompressed. With a residual, an entry whose product overflows becomes zero
    in the average and in the residual.

    Workers compute orthonormal columns and products from equal sums and rely on bit-identical results, so all workers
    need the same kind of processor, the same libraries and the same number of threads.

    Args:
        rank: Number of columns of the factors; lower is more aggressive.
        warm_start: Whether a step starts from the result of the last one instead of random columns.
        seed: Seed of the random columns, equal on all workers.

    Raises:
        ConfigError: If a value is out of range.
    """

    rank: int = 4
    warm_start: bool = True
    seed: int = 0

    name = "powersgd"
    mass = Mass.LEFT
    by_matrix = True

    def __post_init__(self) -> None:
        check_integer("compressor.rank", self.rank, least=1)
        check_integer("compressor.seed", self.seed, least=0)
        check_bool("compressor.warm_start", self.warm_start)

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> PowerSGDState:
        """Returns a basis of random orthonormal columns, or an empty basis without warm start."""
        if not self.warm_start:
            return PowerSGDState(torch.empty(0, dtype=dtype, device=device))
        return PowerSGDState(self._random(_Plan.of(layout, self.rank), 0, dtype, device))

    def sizes(self, context: Context) -> list[int]:
        """Returns the number of entries in each of the two sums; only one number if no tensor is compressed.

        The first sum contains left factors and uncompressed tensors, the second one right factors.
        """
        plan = _Plan.of(context.layout, self.rank)
        first = plan.left_size + sum(stop - start for start, stop in plan.others)
        return [first, plan.right_size] if plan.stacks else [first]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums the left factors (products with the basis), then the right ones (products with the first sum).

        The first sum is orthonormalized in between. Returns the product of both, with the sums of the uncompressed
        tensors.
        """
        assert isinstance(state, PowerSGDState)
        yield Phase.SELECT
        values, plan = accumulated.values, _Plan.of(context.layout, self.rank)
        basis = state.basis if self.warm_start else self._random(plan, context.step, values.dtype, values.device)
        left = values.new_empty(plan.left_size)
        for matrix, p, q in plan.triples(values, left, basis):
            torch.mm(matrix, q, out=p)
        first = yield from total(torch.cat([left, *(values[start:stop] for start, stop in plan.others)]))
        yield Phase.SELECT
        left, others = _joined(map(_orthonormal, plan.lefts(first[: plan.left_size])), first), first[plan.left_size :]
        right = torch.empty_like(basis)
        for matrix, p, q in plan.triples(values, left, right):
            torch.mm(matrix.t(), p, out=q)
        if plan.stacks:
            right = yield from total(right)
        yield Phase.MERGE
        # The sign of an infinite factor is meaningless: adding zero times the factor makes it NaN.
        right = right.add(right, alpha=0)
        approximation = plan.expand(left, right, others, into=torch.empty_like(values))
        plan.leave(values, approximation, context.worker.size)
        if self.warm_start:
            state.basis = plan.renew(right, basis)
        return approximation

    def _random(self, plan: _Plan, step: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        # On the CPU and in float64, so that all devices and dtypes start from equal columns.
        basis = torch.randn(plan.right_size, generator=seeded_generator(self.seed, step), dtype=torch.float64)
        return _joined(map(_orthonormal, plan.rights(basis)), basis).to(device, dtype)


class _Stack(NamedTuple):
    """Matrices of equal shape.

    Attributes:
        rows: Number of rows per matrix.
        cols: Number of columns per matrix.
        starts: Positions in the vector where they start.
    """

    rows: int
    cols: int
    starts: list[int]

    def matrices(self, vector: Tensor) -> list[Tensor]:
        """Returns views of these matrices in a vector, shape (rows, cols) each."""
        return [vector[start : start + self.rows * self.cols].view(self.rows, self.cols) for start in self.starts]


@dataclass(frozen=True)
class _Plan:
    """Compressed matrices, and the memory layout of their factors: in sequence, grouped by shape.

    Attributes:
        rank: Number of columns of the factors.
        stacks: Compressed matrices, grouped by shape.
        others: Ranges of the uncompressed tensors.
    """

    rank: int
    stacks: list[_Stack]
    others: list[tuple[int, int]]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> _Plan:
        """Returns a plan to compress every tensor that shrinks, which has more than ``rank`` rows and columns."""
        starts: dict[tuple[int, int], list[int]] = {}
        others = []
        for shape, (start, stop) in zip(layout.shapes, layout.tensors, strict=True):
            rows, cols = math.prod(shape[:1]), math.prod(shape[1:])
            if rank * (rows + cols) < rows * cols:
                starts.setdefault((rows, cols), []).append(start)
            else:
                others.append((start, stop))
        return cls(rank, [_Stack(*shape, found) for shape, found in starts.items()], others)

    @property
    def left_size(self) -> int:
        """Number of entries of all left factors."""
        return self.rank * sum(stack.rows * len(stack.starts) for stack in self.stacks)

    @property
    def right_size(self) -> int:
        """Number of entries of all right factors."""
        return self.rank * sum(stack.cols * len(stack.starts) for stack in self.stacks)

    def lefts(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the left factors in ``flat``, one of shape (matrices, rows, rank) per stack."""
        return self._views(flat, [stack.rows for stack in self.stacks])

    def rights(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the right factors in ``flat``, one of shape (matrices, columns, rank) per stack."""
        return self._views(flat, [stack.cols for stack in self.stacks])

    def _views(self, flat: Tensor, lengths: list[int]) -> list[Tensor]:
        shapes = [(len(stack.starts), length, self.rank) for stack, length in zip(self.stacks, lengths, strict=True)]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def triples(self, vector: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields views of each compressed matrix in a vector and of its two factors."""
        for stack, lefts, rights in zip(self.stacks, self.lefts(left), self.rights(right), strict=True):
            yield from zip(stack.matrices(vector), lefts, rights, strict=True)

    def expand(self, left: Tensor, right: Tensor, others: Tensor, into: Tensor) -> Tensor:
        """Writes the products of the factors, and the uncompressed entries, to ``into``, shape (n,); returns it."""
        for matrix, p, q in self.triples(into, left, right):
            torch.mm(p, q.t(), out=matrix)
        if self.others:
            parts = others.split([stop - start for start, stop in self.others])
            torch._foreach_copy_(self._rest(into), parts)
        return into

    def _rest(self, vector: Tensor) -> list[Tensor]:
        """Views of the uncompressed tensors in a vector, shape (m,) each."""
        return [vector[start:stop] for start, stop in self.others]

    def leave(self, values: Tensor, approximation: Tensor, workers: int) -> None:
        """Subtracts this worker's share of the approximated sum from its vector, in place."""
        # The residuals of all workers must add up to the error of the sum.
        values.sub_(approximation, alpha=1 / workers)
        if self.others:
            torch._foreach_zero_(self._rest(values))

    def renew(self, right: Tensor, basis: Tensor) -> Tensor:
        """Returns the next basis: orthonormal right factors, but old columns where this step gave zeros or NaN."""
        return _joined(map(_orthonormal, self.rights(right), self.rights(basis)), basis)


def _peaks(factors: Tensor) -> Tensor:
    """Largest magnitude of each column, shape (..., 1, rank); NaN if it has one."""
    peaks: Tensor = torch.linalg.vector_norm(factors, ord=math.inf, dim=-2, keepdim=True)
    return peaks


def _orthonormal(factors: Tensor, old: Tensor | None = None) -> Tensor:
    """Orthonormal columns whose span contains that of the factors, shape (matrices, length, rank) with length > rank.

    Columns of ``old`` replace columns that are zero or contain a NaN.
    """
    # Householder QR works for any finite matrix, including rank-deficient and zero ones.
    columns: Tensor = torch.linalg.qr(_scaled(factors, old)).Q
    return columns


def _scaled(factors: Tensor, old: Tensor | None) -> Tensor:
    if runs_triton(factors) and factors.itemsize <= 4:
        from spardl.vector.kernels import gpu_factors  # noqa: PLC0415 - triton is installed only with CUDA

        return gpu_factors.scaled(factors, old)
    if old is not None:
        factors = torch.where(_peaks(factors) > 0, factors, old)
    wide = factors.to(torch.promote_types(factors.dtype, torch.float32))
    largest = _peaks(wide)
    return wide / largest.masked_fill(largest == 0, 1)


def _joined(factors: Iterable[Tensor], like: Tensor) -> Tensor:
    """Joins stacks of shape (matrices, length, rank) to one vector with the dtype and device of ``like``."""
    matrices = [matrix for stack in factors for matrix in stack.unbind()]
    return torch.cat(matrices).to(like.dtype).view(-1) if matrices else like.new_empty(0)
