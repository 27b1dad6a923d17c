"""Count-sketch compression: large entries are found in a small table that adds up over workers like a dense gradient.

Source: Ivkin, Rothchild, Ullah, Braverman, Stoica and Arora, Communication-efficient Distributed SGD with Sketching
(Sketched-SGD), NeurIPS 2019; the compressor of Dai, Gong, An, Xu and Diao, Sketch-Fusion SGD, JPDC 185, 2024.

Two sums, of r * c and of candidates * k values: with ``dense`` 4(P-1) rounds and 2(P-1)/P (r * c + candidates * k)
words per worker, whatever the number of workers. Work: O(r * n) hashes, twice; memory: one vector of estimates, and
hashes of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_flag, check_whole, is_a
from spardl.basics.errors import ConfigError
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.compressors.budget import Budget
from spardl.protocol.programs import Combination, Context, Phase, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Part
from spardl.vector.selection import top_k
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["METHODS", "CountSketch", "Sketch", "SketchedPart", "derive", "rankable"]


# Count sketch: a small linear summary of a long vector, from which its large entries can be found again.
#
# Source: Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002. A table has r rows of c
# buckets; each row adds every entry, with a random sign, to a random bucket. An entry is estimated by the median over
# the rows of its signed buckets. Tables of two vectors add up to the table of their sum.
#
# No hash is stored: bucket and sign are computed where they are needed. All numbers are unsigned with 64 bits, and
# wrap::
#
#     G = 0x9E3779B97F4A7C15
#     mix(z) = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
#     derive(a, b, ...) = z = 0; for each number: z = mix(z + (number + 1) * G)
#     word(position) = mix(derive(seed, 0) + position * G)
#     slot(row, position) = (word(position) * (derive(seed, row + 1) | 1) >> 32) * 2c >> 32
#     bucket = slot / 2, rounded down; the sign is + if the slot is even, else -
#
# ``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); the rows are multiply-shift hashes
# (Dietzfelbinger et al., Journal of Algorithms 1997) of its words. Statistically good, but not a family with a proof
# of as much independence as the bounds of the paper ask for.


GOLDEN = 0x9E3779B97F4A7C15
MIXER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
WORD = (1 << 64) - 1
HALF = (1 << 32) - 1
MOST_COLUMNS = 1 << 30
# What a block needs stays in a core's cache; a GPU wants fewer, longer operations.
CPU_BLOCK, OTHER_BLOCK = 1 << 16, 1 << 22


def derive(*numbers: int) -> int:
    """A 64-bit number that looks random, from whole numbers in a fixed order."""
    state = 0
    for number in numbers:
        state = (state + (number + 1) * GOLDEN) & WORD
        for shift, factor in MIXER:
            state = (state ^ state >> shift) * factor & WORD
    return state


def rankable(values: Tensor) -> Tensor:
    """The ``values``, in their shape, as they can be ranked by magnitude.

    A NaN, which only an overflow can make, counts as infinite.
    """
    return values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


@dataclass(frozen=True)
class Sketch:
    """The shape and the hashes of a table.

    A query only moves, negates and compares numbers, so equal tables give equal answers on any device.

    Args:
        rows: odd, so that a median is one of the estimates.
        columns: buckets in a row, at most 2^30.
        seed: of the hashes; tables add up only if it is the same.
    """

    rows: int
    columns: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % 2 == 0 or not 1 <= self.columns <= MOST_COLUMNS:
            raise ValueError(f"a sketch needs an odd number of rows and 1 to 2^30 columns, got {self}")

    def insert(self, values: Tensor, start: int = 0) -> Tensor:
        """The table of a vector.

        Args:
            values: shape (m,): the entries at the positions ``start``, ``start + 1``, ...
            start: position of the first one.

        Returns:
            Shape (rows * columns,), row by row, of the same type and on the same device.
        """
        table = values.new_zeros(self.rows, 2 * self.columns)
        for begin, all_slots in self._blocks(start, start + values.numel(), values.device):
            for row, slots in zip(table, all_slots, strict=True):
                row.index_add_(0, slots, values[begin - start : begin - start + slots.numel()])
        plus, minus = table.view(-1, 2).unbind(1)
        return plus - minus

    def estimate(self, table: Tensor, start: int, stop: int) -> Tensor:
        """What the entries at the positions ``[start, stop)`` probably are: shape (stop - start,).

        Args:
            table: shape (rows * columns,): as ``insert`` makes it, or a sum of such tables.
            start: first position.
            stop: the position after the last.
        """
        signed = torch.stack((table, -table), dim=1).view(self.rows, 2 * self.columns)
        estimates = table.new_empty(stop - start)
        for begin, all_slots in self._blocks(start, stop, table.device):
            rows = [row.index_select(0, slots) for row, slots in zip(signed, all_slots, strict=True)]
            estimates[begin - start : begin - start + rows[0].numel()] = _median(rows)
        return estimates

    def largest(self, table: Tensor, start: int, stop: int, count: int) -> Tensor:
        """The positions whose estimates have the largest magnitude; ties go to the lowest position.

        Args:
            table: shape (rows * columns,): as ``insert`` makes it, or a sum of such tables.
            start: first position.
            stop: the position after the last.
            count: how many.

        Returns:
            int64, shape (min(count, stop - start),), strictly increasing, in ``[start, stop)``.
        """
        return top_k(rankable(self.estimate(table, start, stop)), count) + start

    def _blocks(self, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, list[Tensor]]]:
        """Cuts positions into blocks: the first position of each, and its slots in each row."""
        size = CPU_BLOCK if device.type == "cpu" else OTHER_BLOCK
        steps = torch.arange(min(size, stop - start), device=device).mul_(_signed(GOLDEN))
        for begin in range(start, stop, size):
            yield begin, self._slots(begin, steps[: stop - begin])

    def _slots(self, begin: int, steps: Tensor) -> list[Tensor]:
        words = _mix_(steps + _signed(derive(self.seed, 0) + begin * GOLDEN))
        factors = [_signed(derive(self.seed, row + 1) | 1) for row in range(self.rows)]
        halves = [(words * factor).bitwise_right_shift_(32).bitwise_and_(HALF) for factor in factors]
        return [half.mul_(2 * self.columns).bitwise_right_shift_(32) for half in halves]


def _median(estimates: Sequence[Tensor]) -> Tensor:
    """The median of an odd number of tensors, entry by entry: a bubble sort that stops in the middle."""
    rows = list(estimates)
    middle = len(rows) // 2
    for last in range(len(rows) - 1, middle - 1, -1):
        for lower in range(last):
            one, other = rows[lower], rows[lower + 1]
            rows[lower], rows[lower + 1] = torch.minimum(one, other), torch.maximum(one, other)
    return rows[middle]


def _mix_(words: Tensor) -> Tensor:
    """``mix`` of the module's description, in place, in signed numbers with the same bits."""
    for shift, factor in MIXER:
        shifted = (words >> shift).bitwise_and_(WORD >> shift)
        words.bitwise_xor_(shifted).mul_(_signed(factor))
    return words


def _signed(number: int) -> int:
    """The signed 64-bit number with the bits of an unsigned one, after wrapping."""
    number &= WORD
    return number - (1 << 64) if number >> 63 else number


METHODS = (
    Combination("count_sketch", compressor="count_sketch", communicator="dense", residual="local"),
    Combination(
        "sketch_fusion", compressor="count_sketch", communicator="dense", residual="local", momentum="corrected"
    ),
)


class SketchedPart(NamedTuple):
    """How one part of the gradient is sent.

    Attributes:
        part: its range and its budget.
        columns: of its table; 0 if there is none.
        candidates: entries whose exact sums are asked for; all of them if there is no table.
    """

    part: Part
    columns: int
    candidates: int


@dataclass(frozen=True)
class CountSketch(Budget, DenseCompressor):
    """Sketches, sums the sketches, and asks for the exact sums of those that seem largest.

    We know no published sizes; the defaults are measured (``scripts/bench_sketch.py``). They send 20 values for each
    entry of the budget: 20% of a dense gradient at a density of 1%. Of the mass of the 1% largest entries they find
    77% if all follow Student's t with 3 degrees of freedom, and 81% (85% with corrected momentum) of what 8 workers
    accumulate when training ResNet-20. Such vectors have light tails, so that many candidates do more than many rows.
    With 2 columns and 6 candidates, 12 values, it is 58%, 71% and 78%, and training suffers: in 10 epochs on the
    digits, 8 workers, 2 seeds, the accuracy is 0.82, instead of 0.94 with the defaults, 0.96 with exact top-k
    gathered from all, and 0.98 with dense gradients.

    Args:
        rows: r, an odd number.
        columns_per_entry: c / k: columns of the table for each entry of the budget.
        candidates: how many entries' exact sums are asked for, for each entry of the budget; at least 1.
        fresh_hashes: whether each step draws new hashes. With the published fixed ones, entries whose buckets keep
            cancelling may never be found, however large they grow.
        seed: of the hashes.

    Raises:
        ConfigError: if a value is out of range.
    """

    rows: int = 3
    columns_per_entry: float = 4.0
    candidates: float = 8.0
    fresh_hashes: bool = True
    seed: int = 0

    name = "count_sketch"
    mass = Mass.LEFT
    sparsifies = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(int, self.rows) or self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"compressor.rows must be an odd number, at least 1, got {self.rows!r}")
        if not is_a(float, self.columns_per_entry) or not 0 < self.columns_per_entry < math.inf:
            raise ConfigError(f"compressor.columns_per_entry must be a number above 0, got {self.columns_per_entry!r}")
        if not is_a(float, self.candidates) or not 1 <= self.candidates < math.inf:
            raise ConfigError(f"compressor.candidates must be a number, at least 1, got {self.candidates!r}")
        check_flag("compressor.fresh_hashes", self.fresh_hashes)
        check_whole("compressor.seed", self.seed, least=0)

    def plan(self, context: Context) -> list[SketchedPart]:
        """How each part is sent in ``context``: by way of a table only where that means fewer words than without."""
        return [self._plan(part) for part in self.parts(context)]

    def _plan(self, part: Part) -> SketchedPart:
        length = part.stop - part.start
        columns, candidates = math.ceil(self.columns_per_entry * part.k), math.ceil(self.candidates * part.k)
        if self.rows * columns + candidates >= length:
            return SketchedPart(part, 0, length)
        return SketchedPart(part, columns, candidates)

    def sizes(self, context: Context) -> list[int]:
        """All tables, unless no part has one; all candidates."""
        plan = self.plan(context)
        tables, candidates = sum(self.rows * each.columns for each in plan), sum(each.candidates for each in plan)
        return [tables, candidates] if tables else [candidates]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """One sum of tables, one of the candidates' values; the largest sums leave the accumulated vector."""
        plan, values = self.plan(context), accumulated.values
        seed = derive(self.seed, context.step) if self.fresh_hashes else self.seed
        tables = torch.cat([values[:0], *(self._table(values, each, seed) for each in plan)])
        if tables.numel():
            tables = yield from total(tables)
            yield Phase.SELECT
        candidates = self._candidates(tables, plan, seed)
        sums = yield from total(values[candidates])
        yield Phase.SELECT
        kept = _largest(sums, plan)
        accumulated.take_at(candidates[kept])
        return SparseVector(candidates[kept], sums[kept], values.numel())

    def _table(self, values: Tensor, each: SketchedPart, seed: int) -> Tensor:
        start, stop, _ = each.part
        return Sketch(self.rows, each.columns, seed).insert(values[start:stop], start) if each.columns else values[:0]

    def _candidates(self, tables: Tensor, plan: Sequence[SketchedPart], seed: int) -> Tensor:
        """Positions in the whole vector, part by part, in increasing order."""
        found, begin = [torch.empty(0, dtype=torch.int64, device=tables.device)], 0
        for each in plan:
            start, stop, _ = each.part
            if each.columns:
                table = tables[begin : begin + self.rows * each.columns]
                found.append(Sketch(self.rows, each.columns, seed).largest(table, start, stop, each.candidates))
                begin += self.rows * each.columns
            else:
                found.append(torch.arange(start, stop, device=tables.device))
        return torch.cat(found)


def _largest(sums: Tensor, plan: Sequence[SketchedPart]) -> Tensor:
    """Which of the candidates have the largest sums, in each part as many as its budget."""
    found, begin = [torch.empty(0, dtype=torch.int64, device=sums.device)], 0
    for each in plan:
        found.append(top_k(rankable(sums[begin : begin + each.candidates]), each.part.k) + begin)
        begin += each.candidates
    return torch.cat(found)
