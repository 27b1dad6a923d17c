"""The dense vector that one synchronization works on, and can undo.

A sparse all-reduce adds what arrives to a worker's own vector and takes out what it sends. Global residual
collection (Zhao et al. 2024) afterwards wants the *original* value wherever an index did not reach the final
result. Instead of a copy of the whole vector, this class remembers the old values of the few positions that
were touched: O(k) memory instead of O(n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from spardl.sparse import SparseVector

__all__ = ["Accumulator", "Select"]

Select: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""``select(values, k, start)``: sorted positions of the k entries to keep of the block that begins at ``start``."""


class Accumulator:
    """A dense vector with a log of its changes.

    Args:
        values: shape (n,): gradient plus residual. It is changed in place.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._before: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor] = []

    def take(self, start: int, stop: int, k: int, select: Select) -> SparseVector:
        """Cuts the entries that ``select`` picks out of the block ``[start, stop)``.

        Returns:
            The entries, with indices local to the block. In the vector they are zero from now on.
        """
        local = select(self.values[start:stop], k, start)
        return SparseVector(local, self.take_at(local + start), stop - start)

    def take_at(self, positions: Tensor) -> Tensor:
        """Cuts out the entries at some positions (int64, no two equal), and returns them."""
        values = self.values[positions]
        self._taken.append(positions)
        self._before.append((positions, values))
        self.values[positions] = 0
        return values

    def add(self, start: int, block: SparseVector) -> None:
        """Adds a sparse block whose first position is ``start``."""
        where = block.indices + start
        old = self.values[where]
        self._before.append((where, old))
        self.values[where] = old + block.values

    def taken(self) -> Tensor:
        """All positions that were cut out, int64, strictly increasing."""
        if not self._taken:
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        positions: Tensor = torch.cat(self._taken).unique(sorted=True)
        return positions

    def restore(self) -> None:
        """Puts every touched position back to the value it had at first."""
        for where, old in reversed(self._before):
            self.values[where] = old
        self._before.clear()
