"""Random-block sparsification: sends a contiguous block at a random position, equal on all workers.

Source: Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (arXiv 2009.09271).
Selection copies k adjacent entries without comparing any. One dense sum of k values: on a ring 2(P-1) rounds and
2k(P-1)/P words per worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.compressors.shared_random import SharedChoice
from spardl.protocol.programs import Combination, Context, seeded_generator
from spardl.vector.layout import Range

__all__ = ["METHODS", "RandomBlock"]

METHODS = (
    Combination(
        "random_block",
        compressor="random_block",
        communicator="dense",
        residual="none",
        compressor_options={"density": 0.1, "scope": "layer"},
    ),
)


@dataclass(frozen=True)
class RandomBlock(SharedChoice):
    """Sends a random block of the model, or of each layer or bucket; the arguments are those of :class:`SharedChoice`.

    A block that exceeds the end of its part (the model, a layer or a bucket) continues at the start of the part, so
    that every entry is sent equally often. The published method has one part per layer (``scope=layer``).
    """

    name = "random_block"

    def positions(self, context: Context, device: torch.device) -> Tensor:
        """Returns the positions of the block of each part, in increasing order."""
        pieces = [torch.empty(0, dtype=torch.int64, device=device)]
        for part, start in zip(self.parts(context), self.starts(context), strict=True):
            pieces += _block(part, start, device)
        return torch.cat(pieces)

    def starts(self, context: Context) -> list[int]:
        """Returns the start of the block of each part in ``context``, relative to the part's first entry.

        Starts are drawn uniformly from all positions of the part; they depend only on the seed and the step.
        """
        lengths = torch.tensor([part.stop - part.start for part in self.parts(context)], dtype=torch.int64)
        # 2^62 is so much larger than any part that the modulo is practically unbiased.
        drawn = torch.randint(2**62, lengths.shape, generator=seeded_generator(self.seed, context.step))
        starts: list[int] = (drawn % lengths).tolist()
        return starts


def _block(part: Range, start: int, device: torch.device) -> list[Tensor]:
    """Returns the positions of a block: first the end of the block that wraps to the part's start, then the rest."""
    first = part.start + start
    beyond = max(0, first + part.k - part.stop)
    return [
        torch.arange(part.start, part.start + beyond, device=device),
        torch.arange(first, first + part.k - beyond, device=device),
    ]
