"""How large the entries of a vector can be: known without looking, until they may no longer fit into their type.

A sum of finite numbers can overflow. To look for that would be one more pass over memory in every step; instead, a
bound of what was carried over grows by the largest magnitude of each gradient, which the search for NaNs and infinities
finds in passing. Only where the bound exceeds the largest number of the type is the vector itself looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.vector.norms import largest

__all__ = ["Bound", "clip_overflow", "fits"]

# What a bound may be, as a share of the largest number: its own rounding errors stay below the rest.
_SAFE = 0.99


def fits(magnitude: float, dtype: torch.dtype) -> bool:
    """Whether numbers of a type can be so large, with room for rounding errors; ``magnitude`` may be NaN."""
    return magnitude <= _SAFE * torch.finfo(dtype).max


@dataclass
class Bound:
    """An upper bound of the magnitudes in one vector, and how it is kept finite.

    Attributes:
        value: no entry is larger; infinite: not known.
    """

    value: float = math.inf

    def grow(self, values: Tensor, most: float) -> bool:
        """Is told that entries have grown.

        Args:
            values: the vector, shape (n,); entries that overflowed become nearly the largest number of their type.
            most: by how much at most, in magnitude.

        Returns:
            Whether some had overflowed.
        """
        self.value = (self.value + most) * (1 + torch.finfo(values.dtype).eps)
        return not fits(self.value, values.dtype) and self.look(values)

    def look(self, values: Tensor) -> bool:
        """Finds the least bound of ``values``, shape (n,); cuts and answers as ``grow`` does."""
        self.value = largest([values])
        if math.isfinite(self.value):
            return False
        limits = torch.finfo(values.dtype)
        # Less than the very largest: that is the mark of a sum over workers that was cut.
        most = limits.max * (1 - limits.eps)
        values.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
        self.value = limits.max
        return True

    def include(self, magnitude: float) -> None:
        """Is told of new entries, of a finite ``magnitude`` at most."""
        self.value = max(self.value, magnitude)


def clip_overflow(sums: Tensor) -> Tensor:
    """Makes sums of finite numbers that overflowed the largest number of their type, in place.

    Args:
        sums: of any shape; a NaN, which is a difference of two infinities, becomes 0.

    Returns:
        The same tensor, of the same shape.
    """
    return sums if math.isfinite(largest([sums])) else sums.nan_to_num_(nan=0.0)
