"""Magnitudes on the CPU where nothing is compiled: without its sign bit, the bits of a number grow with its magnitude.

numpy compares and orders whole numbers of any size with wide instructions; torch does so neither with what reaches a
bound, of which it counts the positions first, nor with the k-th largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["kth_largest", "least_of_rows", "reaching"]


def reaching(values: Tensor, bound: float) -> Tensor:
    """Where entries reach a bound.

    Args:
        values: floating point, shape (n,), on the CPU, no NaN.
        bound: least magnitude, rounded to the type of the values.

    Returns:
        int64, shape (found,), increasing.
    """
    return torch.from_numpy(np.flatnonzero(_keys(values) >= _keys(values.new_tensor([bound]))))


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest magnitude.

    Args:
        values: floating point, shape (n,), on the CPU, no NaN.
        k: from 1 to n.

    Returns:
        A number of the same type, shape ().
    """
    place = values.numel() - k
    keys = _keys(values)
    keys.partition(place)
    return torch.from_numpy(keys[place : place + 1]).view(values.dtype)[0]


def least_of_rows(values: Tensor, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The least magnitude of the largest entries of each row, and where entries reach it.

    Args:
        values: floating point, shape (r, m), on the CPU, no NaN.
        wanted: shape (r,): how many are among the largest, from 0 to m.

    Returns:
        Magnitudes, shape (r,), infinite where none is wanted; and int64 positions in the rows laid end to end, shape
        (found,), increasing.
    """
    keys, length, most = _keys(values), values.shape[1], max(1, int(wanted.max()))
    parted = keys.copy()
    parted.partition(length - most, axis=1)
    top = np.sort(parted[:, length - most :], axis=1)
    least = np.take_along_axis(top, np.minimum(most - wanted, most - 1)[:, None], axis=1)
    least[wanted == 0] = _keys(values.new_tensor([float("inf")]))
    return torch.from_numpy(least[:, 0]).view(values.dtype), torch.from_numpy(np.flatnonzero(keys >= least))


def _keys(values: Tensor) -> NDArray[Any]:
    """In memory of its own."""
    bits = values.detach().view(_BITS[values.itemsize]).numpy()
    return bits & np.iinfo(bits.dtype).max


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
