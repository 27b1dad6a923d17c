"""ARC-Top-K as published: sends matrix rows of the change since the last transmission, with momentum (EF21M).

Worker i keeps a running mean v_i of its gradients, and an estimate h_i of v_i, the sum of all changes sent:

    v_i <- (1 - share) v_i + share gradient_i,    h_i <- h_i + C(v_i - h_i).

The mean of all h_i is applied. Every worker can compute it, because all changes C(v_i - h_i) are sent. With a residual,
a delayed row would be sent as the sum of several steps; this method updates it to its current value.

Source: Chen et al., An All-Reduce Compatible Top-K Compressor for Communication-Efficient Distributed Learning, 2025
(arXiv 2510.26709), with EF21-SGDM of Fatkhullin, Tyurin and Richtarik, Momentum Provably Improves Error Feedback,
NeurIPS 2023 (arXiv 2305.15155, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import is_number
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
    """State of EF21 on one worker.

    Attributes:
        mean: Running mean of the worker's gradients, shape (n,).
        sent: Estimate of the mean: the sum of all changes that this worker has sent, shape (n,).
        total: Sum of the estimates over all workers, shape (n,); equal on all workers.
        begun: Whether the state has seen a gradient.
    """

    mean: Tensor
    sent: Tensor
    total: Tensor
    begun: bool = False

    def rescale(self, factor: float) -> None:
        """Multiplies all tensors by ``factor``, because they scale with the gradients."""
        self.mean, self.sent, self.total = (clip_overflow(each * factor) for each in (self.mean, self.sent, self.total))


@dataclass(frozen=True)
class ARCTopKEF21(ARCTopK):
    """Sends the rows of each matrix's running mean gradient that changed most since they were sent.

    Each worker sends changes of rows; the sum of all changes sent so far, divided by P, estimates the average gradient
    and is applied in every step. The running mean acts as momentum: use an optimizer without momentum, such as SGD with
    ``momentum=0``. If the number of workers changes, the estimate restarts from zero. The other arguments are those of
    :class:`ARCTopK`.

    Args:
        share: Share of a new gradient in the running mean, in (0, 1]; 1 is EF21 without momentum.

    Raises:
        ConfigError: If a value is out of range.
    """

    share: float = 0.1

    name = "arc_topk_ef21"
    mass = Mass.OWED
    sparsifies = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(float, self.share) or not 0 < self.share <= 1:
            raise ConfigError(
                f"compressor.share must be above 0 and at most 1, got {self.share!r}; 0.1 is a momentum of 0.9"
            )

    @property
    def smooths(self) -> bool:
        """Whether the running mean covers more than the last gradient (``share`` below 1)."""
        return self.share < 1

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> EF21State:
        """Returns a state of zeros."""
        mean, sent, total = (torch.zeros(layout.length, dtype=dtype, device=device) for _ in range(3))
        return EF21State(mean, sent, total)

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Sums the changes of the selected rows over all workers, adds them to ``state.total``, and returns a copy."""
        assert isinstance(state, EF21State)
        yield Phase.SELECT
        # The first gradient initializes the mean: from zero, the mean would take 1/share steps to grow. Tensors are not
        # modified in place, because saved states share them.
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
