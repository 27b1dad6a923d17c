"""Stochastic rounding: right on average."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_stochastically"]


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds each value up or down, so that the result is the value on average; whole numbers stay what they are.

    Args:
        values: of any shape, floating point, finite; overwritten.
        generator: on the CPU, whatever the device of the values.

    Returns:
        Whole numbers of the same shape and type.
    """
    # The fraction is split off first: added to a large number, a random one would lose its last bits.
    low = values.floor()
    chance = values.sub_(low)
    draw = torch.rand(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return low.add_(draw.lt_(chance))
