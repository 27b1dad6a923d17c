"""ARC-Top-K: rows of matrices that all workers choose alike, by a sketch of their sum; no index travels.

Source: Chen et al., An All-Reduce Compatible Top-K Compressor for Communication-Efficient Distributed Learning, 2025
(arXiv 2510.26709). Each worker multiplies its matrix by the same thin random one; the sum of these products is the
product of the sum, and the lengths of its rows tell which rows of the sum are large. Two dense sums: with ``dense``
4(P-1) rounds and 2(P-1)/P (s + m) words per worker, s being the sum of sketch * rows over the compressed matrices and m
the number of entries that are sent. Here error feedback is a residual, as for most methods; the paper's own, EF21 with
momentum, is ``arc_topk_ef21``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_whole, is_a
from spardl.basics.errors import ConfigError
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.protocol.programs import Combination, Context, Phase, Program, State, seeded_generator
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout, Part
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["METHODS", "ARCTopK"]

METHODS = (Combination("arc_topk", compressor="arc_topk", communicator="dense", residual="local"),)


class _Matrix(NamedTuple):
    """A tensor with at least two dimensions, seen as a matrix: the first one by the rest.

    Attributes:
        start: where it begins in the vector.
        rows: how many there are.
        cols: entries of a row.
        k: rows that are sent; all of them, if it is not compressed.
    """

    start: int
    rows: int
    cols: int
    k: int

    @property
    def part(self) -> Part:
        """Where it is, and how many of its entries are sent."""
        return Part(self.start, self.start + self.rows * self.cols, self.k * self.cols)

    @property
    def compressed(self) -> bool:
        """Whether some of it is not sent."""
        return self.k < self.rows


@dataclass(frozen=True)
class ARCTopK(DenseCompressor):
    """Sends the largest rows of the sum of every matrix, found by a random sketch of it.

    What has fewer than two dimensions, or would not shrink, is sent as it is.

    Args:
        density: share of the rows of a matrix that is sent, at least one, in (0, 1]; lower is more aggressive.
        sketch: columns of the sketch; fewer are cheaper and tell rows less well apart.
        seed: of the random matrices, equal on all workers.

    Raises:
        ConfigError: if a value is out of range.
    """

    density: float = 0.01
    sketch: int = 4
    seed: int = 0

    name = "arc_topk"
    mass = Mass.LEFT
    sparsifies = True
    by_matrix = True

    def __post_init__(self) -> None:
        if not is_a(float, self.density) or not 0 < self.density <= 1:
            raise ConfigError(
                f"compressor.density must be above 0 and at most 1, got {self.density!r}; 0.01 keeps 1% of the rows"
            )
        check_whole("compressor.sketch", self.sketch, least=1)
        check_whole("compressor.seed", self.seed)

    def parts(self, context: Context) -> list[Part]:
        """Every tensor that has entries, with those of its rows that are sent."""
        return [matrix.part for matrix in _matrices(context.layout, self.density, self.sketch)]

    def sizes(self, context: Context) -> list[int]:
        """The sketches, if any, and the rows with what is sent as it is."""
        sketched = self.sketch * sum(matrix.rows for matrix in self._compressed(context))
        return [sketched, self.count(context)] if sketched else [self.count(context)]

    def _compressed(self, context: Context) -> list[_Matrix]:
        return [matrix for matrix in _matrices(context.layout, self.density, self.sketch) if matrix.compressed]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """The sum of the sketches, then that of the rows which are large in it."""
        positions = yield from self.agree(accumulated.values, context, total)
        # The sum may overwrite its argument, and the accumulator remembers what it handed out.
        values = accumulated.take_at(positions).clone()
        return SparseVector(positions, (yield from total(values)), context.layout.length)

    def agree(self, values: Tensor, context: Context, total: Total) -> Program[Tensor]:
        """Which entries all workers send.

        Args:
            values: of one worker, shape (n,).
            context: of this synchronization.
            total: the sum over all workers.

        Returns:
            int64, shape (m,): increasing positions, the same on every worker.
        """
        yield Phase.SELECT
        sketches = torch.empty(0)
        if self._compressed(context):
            sketches = yield from total(self._sketches(values, context))
            yield Phase.SELECT
        return self._positions(sketches, context, values.device)

    def _sketches(self, values: Tensor, context: Context) -> Tensor:
        """Every matrix that is compressed times a random one, row after row."""
        # Products of half precision would overflow.
        wide = torch.promote_types(values.dtype, torch.float32)
        randoms: dict[int, Tensor] = {}
        parts = []
        for matrix in self._compressed(context):
            if matrix.cols not in randoms:
                generator = self._generator(context, matrix.cols)
                drawn = torch.randn(matrix.cols, self.sketch, generator=generator, dtype=torch.float32)
                randoms[matrix.cols] = drawn.to(values.device, wide)
            rows = values[matrix.part.start : matrix.part.stop].view(matrix.rows, matrix.cols).to(wide)
            parts.append((rows @ randoms[matrix.cols]).view(-1))
        return torch.cat(parts)

    def _generator(self, context: Context, cols: int) -> torch.Generator:
        return seeded_generator(self.seed, context.step, cols)

    def _positions(self, sketches: Tensor, context: Context, device: torch.device) -> Tensor:
        """Of all entries that are sent, increasing."""
        found, begin = [torch.empty(0, dtype=torch.int64, device=device)], 0
        for matrix in _matrices(context.layout, self.density, self.sketch):
            if not matrix.compressed:
                found.append(torch.arange(matrix.part.start, matrix.part.stop, device=device))
                continue
            sketch = sketches[begin : begin + self.sketch * matrix.rows].view(matrix.rows, self.sketch)
            begin += sketch.numel()
            rows = _longest(sketch, matrix.k) * matrix.cols + matrix.start
            found.append((rows.unsqueeze(1) + torch.arange(matrix.cols, device=device)).view(-1))
        return torch.cat(found)


def _longest(rows: Tensor, k: int) -> Tensor:
    """Numbers of the k longest rows, increasing; of two as long, the first."""
    largest = rows.abs().amax()
    lengths = torch.linalg.vector_norm(rows / torch.where(largest > 0, largest, 1), dim=1)
    return torch.sort(lengths, descending=True, stable=True).indices[:k].sort().values


@lru_cache(maxsize=256)
def _matrices(layout: Layout, density: float, sketch: int) -> tuple[_Matrix, ...]:
    """All tensors that have entries, in order; what would not shrink, and vectors, with all their rows."""
    found = []
    for shape, (start, stop) in zip(layout.shapes, layout.tensors, strict=True):
        if stop == start:
            continue
        rows, cols = math.prod(shape[:1]), math.prod(shape[1:])
        k = min(rows, max(1, round(density * rows)))
        shrinks = len(shape) > 1 and rows * sketch + k * cols < rows * cols
        found.append(_Matrix(start, rows, cols, k if shrinks else rows))
    return tuple(found)
