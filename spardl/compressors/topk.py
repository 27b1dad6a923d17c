"""Top-k sparsification: the entries of largest magnitude, found exactly.

Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; with error
feedback Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spardl.compressors.base import Output
from spardl.compressors.budget import BudgetedCompressor, Piece
from spardl.protocol.combination import Combination
from spardl.protocol.context import Context
from spardl.protocol.state import State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Part, Parts

__all__ = ["METHODS", "TopK"]

METHODS = (Combination("topk", compressor="topk", communicator="allgather", residual="local", momentum="auto"),)


@dataclass(frozen=True)
class TopK(BudgetedCompressor):
    """Keeps the k largest entries of the model, or of each layer or bucket; see ``Budget`` for the arguments."""

    name = "topk"
    output = Output.AT_MOST_K

    def selector(self, context: Context, state: State) -> Select:
        """As others have it, but at once for all blocks where the whole vector is one part."""
        return _of_blocks if len(self.parts(context)) == 1 else super().selector(context, state)

    def choose_all(
        self, accumulated: Accumulator, pieces: Sequence[Piece], context: Context, state: State
    ) -> list[Tensor]:
        """Exact top-k, ties to the lowest index."""
        return [accumulated.largest([Part(piece.start, piece.stop, piece.k) for piece in pieces])]


def _of_blocks(accumulated: Accumulator, parts: Sequence[Part]) -> Tensor:
    """The largest entries of each block, which is a piece of its own."""
    return accumulated.largest(Parts.of(parts).capped)
