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
from spardl.compressors.budget import PiecewiseCompressor
from spardl.protocol.combination import Combination
from spardl.protocol.context import Context
from spardl.protocol.programs import Worker
from spardl.protocol.state import State
from spardl.vector.layout import Layout
from spardl.vector.thresholds import Reuse, at_least, check_number, exact, smallest_magnitude

__all__ = ["METHODS", "ReusedThreshold", "ReusedThresholdState"]

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

    def set(self, part: int, threshold: float) -> None:
        """Replaces one threshold. The tensor is a new one, since a saved state may share the old."""
        self.thresholds = self.thresholds.clone()
        self.thresholds[part] = threshold


@dataclass(frozen=True)
class ReusedThreshold(Reuse, PiecewiseCompressor):
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

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Exactly k entries at the beginning of a period, else about k; never a zero unless all are wanted."""
        assert isinstance(state, ReusedThresholdState)
        if k >= values.numel():
            return torch.arange(values.numel(), device=values.device)
        threshold = float(state.thresholds[part])
        due = context.step % self.period == 0 or threshold == 0
        if not due:
            chosen, threshold = self._above(values, k, threshold)
            due = self.is_astray(chosen.numel(), k)
        if due:
            chosen = exact(values, k)
            # With fewer than k entries to choose from, the smallest of them says nothing about the next step.
            threshold = smallest_magnitude(values[chosen]) if chosen.numel() == k else 0.0
        state.set(part, self.corrected(threshold, chosen.numel(), k))
        return chosen

    def _above(self, values: Tensor, k: int, threshold: float) -> tuple[Tensor, float]:
        """The entries above the threshold, which is raised while they are too many; and what became of it."""
        found = at_least(values, threshold)
        for _ in range(self.pre_corrections):
            if found.numel() <= self.pre_limit * k:
                break
            threshold *= self.pre_factor
            found = found[values[found].abs() >= threshold]
        return found, threshold
