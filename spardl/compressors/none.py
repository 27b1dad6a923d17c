"""No compression: the dense gradient, the baseline of every comparison.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020: what
DistributedDataParallel sends without a hook.
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
    """Sends the gradient as it is."""

    name = "none"
    mass = Mass.KEPT
    one_sum = True

    def sizes(self, context: Context) -> list[int]:
        """The whole vector."""
        return [context.layout.length]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """One dense sum."""
        return (yield from total(accumulated.values))
