"""ARC-Top-K as published: rows of what has changed since they were last sent, with momentum (EF21M).

Source: Chen et al., An All-Reduce Compatible Top-K Compressor for Communication-Efficient Distributed Learning, 2025
(arXiv 2510.26709), with EF21-SGDM of Fatkhullin, Tyurin and Richtarik, Momentum Provably Improves Error Feedback,
NeurIPS 2023 (arXiv 2305.15155, algorithm 1). Worker i keeps a running mean of its gradients and what all have of it,

    v_i <- (1 - share) v_i + share gradient_i,    h_i <- h_i + C(v_i - h_i),

and what is applied is the mean of all h_i, which every worker has, since only the differences C(v_i - h_i) travel. A
residual would send a row that waited with the sum of all its steps; this sends where it now stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.compressors.arc_topk import ARCTopK
from spardl.compressors.base import Mass, Total
from spardl.protocol.programs import Combination, Context, Phase, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout
from spardl.vector.norms import clip_overflow
from spardl.vector.sparse import Sum

__all__ = ["METHODS", "ARCTopKEF21", "EF21State"]

METHODS = (Combination("arc_topk_ef21", compressor="arc_topk_ef21", communicator="dense", residual="none"),)


@dataclass
class EF21State(State):
    """What one worker carries.

    Attributes:
        mean: of its gradients, shape (n,).
        sent: what the others have of it, shape (n,).
        total: the sum of that over all workers, shape (n,); the same on every one.
        begun: whether there was a gradient yet.
    """

    mean: Tensor
    sent: Tensor
    total: Tensor
    begun: bool = False

    def rescale(self, factor: float) -> None:
        """All three are in the units of gradients."""
        self.mean, self.sent, self.total = (clip_overflow(each * factor) for each in (self.mean, self.sent, self.total))


@dataclass(frozen=True)
class ARCTopKEF21(ARCTopK):
    """Sends the largest rows of what has changed in every matrix, and averages all that was ever sent.

    The average is a momentum: give it to an optimizer without one, such as SGD with ``momentum=0``. Where the number of
    workers changes, it begins anew. See :class:`ARCTopK` for the other arguments.

    Args:
        share: share of a new gradient in the running mean, in (0, 1]; 1 is EF21 without momentum.

    Raises:
        ConfigError: if a value is out of range.
    """

    share: float = 0.1

    name = "arc_topk_ef21"
    mass = Mass.OWED
    sparsifies = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(float, self.share) or not 0 < self.share <= 1:
            raise ConfigError(
                f"compressor.share must be above 0 and at most 1, got {self.share!r}; 0.1 is a momentum of 0.9"
            )

    @property
    def smooths(self) -> bool:
        """Unless the mean is the last gradient."""
        return self.share < 1

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> EF21State:
        """Zeros."""
        mean, sent, total = (torch.zeros(layout.length, dtype=dtype, device=device) for _ in range(3))
        return EF21State(mean, sent, total)

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """The rows in which the means have moved most away from what was sent, added to all that was sent before."""
        assert isinstance(state, EF21State)
        yield Phase.SELECT
        # The first gradient is the mean of what there is: a mean that begins at zero would take 1/share steps to grow.
        # Nothing is changed in place: saved states share their tensors.
        state.mean = state.mean.lerp(accumulated.values, self.share if state.begun else 1.0)
        state.begun = True
        moved = clip_overflow(state.mean - state.sent)
        positions = yield from self.agree(moved, context, total)
        values = moved[positions]
        state.sent = state.sent.index_add(0, positions, values)
        summed = yield from total(values)
        yield Phase.MERGE
        state.total = clip_overflow(state.total.index_add(0, positions, summed))
        return state.total.clone()
