"""Random-k sparsification: sends k random entries, at the same positions on all workers.

Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018 (rand-k); with a seed shared by all workers, so that no
positions are sent, Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (arXiv
2009.09271). One dense sum of k values: with ``dense`` 2(P-1) rounds and 2k(P-1)/P words per worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.compressors.shared_random import SharedChoice
from spardl.protocol.programs import Combination, Context, seeded_generator

__all__ = ["METHODS", "RandomK", "draw_distinct"]

METHODS = (
    Combination(
        "random_k", compressor="random_k", communicator="dense", residual="none", compressor_options={"density": 0.1}
    ),
)

# From this density on, shuffling all positions is cheaper than drawing until k positions are distinct.
_DENSE = 0.25


@dataclass(frozen=True)
class RandomK(SharedChoice):
    """Sends k random entries of the model, or of each layer or bucket; the arguments are those of ``SharedChoice``."""

    name = "random_k"

    def positions(self, context: Context, device: torch.device) -> Tensor:
        """Returns random positions in each part (layer, bucket, ...), which depend only on seed, step and part."""
        drawn = []
        for number, part in enumerate(self.parts(context)):
            generator = seeded_generator(self.seed, context.step, number)
            drawn.append(part.start + draw_distinct(part.stop - part.start, part.k, generator))
        return torch.cat([torch.empty(0, dtype=torch.int64), *drawn]).to(device)


def draw_distinct(length: int, k: int, generator: torch.Generator) -> Tensor:
    """Draws k of the numbers 0 ... length - 1 without replacement; every subset is equally likely.

    Takes O(k log k) time and O(k) memory for small k.

    Args:
        length: Number of elements (positions) to draw from.
        k: Number of elements to draw, at most ``length``.
        generator: Source of random numbers, on the CPU.

    Returns:
        int64 tensor of shape (k,), strictly increasing, in ``[0, length)``.
    """
    if k >= _DENSE * length:
        return torch.randperm(length, generator=generator)[:k].sort().values
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < k:
        # Draw a quarter more than the missing number, so that one round nearly always suffices.
        missing = k - found.numel()
        more = torch.randint(length, (missing + missing // 4 + 1,), generator=generator)
        found = torch.cat((found, more)).unique(sorted=True)
    # Dropping the excess at random keeps all choices equally likely.
    kept = torch.ones_like(found, dtype=torch.bool)
    kept[torch.randperm(found.numel(), generator=generator)[k:]] = False
    return found[kept]
