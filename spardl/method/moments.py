"""What a momentum before compression remembers of one worker's gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from spardl.vector.bounds import Bound

__all__ = ["Moments"]


@dataclass
class Moments:
    """Running means of one worker's gradients.

    Attributes:
        velocity: of the gradients, with their scale, shape (n,); empty if nothing of the kind is kept.
        variance: of their squares, without it, shape (n,); likewise.
        updates: gradients that are in the variance.
        scale: by which the next gradient is multiplied; not saved, and neither is the bound.
        bound: of the velocity's magnitudes.
    """

    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    variance: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: int = 0
    scale: float = 1.0
    bound: Bound = field(default_factory=Bound)
