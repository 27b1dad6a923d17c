"""Adam before compression: each worker normalizes its own gradient, and updates are what is averaged.

Top-k of raw gradients starves the layers whose gradients are small, which Adam would have boosted; and what was late
arrives as the sum of many steps, which Adam then takes for one. Updates are of one size everywhere, and add up.

Source: both moments kept by each worker as in Efficient-Adam (Chen et al., arXiv 2205.14473), whose updates are
quantized, with error feedback both ways. Without the first moment (``betas[0]=0``), the residual takes its place.
Others differ: COMP-AMS (Li, Karimi and Li, ICLR 2022) compresses gradients, and leaves both moments to the server;
1-bit Adam (Tang et al., ICML 2021) compresses the first moment, and freezes the variance after a dense warm-up;
MicroAdam (Modoranu et al., NeurIPS 2024) compresses gradients to save memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import is_a, is_finite
from spardl.basics.errors import ConfigError
from spardl.method.moments import Moments
from spardl.method.momentum import Momentum
from spardl.vector.norms import largest

__all__ = ["AdamMomentum"]


@dataclass(frozen=True)
class AdamMomentum(Momentum):
    """Each worker compresses Adam's update of its own gradient; what is averaged is applied as it is.

    Args:
        betas: shares of both moments that are left in the next step; 0 for the first one keeps none.
        eps: added to the root of the second one.

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

    name = "adam"
    moved = True

    def __post_init__(self) -> None:
        betas = self.betas
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_a(float, b) and 0 <= b < 1 for b in betas):
            raise ConfigError(f"momentum.betas must be two numbers, at least 0 and below 1, got {betas!r}")
        if not is_finite(self.eps) or self.eps <= 0:
            raise ConfigError(f"momentum.eps must be a number above 0, got {self.eps!r}")
        object.__setattr__(self, "betas", tuple(float(beta) for beta in betas))

    def init_moments(self, like: Tensor) -> Moments:
        """A velocity, unless its share is 0, and a variance, in float32 or wider."""
        wide = torch.promote_types(like.dtype, torch.float32)
        velocity = torch.zeros_like(like) if self.betas[0] else like.new_empty(0)
        return Moments(velocity, torch.zeros_like(like, dtype=wide))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """The first moment / (root of the second + eps), both without their bias; with the gradient's scale."""
        first, second = self.betas
        moments.updates += 1
        variance = moments.variance
        wide = gradient.to(variance.dtype)
        if moments.scale != 1:
            wide = wide / moments.scale
        variance.mul_(second).addcmul_(wide, wide, value=1 - second)
        variance.clamp_(max=torch.finfo(variance.dtype).max)
        divisor = variance.sqrt().div_(math.sqrt(1 - second**moments.updates)).add_(self.eps)
        if not first:
            return (gradient / divisor).to(gradient.dtype)
        moments.velocity.lerp_(gradient, 1 - first)
        return (moments.velocity / divisor.mul_(1 - first**moments.updates)).to(gradient.dtype)

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Looks: an update may be larger than the gradient, or smaller."""
        moments.bound.value = max(moments.bound.value, peak)
        found = largest([applied])
        if math.isfinite(found):
            return found, False
        limits = torch.finfo(applied.dtype)
        applied.nan_to_num_(nan=0.0, posinf=limits.max / 2, neginf=-limits.max / 2)
        return limits.max / 2, True
