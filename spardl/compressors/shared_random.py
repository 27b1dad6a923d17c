"""Random choices that all workers make alike: no position travels, and values are summed as they are."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_whole
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.compressors.budget import Budget
from spardl.protocol.programs import Context, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["SharedChoice"]


@dataclass(frozen=True)
class SharedChoice(Budget, DenseCompressor):
    """Sends the entries at positions that all workers draw alike; see ``Budget`` for the other arguments.

    Args:
        seed: of the choice, equal on all workers.

    Raises:
        ConfigError: if a value is out of range.
    """

    seed: int = 0

    mass = Mass.LEFT
    sparsifies = True
    one_sum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("compressor.seed", self.seed)

    @abstractmethod
    def positions(self, context: Context, device: torch.device) -> Tensor:
        """What is sent in a step.

        Args:
            context: of this synchronization.
            device: where the result is wanted.

        Returns:
            int64, shape (count(context),), strictly increasing, the same on all workers.
        """

    def sizes(self, context: Context) -> list[int]:
        """All values of all parts at once."""
        return [self.count(context)]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """One dense sum of the chosen values."""
        positions = self.positions(context, accumulated.values.device)
        # The sum may overwrite its argument, and the accumulator remembers what it handed out.
        values = accumulated.take_at(positions).clone()
        return SparseVector(positions, (yield from total(values)), context.layout.length)
