"""Top-k sparsification: the entries of largest magnitude, found exactly.

Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; with error
feedback Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.compressors.base import Output
from spardl.compressors.budget import BudgetedCompressor
from spardl.context import Context
from spardl.selection import top_k
from spardl.state import State

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(BudgetedCompressor):
    """Keeps the k largest entries of the model, or of each layer or bucket; see ``Budget`` for the arguments."""

    name = "topk"
    output = Output.AT_MOST_K

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Exact top-k, ties to the lowest index."""
        return top_k(values, k)
