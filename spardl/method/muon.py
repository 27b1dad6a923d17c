"""Muon before compression: each worker orthogonalizes the momentum of its gradients, and updates are averaged.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for
LLM Training, arXiv 2502.16982 (learning rates by shape). The arithmetic is that of ``torch.optim.Muon``.

The entries of an orthogonal matrix of shape (a, b) have magnitudes of about 1 / sqrt(max(a, b)), those of Adam's update
magnitudes of about 1. Compressors compare all entries of a bucket with each other, so Muon's updates are multiplied by
sqrt(max(a, b)) before compression, and divided by it in the optimizer's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_bool, check_integer, is_finite, is_number
from spardl.basics.errors import ConfigError
from spardl.method.momentum import AdamMomentum, Matrix, Moments

__all__ = ["MuonMomentum", "entry_size", "orthogonalize"]


# torch.optim.Muon accepts at most 99 iterations.
_MOST_STEPS = 99


def orthogonalize(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Brings all singular values of a matrix close to 1 by the Newton-Schulz iteration of Muon.

    Args:
        matrix: Matrix of shape (a, b).
        coefficients: Coefficients of the polynomial of degree 5: those of x, x^3 and x^5.
        steps: Number of iterations.
        eps: Lower bound of the norm that the matrix is divided by.

    Returns:
        Matrix of shape (a, b) in bfloat16, whose singular values are about 0.7 to 1.2; zeros stay zeros.
    """
    linear, cubic, quintic = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    # In bfloat16, as in torch. A copy, because the division below is in place.
    found = matrix.to(torch.bfloat16, copy=True)
    found = found.T if tall else found
    # The iteration converges for a largest singular value of at most 1, which the Frobenius norm bounds.
    found.div_(found.norm().clamp(min=eps))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), found, beta=linear)
    return found.T if tall else found


def entry_size(rows: int, columns: int) -> float:
    """Returns the root mean square of the entries of an orthogonal matrix of shape (``rows``, ``columns``)."""
    return 1 / math.sqrt(max(rows, columns, 1))


@dataclass(frozen=True)
class MuonMomentum(AdamMomentum):
    """Each worker compresses Muon's updates of matrices, and Adam's updates of all other parameters.

    The matrices are those in ``Moments.matrices``. Their updates are rescaled so that the entries have a root mean
    square of 1, as in updates of Adam. A matrix whose gradient is all zero counts as unused: its update is zero, and
    its momentum stays.

    Args:
        betas: Decay rates of Adam's moments, shares; 0 for the first rate keeps no first moment.
        eps: Constant added to the root of Adam's second moment.
        update_scale: Factor that multiplies all updates: ``none`` or ``measured``; see :class:`AdamMomentum`.
        factor: Share of a matrix's momentum that remains in the next step.
        nesterov: Whether to use Nesterov momentum for matrices.
        coefficients: Coefficients of x, x^3 and x^5 in the polynomial of the Newton-Schulz iteration.
        steps: Number of Newton-Schulz iterations.
        least_norm: Lower bound of the norm (a factor) that a matrix is divided by.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> rule = spardl.method.MuonMomentum(betas=(0.0, 0.95))
        >>> moments = rule.init_moments(torch.zeros(5))
        >>> moments.matrices = (spardl.method.momentum.Matrix(0, rows=2, columns=2),)
        >>> update = rule.apply(torch.tensor([3.0, 0.0, 0.0, -1.0, 0.01]), moments)
        >>> update.sign(), round(float(update[4]), 3)
        (tensor([ 1.,  0.,  0., -1.,  1.]), 1.0)
    """

    betas: Sequence[float] = (0.0, 0.999)
    factor: float = 0.95
    nesterov: bool = True
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    least_norm: float = 1e-7

    name = "muon"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(float, self.factor) or not 0 <= self.factor < 1:
            raise ConfigError(f"momentum.factor must be at least 0 and below 1, got {self.factor!r}")
        check_bool("momentum.nesterov", self.nesterov)
        values = self.coefficients
        if not isinstance(values, Sequence) or len(values) != 3 or not all(is_finite(each) for each in values):
            raise ConfigError(f"momentum.coefficients must be three numbers, got {values!r}")
        check_integer("momentum.steps", self.steps, least=0)
        if self.steps > _MOST_STEPS:
            raise ConfigError(f"momentum.steps must be at most {_MOST_STEPS}, got {self.steps}")
        if not is_finite(self.least_norm) or self.least_norm <= 0:
            raise ConfigError(f"momentum.least_norm must be a number above 0, got {self.least_norm!r}")
        object.__setattr__(self, "coefficients", tuple(float(each) for each in values))

    def _update(self, gradient: Tensor, wide: Tensor, moments: Moments) -> Tensor:
        update, place = torch.empty_like(wide), 0
        for matrix in (*moments.matrices, Matrix(len(gradient), 0, 0)):
            # Entries between the previous matrix and this one belong to Adam.
            if place < matrix.start:
                own = slice(place, matrix.start)
                velocity = moments.velocity[own] if self.betas[0] else moments.velocity
                part = Moments(velocity, moments.variance[own], moments.updates)
                update[own] = super()._update(gradient[own], wide[own], part)
            if place < matrix.stop:
                own = slice(matrix.start, matrix.stop)
                update[own] = self._muon(wide[own], moments.variance[own], matrix).mul_(moments.scale)
            place = matrix.stop
        return update

    def _muon(self, gradient: Tensor, momentum: Tensor, matrix: Matrix) -> Tensor:
        """Update of a ``matrix``, shape (m,), for its ``gradient`` and its ``momentum``, which is changed in place."""
        # torch skips a matrix without a gradient. An update from momentum alone would have the full size in every step.
        used = gradient.any()
        momentum.copy_(torch.where(used, momentum.lerp(gradient, 1 - self.factor), momentum))
        # The difference of two large numbers may overflow, and an infinity would stay.
        limit = torch.finfo(momentum.dtype).max
        momentum.nan_to_num_(nan=0.0, posinf=limit, neginf=-limit)
        mean = gradient.lerp(momentum, self.factor) if self.nesterov else momentum
        found = orthogonalize(mean.view(matrix.rows, matrix.columns), self.coefficients, self.steps, self.least_norm)
        update = found.reshape(-1).to(gradient.dtype) / entry_size(matrix.rows, matrix.columns)
        return torch.where(used, update, 0)
