"""Top-k sparsification: sends the k entries of largest magnitude, selected exactly.

Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; with error feedback, Stich
et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.compressors.base import Output
from spardl.compressors.budget import BudgetedCompressor, Pieces
from spardl.protocol.programs import Combination, Context, State
from spardl.vector.accumulator import Accumulator

__all__ = ["METHODS", "TopK"]

METHODS = (Combination("topk", compressor="topk", communicator="allgather", residual="local", momentum="auto"),)


@dataclass(frozen=True)
class TopK(BudgetedCompressor):
    """Keeps the k largest entries of the model, or of each layer or bucket; the arguments are those of ``Budget``."""

    name = "topk"
    chunks_updates = True
    output = Output.AT_MOST_K
    fills = True

    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Selects exactly the k entries of largest magnitude; ties go to the lowest index."""
        return [accumulated.largest(pieces.ranges)]
