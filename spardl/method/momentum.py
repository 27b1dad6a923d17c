"""Momentum rules: where momentum and weight decay are applied, and by which formula.

Either the optimizer applies them to the average, or each worker applies them to its own gradient before compression.

Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2 (momentum correction, momentum factor
masking); Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, 2020 (comparison of momentum
before and after averaging).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_bool, check_choice, is_finite, is_number
from spardl.basics.errors import ConfigError
from spardl.communicators.steps.transfer import all_gather
from spardl.protocol.programs import Bounds, Cost, Program, Worker, log2_ceil, seeded_generator, whole_team
from spardl.vector.norms import Bound, largest_magnitude

__all__ = [
    "UPDATE_SCALES",
    "AdamMomentum",
    "AutoMomentum",
    "CorrectedMomentum",
    "LocalMomentum",
    "Matrix",
    "Moments",
    "Momentum",
    "OptimizerMomentum",
    "SgdMomentum",
    "Spread",
]


# State of a momentum before compression.


@dataclass(frozen=True)
class Spread:
    """Squared 2-norms of the workers' updates and of their average, measured on a sample of entries.

    The ratio of the two norms is 1 if all workers compute the same update, and grows with the noise of the gradients.
    All workers store the same values.

    Attributes:
        own: Sum of squares of the sampled entries, averaged over the workers, and summed over all measurements with a
            decay.
        common: Sum of squares of the sampled entries of the averaged update, summed with the same decay.
        workers: Number of workers that were compared.
    """

    own: float = 0.0
    common: float = 0.0
    workers: int = 1

    @property
    def factor(self) -> float:
        """Ratio of the 2-norm of the workers' updates to that of their average, a factor from 1 to sqrt(workers).

        It is 1 before the first measurement.
        """
        if not self.common:
            return 1.0
        return math.sqrt(min(max(self.own / self.common, 1.0), float(self.workers)))

    def resized(self, workers: int) -> Spread:
        """Returns the estimated spread for another number of ``workers`` with equally noisy updates."""
        if workers == self.workers:
            return self
        if self.workers == 1:  # a single worker cannot measure its noise
            return Spread()
        noise = max(self.own - self.common, 0.0) * self.workers / (self.workers - 1)
        signal = max(self.own - noise, 0.0)
        return Spread(self.own, signal + min(noise, self.own) / workers, workers)

    @classmethod
    def pooled(cls, spreads: Iterable[Spread]) -> Spread:
        """Returns the joint spread of several buckets of the same workers, from the ``spreads`` of the buckets."""
        found = list(spreads)
        own, common = (math.fsum(getattr(each, name) for each in found) for name in ("own", "common"))
        return cls(own, common, max((each.workers for each in found), default=1))

    def state_dict(self) -> dict[str, Any]:
        """Returns the attributes by name, as plain numbers."""
        return asdict(self)


class Matrix(NamedTuple):
    """Position and shape, in a flat gradient, of a two-dimensional parameter that Muon updates as one matrix.

    Attributes:
        start: Position of its first entry in the gradient.
        rows: Number of rows.
        columns: Number of columns.
    """

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Position after its last entry in the gradient."""
        return self.start + self.rows * self.columns


@dataclass
class Moments:
    """Running means of one worker's gradients, as an optimizer keeps them.

    With a GradScaler, gradients are multiplied by a loss scale: the velocity includes it, the variance does not.

    Attributes:
        velocity: Running mean of the gradients, times the loss scale, shape (n,); empty if the rule keeps none.
        variance: Running mean of the squared gradients, without the loss scale, shape (n,); empty if the rule keeps
            none. For Muon's matrices, it holds running means of the gradients themselves, also without the loss scale.
        updates: Number of gradients that the variance has averaged.
        spread: Spread of the workers' updates, if it is measured.
        matrices: Parameters that Muon updates, in the order of their positions.
        scale: Loss scale of the next gradient. This and the following attributes are not saved.
        bound: Upper bound of the magnitudes in the velocity.
        step: Number of the synchronization that the next gradient belongs to.
        sample: Entries of the last update, shape (m,), if workers are about to compare them; otherwise ``None``.
    """

    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    variance: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: int = 0
    spread: Spread = Spread()
    matrices: tuple[Matrix, ...] = ()
    scale: float = 1.0
    bound: Bound = field(default_factory=Bound)
    step: int = 0
    sample: Tensor | None = None


# Choices for the factor of Adam's updates.
UPDATE_SCALES = ("none", "measured")


class Momentum(ABC):
    """A rule that computes the vector to compress from a worker's gradients: the gradient itself, or its momentum.

    Attributes:
        name: Name of the rule in configurations.
        remembers: Whether each worker keeps moments of its gradients.
        masks: Whether the velocity is reset at sent entries.
        moved: Whether the rule is a local update: each worker computes the optimizer's update before compression. The
            optimizer itself then only applies averages, and gradient clipping limits each worker's own gradient.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    moved: ClassVar[bool] = False

    @property
    def decay(self) -> float:
        """Weight decay before compression: the multiple of the weights that each worker adds to its gradient."""
        return 0.0

    @property
    def measures(self) -> bool:
        """Whether workers exchange samples of their updates to measure ``Moments.spread``."""
        return False

    def init_moments(self, like: Tensor) -> Moments:
        """Returns the initial moments of a worker with a gradient like ``like``, shape (n,)."""
        return Moments(like.new_empty(0), like.new_empty(0))

    @abstractmethod
    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Returns the vector to compress.

        Args:
            gradient: Finite gradient, shape (n,); not changed.
            moments: Moments of the worker, changed in place.

        Returns:
            Vector of shape (n,).
        """

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Clips overflows in the result of ``apply`` and in the moments, so that both are finite.

        Args:
            applied: Result of ``apply``, shape (n,); overflows are clipped in place.
            peak: Largest magnitude in the gradient.
            moments: Moments of the worker, changed in place.

        Returns:
            An upper bound of the magnitudes in ``applied``, and whether an entry was clipped.
        """
        return peak, False

    def measure(self, worker: Worker, moments: Moments) -> Program[None]:
        """Compares the last updates of all workers and updates ``moments.spread``; called only if ``measures``.

        This is a generator that requests the messages of one worker (see ``spardl.protocol.programs``).

        Args:
            worker: Worker that runs this generator.
            moments: Moments of the worker; their ``spread`` changes equally on all workers.

        Returns:
            Nothing.
        """
        yield from ()

    def measure_cost(self, worker: Worker, length: int, step: int) -> Cost | None:
        """Returns the communication cost of ``measure``.

        Args:
            worker: Worker that runs ``measure``.
            length: Number of entries of the gradient.
            step: Number of the synchronization, dense warm-up included.

        Returns:
            The cost; ``None`` if workers exchange nothing in this step.
        """
        return None

    def mask(self, velocity: Tensor, sent: Tensor) -> None:
        """Resets the velocity at the entries that this worker sent; called only if ``masks``.

        Args:
            velocity: Velocity, shape (n,), changed in place.
            sent: Positions of the sent entries: int64, shape (m,).
        """
        velocity[sent] = 0


class OptimizerMomentum(Momentum):
    """Compresses the gradient; the optimizer applies momentum and weight decay to the average."""

    name = "optimizer"
    remembers = False

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Returns the gradient itself."""
        return gradient


@dataclass(frozen=True)
class AutoMomentum(OptimizerMomentum):
    """Placeholder that ``spardl.method.moving.resolve_momentum`` replaces by the rule that matches the optimizer.

    Args:
        beta2: Adam's beta2 on each worker, a share; ``None`` uses the optimizer's, but at most 0.99 if ``scope=auto``
            means chunks or Muon's updates are sent as codes, and at most 0.95 otherwise.
        update_scale: Factor of Adam's and Muon's updates: ``none`` or ``measured``; see :class:`AdamMomentum`. ``None``
            means ``measured`` in handles (``attach`` and others), otherwise ``none``.
        factor: Momentum factor of SGD's updates (a share), at most the optimizer's; ``None`` uses the optimizer's, or a
            smaller one where ``resolve_momentum`` says so. With a smaller factor, updates are multiplied by a gain;
            see :class:`SgdMomentum`.

    Raises:
        ConfigError: If a value is out of range.
    """

    beta2: float | None = None
    update_scale: str | None = None
    factor: float | None = None

    name = "auto"

    def __post_init__(self) -> None:
        if self.update_scale is not None:
            check_choice("update_scale", self.update_scale, UPDATE_SCALES)
        if self.beta2 is not None and (not is_number(float, self.beta2) or not 0 <= self.beta2 < 1):
            raise ConfigError(f"beta2 must be at least 0 and below 1, got {self.beta2!r}")
        if self.factor is not None and (not is_number(float, self.factor) or not 0 <= self.factor < 1):
            raise ConfigError(f"momentum.factor must be at least 0 and below 1, got {self.factor!r}")


@dataclass(frozen=True)
class LocalMomentum(Momentum):
    """Each worker compresses the momentum of its own gradients; the optimizer must have no momentum.

    Args:
        factor: Share of the velocity that remains in the next step.
        weight_decay: Multiple of the weights that is added to the gradient.
        nesterov: Whether to use Nesterov momentum.

    Raises:
        ConfigError: If a value is out of range.
    """

    factor: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    name = "local"

    def __post_init__(self) -> None:
        if not is_number(float, self.factor) or not 0 <= self.factor < 1:
            raise ConfigError(f"momentum.factor must be at least 0 and below 1, got {self.factor!r}")
        if not is_number(float, self.weight_decay) or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"momentum.weight_decay must be a number, at least 0, got {self.weight_decay!r}")
        check_bool("momentum.nesterov", self.nesterov)

    @property
    def decay(self) -> float:
        """Weight decay that each worker applies before compression: the argument ``weight_decay``."""
        return self.weight_decay

    def init_moments(self, like: Tensor) -> Moments:
        """Returns moments with a velocity of zeros."""
        return Moments(torch.zeros_like(like), like.new_empty(0))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Updates the velocity to factor * velocity + gradient.

        Returns the velocity itself, or gradient + factor * velocity with Nesterov momentum.
        """
        velocity = moments.velocity
        velocity.mul_(self.factor).add_(gradient)
        return torch.add(gradient, velocity, alpha=self.factor) if self.nesterov else velocity

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Updates the bound from ``peak`` alone, and reads the vectors only if they could overflow."""
        found = moments.bound.grow(moments.velocity, peak)
        most = Bound(moments.bound.value)
        if applied is not moments.velocity:
            found = most.grow(applied, peak) or found
        return most.value, found


@dataclass(frozen=True)
class CorrectedMomentum(LocalMomentum):
    """Momentum correction with factor masking; the arguments are those of :class:`LocalMomentum`.

    Momentum correction: each worker compresses its velocity instead of its gradient. Factor masking: the velocity of an
    entry is reset once the entry is sent, because it contains old gradients if the entry has waited in the residual.
    """

    name = "corrected"
    masks = True


@dataclass(frozen=True)
class SgdMomentum(LocalMomentum):
    """Each worker compresses the update of torch's SGD, with momentum and the weight decay of the optimizer.

    The residual delays entries and sums them over several steps, as momentum does, so momentum adds to the delay. A
    smaller ``factor`` than that of the optimizer shortens the delay. With ``gain = (1 - factor) / (1 - momentum of the
    optimizer)``, the total change of the weights that one gradient causes stays the same.

    Args:
        factor: Share of the velocity that remains in the next step.
        weight_decay: Multiple of the weights that is added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        gain: Factor that multiplies the updates, above 0.

    Raises:
        ConfigError: If a value is out of range.
    """

    gain: float = 1.0

    name = "sgd"
    moved = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_finite(self.gain) or self.gain <= 0:
            raise ConfigError(f"momentum.gain must be a number above 0, got {self.gain!r}")

    @classmethod
    def shortened(cls, rule: SgdMomentum, factor: float) -> SgdMomentum:
        """Returns a rule with a smaller momentum ``factor`` than ``rule``, and the same total change per gradient.

        Raises:
            ConfigError: If the factor is larger than that of the rule.
        """
        if factor > rule.factor:
            raise ConfigError(
                f"momentum_factor={factor} is above the momentum of the optimizer, {rule.factor}; use at most that"
            )
        return replace(rule, factor=factor, gain=(1 - factor) / (1 - rule.factor))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Returns SGD's update times the gain."""
        update = super().apply(gradient, moments)
        # A new vector: the velocity itself has no gain.
        return update if self.gain == 1 else update * self.gain

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Updates the bound as in :class:`LocalMomentum`, for updates multiplied by the gain."""
        if self.gain == 1:
            return super().bound(applied, peak, moments)
        found = moments.bound.grow(moments.velocity, peak)
        # Nesterov momentum adds at most one gradient to the velocity.
        most = Bound((moments.bound.value + peak) * self.gain)
        found = most.grow(applied, 0.0) or found
        return most.value, found


# Adam before compression: each worker normalizes its own gradient, and updates are averaged.
#
# Top-k of gradients rarely selects entries of layers with small gradients, although Adam would scale these up. Adam
# after averaging would treat a delayed entry, the sum of many steps, as a single gradient. Updates have similar sizes
# in all layers, and their sum over several steps is again an update.
#
# Source: each worker keeps both moments as in Efficient-Adam (Chen et al., arXiv 2205.14473), which quantizes updates
# with error feedback in both directions. Without the first moment (``betas[0]=0``), the residual takes its role.
# Other methods differ: COMP-AMS (Li, Karimi and Li, ICLR 2022) compresses gradients and keeps both moments on the
# server; 1-bit Adam (Tang et al., ICML 2021) compresses the first moment and freezes the variance after a dense
# warm-up; MicroAdam (Modoranu et al., NeurIPS 2024) compresses gradients to save memory.
#
# Each worker divides by the root of its *own* squared gradients, including their noise. Averaging P updates reduces the
# noise, so the 2-norm of the average is up to sqrt(P) times smaller than that of Adam's update of the averaged
# gradient, and the learning rate of dense training is too low. ``update_scale=measured`` multiplies updates by
# ``sqrt(mean over workers of |u_i|^2 / |mean of u_i|^2)``: 1 if all updates are equal, sqrt(P) if they are independent
# with mean zero. The formula has no published source; docs/tables/learning.md shows its effect.


# Sampled entries of an update, steps between two comparisons, and the share of earlier measurements that remains at a
# comparison (0.95 per step).
_SAMPLE, _PERIOD, _KEPT = 256, 8, 0.95**8
# Steps with additional comparisons: the gradients of the workers differ less in the first steps than later.
_EARLY = (1, 2, 4)


@dataclass(frozen=True)
class AdamMomentum(Momentum):
    """Each worker compresses Adam's update of its gradient; the averaged update is applied unchanged.

    Args:
        betas: Decay rates of both moments, shares; 0 for the first rate keeps no first moment.
        eps: Constant added to the root of the second moment.
        update_scale: Factor that multiplies the updates: ``none`` (1), or ``measured``, the ratio of the 2-norm of a
            worker's update to that of the average over all workers. The ratio is measured on 256 entries of each
            bucket, which workers exchange in every eighth step, and more often at first. It is 1 for a single worker.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> rule = spardl.method.AdamMomentum(betas=(0.0, 0.95))
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
        if (
            not isinstance(betas, Sequence)
            or len(betas) != 2
            or not all(is_number(float, b) and 0 <= b < 1 for b in betas)
        ):
            raise ConfigError(f"momentum.betas must be two numbers, at least 0 and below 1, got {betas!r}")
        if not is_finite(self.eps) or self.eps <= 0:
            raise ConfigError(f"momentum.eps must be a number above 0, got {self.eps!r}")
        check_choice("momentum.update_scale", self.update_scale, UPDATE_SCALES)
        object.__setattr__(self, "betas", tuple(float(beta) for beta in betas))

    @property
    def measures(self) -> bool:
        """Whether ``update_scale`` is ``measured``."""
        return self.update_scale == "measured"

    def init_moments(self, like: Tensor) -> Moments:
        """Returns moments of zeros: a velocity unless its decay rate is 0, and a variance in float32 or wider."""
        wide = torch.promote_types(like.dtype, torch.float32)
        velocity = torch.zeros_like(like) if self.betas[0] else like.new_empty(0)
        return Moments(velocity, torch.zeros_like(like, dtype=wide))

    def apply(self, gradient: Tensor, moments: Moments) -> Tensor:
        """Returns first moment / (root of second moment + eps), bias-corrected, times the measured factor.

        The update is multiplied by the same loss scale as the gradient.
        """
        moments.updates += 1
        wide = gradient.to(moments.variance.dtype)
        if moments.scale != 1:
            wide = wide / moments.scale
        update = self._update(gradient, wide, moments)
        if self.measures:
            if _measures_at(moments.step, len(update)):
                positions = _sample_positions(len(update), moments.step).to(update.device)
                moments.sample = update[positions].to(torch.float32) / moments.scale
            # Apply the factor before the residual: unsent entries keep the factor of their step, so no mass is created
            # or lost when the factor changes.
            if (factor := moments.spread.factor) != 1:
                update.mul_(factor)
        return update.to(gradient.dtype)

    def _update(self, gradient: Tensor, wide: Tensor, moments: Moments) -> Tensor:
        """Returns Adam's update in the scale of ``gradient``; ``wide`` is the gradient without its scale."""
        first, second = self.betas
        variance = moments.variance
        variance.mul_(second).addcmul_(wide, wide, value=1 - second)
        variance.clamp_(max=torch.finfo(variance.dtype).max)
        divisor = variance.sqrt().div_(math.sqrt(1 - second**moments.updates)).add_(self.eps)
        if first:
            moments.velocity.lerp_(gradient, 1 - first)
            divisor.mul_(1 - first**moments.updates)
        # In place, since memory use peaks here.
        return torch.div(moments.velocity if first else gradient, divisor, out=divisor)

    def measure(self, worker: Worker, moments: Moments) -> Program[None]:
        """Exchanges samples of the updates, from which all workers compute the same factor for the next steps.

        Args:
            worker: Worker that runs this generator.
            moments: Moments of the worker; their ``spread`` changes equally on all workers.

        Returns:
            Nothing.
        """
        sample, moments.sample = moments.sample, None
        if worker.size == 1 or not _measures_at(moments.step, len(moments.variance)):
            return
        if sample is None:
            # The gradient was not finite. A sample of NaN makes all workers keep the old spread.
            size = _sample_size(len(moments.variance))
            sample = torch.full((size,), torch.nan, device=moments.variance.device)
        sizes = [len(sample)] * worker.size
        values = torch.stack((yield from all_gather(whole_team(worker), sample, sizes, sizes))).double()
        own, common = float(values.square().sum()) / worker.size, float(values.mean(0).square().sum())
        if math.isfinite(own):
            before = moments.spread
            moments.spread = Spread(_KEPT * before.own + own, _KEPT * before.common + common, worker.size)

    def measure_cost(self, worker: Worker, length: int, step: int) -> Cost | None:
        """Returns the cost of an all-gather of the samples, in the steps that compare them."""
        if not self.measures or worker.size == 1 or not _measures_at(step, length):
            return None
        words = (worker.size - 1) * _sample_size(length)
        return Cost(Bounds.exactly(log2_ceil(worker.size)), Bounds.exactly(words))

    def bound(self, applied: Tensor, peak: float, moments: Moments) -> tuple[float, bool]:
        """Computes the bound from all entries of ``applied``, because updates and gradients have different sizes."""
        moments.bound.value = max(moments.bound.value, peak)
        found = largest_magnitude([applied])
        if math.isfinite(found):
            return found, False
        limits = torch.finfo(applied.dtype)
        applied.nan_to_num_(nan=0.0, posinf=limits.max / 2, neginf=-limits.max / 2)
        return limits.max / 2, True


def _measures_at(step: int, length: int) -> bool:
    """Whether workers compare updates with ``length`` entries in this synchronization, counted from 0."""
    # A bucket is empty if all of its parameters are.
    return length > 0 and (step % _PERIOD == 0 or step in _EARLY)


def _sample_size(length: int) -> int:
    return min(_SAMPLE, length)


@lru_cache(maxsize=16)
def _sample_positions(length: int, step: int) -> Tensor:
    """Positions of the compared entries: int64, shape (m,), equal on all workers and different in each step."""
    return torch.randint(length, (_sample_size(length),), generator=seeded_generator("update scale", step))
