"""Compute-visible sparsification: sends the changes of weights that affect a forward pass in bfloat16.

Source: Miahi and Belilovsky, Understanding and Exploiting Weight Update Sparsity for Communication-Efficient
Distributed RL, 2026 (arXiv 2602.03839v2), PULSELoCo: after some local steps, each worker adds its weight change to
the changes that it has not sent yet, and sends only entries for which the shared weight, rounded to bfloat16, differs
before and after the change. There is no density: the number of entries follows from the learning rate and the number of
local steps. In a synchronization after every step, which the paper does not describe, the changes are each worker's
updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.compressors.base import Output, SparseCompressor
from spardl.protocol.programs import Combination, Context, State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Range

__all__ = ["METHODS", "ComputeVisible"]

METHODS = (
    Combination(
        "compute_visible", compressor="compute_visible", communicator="allgather", residual="local", momentum="auto"
    ),
)


@dataclass(frozen=True)
class ComputeVisible(SparseCompressor):
    """Keeps the entries that change a weight rounded to bfloat16, in any number.

    Use it with :class:`Outer`, or with a handle that applies the momentum of its ``optimizer=`` before compression.
    Such a handle multiplies an update by the current learning rate before it is compared with the weight.

    An entry is kept if it changes the bfloat16 value of its weight: if it exceeds about half a unit in the last place
    (1/512 to 1/256 of the weight), or less if the weight is close to the border between two values. With error
    feedback, smaller changes are sent once their sum is visible. Smaller learning rates and more frequent exchanges
    send fewer entries.
    """

    name = "compute_visible"
    output = Output.ANY_COUNT
    absolute = True
    needs_weights = True

    def selector(self, context: Context, state: State) -> Select:
        """Returns a function that selects all visible entries, whatever number is requested."""

        def select(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
            return torch.cat([_visible(accumulated.values, context, *part[:2]) for part in parts])

        return select


def _visible(values: Tensor, context: Context, start: int, stop: int) -> Tensor:
    """Returns the int64 positions, shape (m,), of the entries in [start, stop) that change a weight in bfloat16."""
    changes = values[start:stop]
    if context.step_sizes is not None:
        changes = changes * context.step_sizes[start:stop]
    # Without weights, as in the tests that all compressors share, changes are compared with zeros.
    before = torch.zeros_like(changes) if context.weights is None else context.weights[start:stop]
    seen = (before - changes).bfloat16() != before.bfloat16()
    return seen.nonzero().squeeze(1) + start
