"""Top-k with a threshold that is computed exactly once per period and reused in between.

Source: the local selection of Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk),
PPoPP 2022, section 3; corrections between evaluations follow its official code. Selects about k entries in O(n) time,
without sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from spardl.basics.checks import check_integer
from spardl.compressors.base import Output
from spardl.compressors.budget import BudgetedCompressor, Pieces
from spardl.protocol.programs import Combination, Context, State, Worker
from spardl.vector import sparse
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Reuse, check_number, smallest_magnitude
from spardl.vector.layout import Layout, Range
from spardl.vector.norms import host_reads

__all__ = ["METHODS", "ReusedThreshold", "ReusedThresholdState"]

# Maximum factor, relative to k, by which candidate lists are extended.
_SPARE = 1.5

METHODS = (
    Combination(
        "reused_threshold", compressor="reused_threshold", communicator="allgather", residual="local", momentum="auto"
    ),
)


@dataclass
class ReusedThresholdState(State):
    """Thresholds that the next step reuses.

    Attributes:
        thresholds: One threshold per part (layer, bucket, ...), as a float64 tensor of shape (parts,); 0 where none is
            known.
    """

    thresholds: Tensor

    def rescale(self, factor: float) -> None:
        """Multiplies the thresholds by ``factor``, because they scale with the gradients."""
        self.thresholds = self.thresholds * factor

    def set(self, part: int, threshold: float) -> None:
        """Replaces the threshold of the part with number ``part`` by ``threshold``."""
        # In a new tensor, because a saved state may share the old one.
        self.thresholds = self.thresholds.clone()
        self.thresholds[part] = threshold


@dataclass(frozen=True)
class ReusedThreshold(Reuse, BudgetedCompressor):
    """Keeps the entries above a threshold; the other arguments are those of ``Budget`` and ``Reuse``.

    Args:
        period: Number of steps, tau', from one exact evaluation of the threshold (which keeps k entries) to the next.
        pre_corrections: Maximum number of times that a threshold is raised before use if it selects too many.
        pre_limit: Multiple of k; a selection of more entries is too large.
        pre_factor: Factor that multiplies the threshold to raise it.

    Raises:
        ConfigError: If a value is out of range.
    """

    period: int = 32
    pre_corrections: int = 5
    pre_limit: float = 1.3333
    pre_factor: float = 1.03

    name = "reused_threshold"
    output = Output.ABOUT_K

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_reuse("compressor")
        check_integer("compressor.period", self.period, least=1)
        check_integer("compressor.pre_corrections", self.pre_corrections, least=0)
        for name in ("pre_limit", "pre_factor"):
            check_number("compressor", name, getattr(self, name), 1)

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> ReusedThresholdState:
        """Returns a state without thresholds, so that the first step evaluates them."""
        parts = self.parts(Context(Worker(0, 1), layout, 0))
        return ReusedThresholdState(torch.zeros(len(parts), dtype=torch.float64))

    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Selects the k largest entries at the start of a period, later about k entries.

        Entries that are zero are selected only where all entries of a piece are sent.
        """
        assert isinstance(state, ReusedThresholdState)
        # A search among the listed candidates is cheap and needed in every step: for a due evaluation, for the lists of
        # the next step, which follow the k largest entries, and to detect a threshold that selects too many.
        wanted = pieces.ranges.columns[2].tolist()
        largest = accumulated.largest(pieces.ranges, min(self.pre_limit, _SPARE)).split(wanted)
        due = context.step % self.period == 0
        return [
            self._choose(accumulated, part, exact, due, state, number)
            for number, part, exact in zip(pieces.numbers, pieces.ranges, largest, strict=True)
        ]

    def _choose(
        self, accumulated: Accumulator, part: Range, exact: Tensor, due: bool, state: ReusedThresholdState, number: int
    ) -> Tensor:
        """Selects entries of one range, whose k largest entries are ``exact``."""
        if part.k >= part.stop - part.start:
            return exact
        chosen, threshold = exact, float(state.thresholds[number])
        due = due or threshold == 0
        if not due:
            chosen, threshold = self._above(accumulated, part, threshold)
            due = self.is_astray(chosen.numel(), part.k)
        if due:
            values = sparse.gather(accumulated.values, exact)
            chosen = exact[values != 0]
            # The smallest of fewer than k non-zero entries is not a useful threshold for the next step.
            threshold = smallest_magnitude(values) if chosen.numel() == part.k else 0.0
        state.set(number, self.corrected(threshold, chosen.numel(), part.k))
        return chosen

    def _above(self, accumulated: Accumulator, part: Range, threshold: float) -> tuple[Tensor, float]:
        """Returns the entries above the threshold, raised while it selects too many, and the final threshold."""
        kind = torch.finfo(accumulated.values.dtype)
        # In the dtype of the values, a small threshold can round to 0, and would then select all zeros.
        least = kind.tiny * kind.eps
        if not host_reads(accumulated.values):
            return self._above_at_once(accumulated, part, threshold, least)
        for _ in range(self.pre_corrections):
            found = accumulated.reaching(part, max(threshold, least), int(self.pre_limit * part.k))
            if found is not None:
                return found, threshold
            threshold *= self.pre_factor
        found = accumulated.reaching(part, max(threshold, least), part.stop - part.start)
        assert found is not None
        return found, threshold

    def _above_at_once(
        self, accumulated: Accumulator, part: Range, threshold: float, least: float
    ) -> tuple[Tensor, float]:
        """Like ``_above``, but compares with all raised thresholds at once, because each result makes a GPU wait."""
        steps = range(self.pre_corrections)
        raised = list(accumulate(steps, lambda last, _: last * self.pre_factor, initial=threshold))
        found = accumulated.reaching(part, max(threshold, least), part.stop - part.start)
        assert found is not None
        if self.pre_corrections == 0 or found.numel() <= int(self.pre_limit * part.k):
            return found, threshold
        magnitudes = sparse.gather(accumulated.values, found).abs()
        bounds = torch.tensor([max(each, least) for each in raised], dtype=magnitudes.dtype)
        reaches = magnitudes >= bounds.to(magnitudes.device, non_blocking=True).unsqueeze(1)
        counts = reaches.sum(1).tolist()
        fitting = (number for number, count in enumerate(counts[:-1]) if count <= int(self.pre_limit * part.k))
        number = next(fitting, self.pre_corrections)
        places = torch.nonzero_static(reaches[number], size=counts[number]).squeeze(1)
        return found[places], raised[number]
