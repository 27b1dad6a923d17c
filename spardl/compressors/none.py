"""No compression: the dense gradient, the baseline of all comparisons.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
DistributedDataParallel without a hook does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.protocol.programs import Combination, Context, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum

__all__ = ["METHODS", "NoCompression"]

METHODS = (Combination("none", compressor="none", communicator="dense", residual="none", faster="backend"),)


@dataclass(frozen=True)
class NoCompression(DenseCompressor):
    """Sends the gradient unchanged."""

    name = "none"
    mass = Mass.KEPT
    one_sum = True

    def sizes(self, context: Context) -> list[int]:
        """Returns a list of one number: the length of the whole vector."""
        return [context.layout.length]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums the uncompressed vectors of all workers."""
        return (yield from total(accumulated.values))
