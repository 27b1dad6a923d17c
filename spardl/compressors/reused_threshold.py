"""Top-k by a threshold that is found exactly once per period, and used again in between.

Source: the local selection of Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk),
PPoPP 2022, section 3; corrections between two evaluations after its official code. Selects about k entries, in time
O(n) without sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_whole
from spardl.compressors.base import Output
from spardl.compressors.budget import BudgetedCompressor, Pieces
from spardl.protocol.programs import Combination, Context, State, Worker
from spardl.vector import sparse
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Reuse, check_number, smallest_magnitude
from spardl.vector.layout import Layout, Part

__all__ = ["METHODS", "ReusedThreshold", "ReusedThresholdState"]

# The most that lists are made longer, as a multiple of k.
_SPARE = 1.5

METHODS = (
    Combination(
        "reused_threshold", compressor="reused_threshold", communicator="allgather", residual="local", momentum="auto"
    ),
)


@dataclass
class ReusedThresholdState(State):
    """The thresholds in use.

    Attributes:
        thresholds: float64, shape (parts of the budget,); 0 where there is none to use again.
    """

    thresholds: Tensor

    def rescale(self, factor: float) -> None:
        """Thresholds are in the units of gradients."""
        self.thresholds = self.thresholds * factor

    def set(self, part: int, threshold: float) -> None:
        """Replaces one threshold. The tensor is a new one, since a saved state may share the old."""
        self.thresholds = self.thresholds.clone()
        self.thresholds[part] = threshold


@dataclass(frozen=True)
class ReusedThreshold(Reuse, BudgetedCompressor):
    """Keeps the entries above a threshold; see ``Budget`` and ``Reuse`` for the other arguments.

    Args:
        period: tau', steps from one exact evaluation to the next, in which exactly k entries are kept.
        pre_corrections: how often at most a threshold that selects too many is raised before it is used.
        pre_limit: multiple of k that is too many.
        pre_factor: factor that raises it.

    Raises:
        ConfigError: if a value is out of range.
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
        check_whole("compressor.period", self.period, least=1)
        check_whole("compressor.pre_corrections", self.pre_corrections, least=0)
        for name in ("pre_limit", "pre_factor"):
            check_number("compressor", name, getattr(self, name), 1)

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> ReusedThresholdState:
        """No threshold yet, for each part."""
        parts = self.parts(Context(Worker(0, 1), layout, 0))
        return ReusedThresholdState(torch.zeros(len(parts), dtype=torch.float64))

    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Exactly k entries at the beginning of a period, else about k; never a zero unless all are wanted."""
        assert isinstance(state, ReusedThresholdState)
        # Little work among the listed entries: an evaluation is at hand when it is due, and the next step's list
        # follows the k largest, wherever the threshold is. It tells as well when a threshold selects too many.
        wanted = pieces.ranges.columns[2].tolist()
        largest = accumulated.largest(pieces.ranges, min(self.pre_limit, _SPARE)).split(wanted)
        due = context.step % self.period == 0
        return [
            self._choose(accumulated, part, exact, due, state, number)
            for number, part, exact in zip(pieces.numbers, pieces.ranges, largest, strict=True)
        ]

    def _choose(
        self, accumulated: Accumulator, part: Part, exact: Tensor, due: bool, state: ReusedThresholdState, number: int
    ) -> Tensor:
        """Of one range, whose k largest entries are ``exact``."""
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
            # With fewer than k entries to choose from, the smallest of them says nothing about the next step.
            threshold = smallest_magnitude(values) if chosen.numel() == part.k else 0.0
        state.set(number, self.corrected(threshold, chosen.numel(), part.k))
        return chosen

    def _above(self, accumulated: Accumulator, part: Part, threshold: float) -> tuple[Tensor, float]:
        """The entries above the threshold, which is raised while they are too many; and what became of it."""
        kind = torch.finfo(accumulated.values.dtype)
        # In the type of the values a small threshold can be 0, which all zeros reach.
        least = kind.tiny * kind.eps
        for _ in range(self.pre_corrections):
            found = accumulated.reaching(part, max(threshold, least), int(self.pre_limit * part.k))
            if found is not None:
                return found, threshold
            threshold *= self.pre_factor
        found = accumulated.reaching(part, max(threshold, least), part.stop - part.start)
        assert found is not None
        return found, threshold
