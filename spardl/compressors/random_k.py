"""Random-k sparsification: k entries drawn at random, the same on all workers.

Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018 (rand-k); with a seed shared by all workers, so that
no position is sent, Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (arXiv
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

# From this share on, shuffling all positions costs less than drawing until enough differ.
_DENSE = 0.25


@dataclass(frozen=True)
class RandomK(SharedChoice):
    """Sends k random entries of the model, or of each layer or bucket; see ``SharedChoice`` for the arguments."""

    name = "random_k"

    def positions(self, context: Context, device: torch.device) -> Tensor:
        """For each part a draw of its own, from the seed, the step and the part's number."""
        drawn = []
        for number, part in enumerate(self.parts(context)):
            generator = seeded_generator(self.seed, context.step, number)
            drawn.append(part.start + draw_distinct(part.stop - part.start, part.k, generator))
        return torch.cat([torch.empty(0, dtype=torch.int64), *drawn]).to(device)


def draw_distinct(length: int, k: int, generator: torch.Generator) -> Tensor:
    """Draws without replacement; every choice of k out of all is equally likely.

    Takes O(k log k) time and O(k) memory where k is small.

    Args:
        length: how many there are to choose from.
        k: how many to choose, at most ``length``.
        generator: on the CPU.

    Returns:
        int64, shape (k,), strictly increasing, in ``[0, length)``.
    """
    if k >= _DENSE * length:
        return torch.randperm(length, generator=generator)[:k].sort().values
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < k:
        # A quarter more than is missing: then the first round is enough, nearly always.
        missing = k - found.numel()
        more = torch.randint(length, (missing + missing // 4 + 1,), generator=generator)
        found = torch.cat((found, more)).unique(sorted=True)
    kept = torch.ones_like(found, dtype=torch.bool)
    kept[torch.randperm(found.numel(), generator=generator)[k:]] = False
    return found[kept]
