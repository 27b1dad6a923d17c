"""No compression: the dense gradient, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spardl.compressors.base import DenseCompressor, Output, Total
from spardl.programs import Program
from spardl.state import State

__all__ = ["NoCompression"]


@dataclass(frozen=True)
class NoCompression(DenseCompressor):
    """Sends the gradient as it is."""

    name = "none"
    output = Output.DENSE
    discards = False

    def rounds(self, vector: Tensor, total: Total, state: State) -> Program[Tensor]:
        """One dense sum."""
        return (yield from total(vector))
