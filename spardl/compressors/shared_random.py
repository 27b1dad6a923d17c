"""Base class of compressors that send random entries, equal on all workers, so that no positions are sent."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_integer
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.compressors.budget import Budget
from spardl.protocol.programs import Context, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["SharedChoice"]


@dataclass(frozen=True)
class SharedChoice(Budget, DenseCompressor):
    """Sends entries at random positions that are equal on all workers; the other arguments are those of ``Budget``.

    Args:
        seed: Seed of the random positions, equal on all workers.

    Raises:
        ConfigError: If a value is out of range.
    """

    seed: int = 0

    mass = Mass.LEFT
    sparsifies = True
    one_sum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("compressor.seed", self.seed)

    @abstractmethod
    def positions(self, context: Context, device: torch.device) -> Tensor:
        """Returns the positions of the entries to send in a step.

        Args:
            context: Context of this synchronization.
            device: Device of the result.

        Returns:
            int64 positions of shape (count(context),), strictly increasing, equal on all workers.
        """

    def sizes(self, context: Context) -> list[int]:
        """Returns a list of one number, because the values of all parts are summed together."""
        return [self.count(context)]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums the selected values of all workers."""
        positions = self.positions(context, accumulated.values.device)
        # Clone: the sum may overwrite its argument, and the accumulator logs the tensor that it returned.
        values = accumulated.take_at(positions).clone()
        return SparseVector(positions, (yield from total(values)), context.layout.length)
