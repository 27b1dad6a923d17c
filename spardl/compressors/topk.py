"""Top-k sparsification: the entries of largest magnitude, found exactly.

Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; with error
feedback Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.accumulator import Select
from spardl.checks import is_a
from spardl.compressors.base import SparseCompressor
from spardl.errors import ConfigError
from spardl.selection import top_k
from spardl.state import State

__all__ = ["TopK"]


def _select(values: Tensor, k: int, start: int) -> Tensor:
    return top_k(values, k)


@dataclass(frozen=True)
class TopK(SparseCompressor):
    """Keeps the k largest of n entries, k = density * n.

    Args:
        density: k / n, in (0, 1]; lower is more aggressive.

    Raises:
        ConfigError: if the density is not a number in (0, 1].
    """

    density: float = 0.01

    name = "topk"

    def __post_init__(self) -> None:
        if not is_a(float, self.density) or not 0 < self.density <= 1:
            raise ConfigError(
                f"compressor.density must be above 0 and at most 1, got {self.density!r}; 0.01 keeps 1% of the entries"
            )

    def count(self, length: int) -> int:
        """``density * length`` to the nearest integer, and at least one of a vector that has any."""
        return min(length, max(1, round(self.density * length)))

    def selector(self, state: State) -> Select:
        """Exact top-k; has no state."""
        return _select
