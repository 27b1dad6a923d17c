"""Adam before compression: each worker normalizes its own gradient, and updates are what is averaged.

Top-k of raw gradients starves the layers whose gradients are small, which Adam would have boosted; and what was late
arrives as the sum of many steps, which Adam then takes for one. Updates are of one size everywhere, and add up.

Source: both moments kept by each worker as in Efficient-Adam (Chen et al., arXiv 2205.14473), whose updates are
quantized, with error feedback both ways. Without the first moment (``betas[0]=0``), the residual takes its place.
Others differ: COMP-AMS (Li, Karimi and Li, ICLR 2022) compresses gradients, and leaves both moments to the server;
1-bit Adam (Tang et al., ICML 2021) compresses the first moment, and freezes the variance after a dense warm-up;
MicroAdam (Modoranu et al., NeurIPS 2024) compresses gradients to save memory.

Each worker divides by the root of its *own* squares, noise included. Averaging P updates removes noise, so the average
is up to the root of P times as short as the update that Adam makes of the averaged gradient, and the learning rate of
dense training is too low. ``update_scale=measured`` multiplies updates, which have no unit, by
``sqrt(mean over workers of |u_i|^2 / |mean of u_i|^2)``: 1 where workers agree, the root of P where they are
independent. The formula has no published source; docs/learning.md shows what it gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from spardl.basics.checks import check_choice, is_a, is_finite
from spardl.basics.errors import ConfigError
from spardl.communicators.steps.bruck import all_gather
from spardl.method.moments import Moments, Spread
from spardl.method.momentum import UPDATE_SCALES, Momentum
from spardl.protocol.costs import Bounds, Cost, log2_ceil
from spardl.protocol.programs import Program, Worker, whole_team
from spardl.protocol.randomness import seeded_generator
from spardl.vector.norms import largest

__all__ = ["AdamMomentum"]

# Entries of an update that workers compare, steps from one comparison to the next, and the share of what was measured
# before that is left then (0.95 for each step). In the first steps, gradients of all workers agree more than later.
_SAMPLE, _PERIOD, _KEPT = 256, 8, 0.95**8
_EARLY = (1, 2, 4)


@dataclass(frozen=True)
class AdamMomentum(Momentum):
    """Each worker compresses Adam's update of its own gradient; what is averaged is applied as it is.

    Args:
        betas: shares of both moments that are left in the next step; 0 for the first one keeps none.
        eps: added to the root of the second one.
        update_scale: what updates are multiplied by: ``none`` (nothing), or ``measured``: how many times as long each
            worker's update is as the average of all workers, from 256 entries of each group that workers exchange in
            every eighth step. One worker alone measures nothing, and multiplies by 1.

    Raises:
        ConfigError: if a value is out of range.

    Example:
        >>> rule = spardl.AdamMomentum(betas=(0.0, 0.95))
        >>> moments = rule.init_moments(torch.zeros(3))
        >>> rule.apply(torch.tensor([0.5, -100.0, 0.0]), moments).round(decimals=3)
        tensor([ 1., -1.,  0.])
    """

    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    update_scale: str = "none"

    name = "adam"
    moved = True

    def __post_init__(self) -> None:
        betas = self.betas
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_a(float, b) and 0 <= b < 1 for b in betas):
            raise ConfigError(f"momentum.betas must be two numbers, at least 0 and below 1, got {betas!r}")
        if not is_finite(self.eps) or self.eps <= 0:
            raise ConfigError(f"momentum.eps must be a number above 0, got {self.eps!r}")
        check_choice("momentum.update_scale", self.update_scale, UPDATE_SCALES)
        object.__setattr__(self, "betas", tuple(float(beta) for beta in betas))

    @property
    def measures(self) -> bool:
        """Whether updates have a measured scale."""
        return self.update_scale == "measured"

    def init_moments(self, like: Tensor) -> Moments:
        """A velocity, unless its share is 0, and a variance, in float32 or wider."""
        wide = torch.promote_types(like.dtype, torch.float32)
        velocity = torch.zeros_like(like) if self.betas[0] else like.new_empty(0)
        return Moments(velocity, torch.zeros_like(like, dtype=wide))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """The first moment / (root of the second + eps), both without their bias, times the measured factor.

        With the gradient's scale.
        """
        first, second = self.betas
        moments.updates += 1
        variance = moments.variance
        wide = gradient.to(variance.dtype)
        if moments.scale != 1:
            wide = wide / moments.scale
        variance.mul_(second).addcmul_(wide, wide, value=1 - second)
        variance.clamp_(max=torch.finfo(variance.dtype).max)
        divisor = variance.sqrt().div_(math.sqrt(1 - second**moments.updates)).add_(self.eps)
        if first:
            moments.velocity.lerp_(gradient, 1 - first)
            divisor.mul_(1 - first**moments.updates)
        # In place: this is the peak of a step's memory.
        update = torch.div(moments.velocity if first else gradient, divisor, out=divisor)
        if self.measures:
            if _compares(moments.step):
                places = _places(len(update), moments.step).to(update.device)
                moments.sample = update[places].to(torch.float32) / moments.scale
            # Before the residual: what waits has the factor of its own step, and no mass is made or lost later.
            if (factor := moments.spread.factor) != 1:
                update.mul_(factor)
        return update.to(gradient.dtype)

    def measure(self, worker: Worker, moments: Moments) -> Program[None]:
        """Workers exchange a sample of their updates, and all compute the same factor for the next steps from it.

        Where a worker has none, since its gradient was not finite, all keep what they have.

        Args:
            worker: who runs it.
            moments: the worker's, changed in place, equally on all workers.

        Returns:
            Nothing.
        """
        sample, moments.sample = moments.sample, None
        if worker.size == 1 or not _compares(moments.step):
            return
        if sample is None:
            sample = torch.full((_size(len(moments.variance)),), torch.nan, device=moments.variance.device)
        sizes = [len(sample)] * worker.size
        values = torch.stack((yield from all_gather(whole_team(worker), sample, sizes, sizes))).double()
        own, common = float(values.square().sum()) / worker.size, float(values.mean(0).square().sum())
        if math.isfinite(own):
            before = moments.spread
            moments.spread = Spread(_KEPT * before.own + own, _KEPT * before.common + common, worker.size)

    def measure_cost(self, worker: Worker, length: int, step: int) -> Cost | None:
        """An all-gather of the samples, in the steps in which workers compare them."""
        if not self.measures or worker.size == 1 or not _compares(step):
            return None
        words = (worker.size - 1) * _size(length)
        return Cost(Bounds.exactly(log2_ceil(worker.size)), Bounds.exactly(words))

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Looks: an update may be larger than the gradient, or smaller."""
        moments.bound.value = max(moments.bound.value, peak)
        found = largest([applied])
        if math.isfinite(found):
            return found, False
        limits = torch.finfo(applied.dtype)
        applied.nan_to_num_(nan=0.0, posinf=limits.max / 2, neginf=-limits.max / 2)
        return limits.max / 2, True


def _compares(step: int) -> bool:
    """Whether workers compare their updates in a synchronization, counted from 0."""
    return step % _PERIOD == 0 or step in _EARLY


def _size(length: int) -> int:
    """Entries in the sample of an update of ``length`` entries."""
    return min(_SAMPLE, length)


@lru_cache(maxsize=16)
def _places(length: int, step: int) -> Tensor:
    """Which entries of an update workers compare: int64, shape (m,), the same on all workers, others in each step."""
    return torch.randint(length, (_size(length),), generator=seeded_generator("update scale", step))
