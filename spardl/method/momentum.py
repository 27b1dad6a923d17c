"""Where momentum and weight decay are applied: by the optimizer to the average, or by each worker to its gradient.

Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2 (momentum correction, momentum factor
masking); Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (the axis).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from spardl.basics.checks import check_choice, check_flag, is_a, is_finite
from spardl.basics.errors import ConfigError
from spardl.communicators.steps.transfer import all_gather
from spardl.protocol.programs import Bounds, Cost, Program, Worker, log2_ceil, seeded_generator, whole_team
from spardl.vector.norms import Bound, largest

__all__ = [
    "UPDATE_SCALES",
    "AdamMomentum",
    "AutoMomentum",
    "CorrectedMomentum",
    "LocalMomentum",
    "Moments",
    "Momentum",
    "OptimizerMomentum",
    "SgdMomentum",
    "Spread",
]


# What a momentum before compression remembers of one worker's gradients.


@dataclass(frozen=True)
class Spread:
    """How far apart the updates of all workers are, from a sample of their entries; equal on all workers.

    Attributes:
        own: running sum of the workers' mean of the squared updates.
        common: running sum of the squares of the averaged update, with the same weights.
        workers: how many workers were compared.
    """

    own: float = 0.0
    common: float = 0.0
    workers: int = 1

    @property
    def factor(self) -> float:
        """The root mean square of the workers' updates / that of their average: 1 to the root of the workers."""
        if not self.common:
            return 1.0
        return math.sqrt(min(max(self.own / self.common, 1.0), float(self.workers)))

    def resized(self, workers: int) -> Spread:
        """What another number of ``workers`` with the same noise would have measured."""
        if workers == self.workers:
            return self
        if self.workers == 1:  # one alone knows nothing of its noise
            return Spread()
        noise = max(self.own - self.common, 0.0) * self.workers / (self.workers - 1)
        signal = max(self.own - noise, 0.0)
        return Spread(self.own, signal + min(noise, self.own) / workers, workers)

    @classmethod
    def pooled(cls, spreads: Iterable[Spread]) -> Spread:
        """The ``spreads`` of several groups of the same workers, taken together."""
        found = list(spreads)
        own, common = (math.fsum(getattr(each, name) for each in found) for name in ("own", "common"))
        return cls(own, common, max((each.workers for each in found), default=1))

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the arguments."""
        return asdict(self)


@dataclass
class Moments:
    """Running means of one worker's gradients.

    Attributes:
        velocity: of the gradients, with their scale, shape (n,); empty if nothing of the kind is kept.
        variance: of their squares, without it, shape (n,); likewise.
        updates: gradients that are in the variance.
        spread: of the workers' updates, if it is measured.
        scale: by which the next gradient is multiplied; not saved, and neither are the following attributes.
        bound: of the velocity's magnitudes.
        step: number of the synchronization that the next gradient is for.
        sample: entries of the last update, shape (m,), if the workers are to compare them.
    """

    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    variance: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: int = 0
    spread: Spread = Spread()
    scale: float = 1.0
    bound: Bound = field(default_factory=Bound)
    step: int = 0
    sample: Tensor | None = None


# Factors of Adam's updates before they are averaged.
UPDATE_SCALES = ("none", "measured")


class Momentum(ABC):
    """A rule for what is compressed: the gradient, or a momentum of it.

    Attributes:
        name: how configurations call it.
        remembers: whether each worker carries moments of its gradients.
        masks: whether the velocity is stopped at the entries that were sent.
        moved: whether it is an optimizer's, moved: that then only applies averages, and a limit on the norm
            holds for each worker's own gradient.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    moved: ClassVar[bool] = False

    @property
    def decay(self) -> float:
        """Weight decay that each worker adds to its gradient before compression."""
        return 0.0

    @property
    def measures(self) -> bool:
        """Whether workers exchange more than what is compressed."""
        return False

    def init_moments(self, like: Tensor) -> Moments:
        """Zeros for a worker that begins; ``like``: its gradient, shape (n,)."""
        return Moments(like.new_empty(0), like.new_empty(0))

    @abstractmethod
    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """What is to be compressed.

        Args:
            gradient: finite, shape (n,), not changed.
            moments: the worker's, changed in place.

        Returns:
            Shape (n,).
        """

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Sees to it that what was remembered and what is to be compressed are finite.

        Args:
            applied: what ``apply`` returned, shape (n,); cut in place where it overflowed.
            peak: largest magnitude of the gradient.
            moments: the worker's, likewise.

        Returns:
            A bound of the magnitudes of ``applied``, and whether something had to be cut.
        """
        return peak, False

    def measure(self, worker: Worker, moments: Moments) -> Program[None]:
        """The program in which workers compare what they accumulated last; called if ``measures``.

        Args:
            worker: who runs it.
            moments: the worker's, changed in place, equally on all workers.

        Returns:
            Nothing.
        """
        yield from ()

    def measure_cost(self, worker: Worker, length: int, step: int) -> Cost | None:
        """Rounds and words of that program.

        Args:
            worker: who runs it.
            length: entries of the gradient.
            step: number of the synchronization, dense warm-up included.

        Returns:
            The cost; ``None`` if nothing is exchanged in this step.
        """
        return None

    def mask(self, velocity: Tensor, sent: Tensor) -> None:
        """Stops the velocity where this worker sent; called if ``masks``.

        Args:
            velocity: shape (n,), changed in place.
            sent: int64 positions, shape (m,).
        """
        velocity[sent] = 0


class OptimizerMomentum(Momentum):
    """Compresses the gradient; momentum and weight decay are the optimizer's, applied to the average."""

    name = "optimizer"
    remembers = False

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """The gradient itself."""
        return gradient


@dataclass(frozen=True)
class AutoMomentum(OptimizerMomentum):
    """What the optimizer has is each worker's, as far as the optimizer is known; see ``spardl.method.moving``.

    Args:
        beta2: share of Adam's squares that is left in the next step; ``None``: the optimizer's, at most 0.99 where
            ``scope=auto`` takes a share of each chunk, else 0.95.
        update_scale: of Adam's updates: ``none`` or ``measured``; see :class:`AdamMomentum`.

    Raises:
        ConfigError: if a value is out of range.
    """

    beta2: float | None = None
    update_scale: str = "none"

    name = "auto"

    def __post_init__(self) -> None:
        check_choice("update_scale", self.update_scale, UPDATE_SCALES)
        if self.beta2 is not None and (not is_a(float, self.beta2) or not 0 <= self.beta2 < 1):
            raise ConfigError(f"beta2 must be at least 0 and below 1, got {self.beta2!r}")


@dataclass(frozen=True)
class LocalMomentum(Momentum):
    """Each worker compresses a momentum of its own gradient; the optimizer must have none.

    Args:
        factor: share of the velocity that is left in the next step.
        weight_decay: multiple of the weights that is added to the gradient.
        nesterov: whether the gradient is looked ahead.

    Raises:
        ConfigError: if a value is out of range.
    """

    factor: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    name = "local"

    def __post_init__(self) -> None:
        if not is_a(float, self.factor) or not 0 <= self.factor < 1:
            raise ConfigError(f"momentum.factor must be at least 0 and below 1, got {self.factor!r}")
        if not is_a(float, self.weight_decay) or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"momentum.weight_decay must be a number, at least 0, got {self.weight_decay!r}")
        check_flag("momentum.nesterov", self.nesterov)

    @property
    def decay(self) -> float:
        """The configured weight decay."""
        return self.weight_decay

    def init_moments(self, like: Tensor) -> Moments:
        """A velocity."""
        return Moments(torch.zeros_like(like), like.new_empty(0))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Factor * velocity + gradient, which is the velocity from now on."""
        velocity = moments.velocity
        velocity.mul_(self.factor).add_(gradient)
        return torch.add(gradient, velocity, alpha=self.factor) if self.nesterov else velocity

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Grows by the peak; only where that is too much are the vectors looked at."""
        found = moments.bound.grow(moments.velocity, peak)
        most = Bound(moments.bound.value)
        if applied is not moments.velocity:
            found = most.grow(applied, peak) or found
        return most.value, found


@dataclass(frozen=True)
class CorrectedMomentum(LocalMomentum):
    """Momentum correction with factor masking; see ``LocalMomentum`` for the arguments.

    What is sent late was multiplied by the momentum for as long as it waited; stopping the velocity where an
    entry was sent keeps stale momentum from pushing on.
    """

    name = "corrected"
    masks = True


@dataclass(frozen=True)
class SgdMomentum(LocalMomentum):
    """The momentum of torch's SGD, moved: weight decay is what the optimizer's groups have; see ``LocalMomentum``."""

    name = "sgd"
    moved = True


# Adam before compression: each worker normalizes its own gradient, and updates are what is averaged.
#
# Top-k of raw gradients starves the layers whose gradients are small, which Adam would have boosted; and what was late
# arrives as the sum of many steps, which Adam then takes for one. Updates are of one size everywhere, and add up.
#
# Source: both moments kept by each worker as in Efficient-Adam (Chen et al., arXiv 2205.14473), whose updates are
# quantized, with error feedback both ways. Without the first moment (``betas[0]=0``), the residual takes its place.
# Others differ: COMP-AMS (Li, Karimi and Li, ICLR 2022) compresses gradients, and leaves both moments to the server;
# 1-bit Adam (Tang et al., ICML 2021) compresses the first moment, and freezes the variance after a dense warm-up;
# MicroAdam (Modoranu et al., NeurIPS 2024) compresses gradients to save memory.
#
# Each worker divides by the root of its *own* squares, noise included. Averaging P updates removes noise, so the
# average is up to the root of P times as short as the update that Adam makes of the averaged gradient, and the
# learning rate of dense training is too low. ``update_scale=measured`` multiplies updates, which have no unit, by
# ``sqrt(mean over workers of |u_i|^2 / |mean of u_i|^2)``: 1 where workers agree, the root of P where they are
# independent. The formula has no published source; docs/tables/learning.md shows what it gains.


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
