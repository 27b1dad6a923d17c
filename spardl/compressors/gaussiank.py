"""Gaussian-k: selects about k entries above a threshold, estimated from a normal distribution fitted to the values.

Source: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019 (arXiv 1911.08772). The bounds
and steps of the corrections are those of the baseline in Li and Hoefler, Ok-Topk, PPoPP 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from spardl.basics.checks import check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.compressors.base import Output
from spardl.compressors.budget import PiecewiseCompressor
from spardl.protocol.programs import Combination, Context, State
from spardl.vector.selection import top_k

__all__ = ["METHODS", "GaussianK"]

METHODS = (
    Combination("gaussiank", compressor="gaussiank", communicator="allgather", residual="local", momentum="auto"),
)


@dataclass(frozen=True)
class GaussianK(PiecewiseCompressor):
    """Keeps the entries above ``abs(mean) + z * standard deviation``; ``Budget`` describes the other arguments.

    z is the two-sided quantile of the standard normal distribution: a share k / n of it has a larger magnitude.
    Gradients are not normal, so the threshold is raised or lowered in steps while too many or too few entries exceed
    it. If none exceeds the final threshold (constant values, or a distribution far from normal), the k largest entries
    are kept.

    For heavy tails and low densities, the compressor selects too many entries, because 20 corrections raise the
    threshold by less than half: at 0.1%, 3.2 k entries of Student's t-distribution with three degrees of freedom, and 3
    to 6 k of the gradients of a small convolutional network on digits. At 5%, it selects too few: down to 0.3 k of
    these gradients. With more ``corrections``, the number approaches k.

    Args:
        corrections: Maximum number of steps by which the threshold is corrected.
        factor: Size of a step, as a share of the threshold.
        low: Share of k; the threshold is lowered while fewer entries exceed it.
        high: Multiple of k; the threshold is raised while more entries exceed it.

    Raises:
        ConfigError: If a value is out of range.
    """

    corrections: int = 20
    factor: float = 0.02
    low: float = 0.75
    high: float = 1.25

    name = "gaussiank"
    output = Output.ABOUT_K

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("compressor.corrections", self.corrections, least=0)
        if not is_number(float, self.factor) or not 0 < self.factor < 1:
            raise ConfigError(f"compressor.factor must be above 0 and below 1, got {self.factor!r}")
        if not is_number(float, self.low) or not 0 <= self.low <= 1:
            raise ConfigError(f"compressor.low must be at least 0 and at most 1, got {self.low!r}")
        if not is_number(float, self.high) or not 1 <= self.high < math.inf:
            raise ConfigError(f"compressor.high must be a number, at least 1, got {self.high!r}")

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Selects all entries above the corrected threshold; if k is the length of the piece, all entries."""
        if k == values.numel():
            return torch.arange(k, device=values.device)
        magnitude, ladder = values.abs(), self._ladder(values, k)
        candidates = (magnitude > ladder[0]).nonzero().squeeze(1)
        # One pass counts the entries above all thresholds, instead of one pass per correction.
        passed = torch.searchsorted(ladder, magnitude[candidates])
        exceeding = torch.bincount(passed, minlength=ladder.numel() + 1).flip(0).cumsum(0).flip(0)[1:]
        chosen = candidates[passed > self._rung(exceeding.tolist(), k)]
        return chosen if chosen.numel() else top_k(values, k)

    def _ladder(self, values: Tensor, k: int) -> Tensor:
        """Returns all thresholds that corrections can reach, increasing; the uncorrected one is in the middle."""
        z = -NormalDist().inv_cdf(k / values.numel() / 2)
        deviation, mean = torch.std_mean(values, correction=0)
        down = [(1 - self.factor) ** step for step in range(self.corrections, 0, -1)]
        up = [(1 + self.factor) ** step for step in range(self.corrections + 1)]
        return (mean.abs() + z * deviation) * torch.tensor(down + up, dtype=values.dtype, device=values.device)

    def _rung(self, exceeding: Sequence[int], k: int) -> int:
        """Returns the index of the threshold to use; ``exceeding`` holds the number of entries above each threshold."""
        rung = self.corrections
        step = 1 if exceeding[rung] > k else -1
        while not self._fits(exceeding[rung], k) and 0 <= rung + step < len(exceeding):
            before, rung = rung, rung + step
            if (exceeding[rung] - k) * step < 0 and not self._fits(exceeding[rung], k):
                # One step leads from too many to too few, or vice versa: no threshold in between fits.
                return min(before, rung, key=lambda either: abs(exceeding[either] - k))
        return rung

    def _fits(self, count: int, k: int) -> bool:
        return self.low * k <= count <= self.high * k
