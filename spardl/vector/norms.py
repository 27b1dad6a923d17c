"""Norms that do not depend on how a vector is split across workers, and bounds that detect overflow.

A floating-point sum depends on the order of its terms, so a clipping factor would depend on how the vector is split.
Here, squares are rounded to multiples of a common power of two and summed as integers: their sum does not depend on the
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spardl.vector.kernels import compiled

__all__ = [
    "Bound",
    "Magnitudes",
    "clip_factor",
    "clip_overflow",
    "divide",
    "fits",
    "host_reads",
    "largest_magnitude",
    "norm_of",
    "peak_of",
    "sum_of_squares",
]


# Entries squared at a time: they stay in the cache, and no temporary vectors of full size are needed.
_CHUNK = 1 << 15
_BITS = 62
# Below this number of entries, torch is faster than the call of a compiled kernel.
_SMALL = 1 << 13


class Magnitudes(NamedTuple):
    """How to read the magnitudes of a floating-point dtype as integers, which compare in the same order.

    Attributes:
        bits: Integer dtype of the same size.
        mask: Bit mask that removes the sign from such an integer.
        shift: Number of bits by which the integer is shifted left to convert it back to a number.
        wide: numpy type of the shifted integer.
        number: numpy floating-point type as which the shifted integer is read.
    """

    bits: torch.dtype
    mask: Any
    # numpy has no bfloat16, but bfloat16 is the upper half of a float32.
    shift: int
    wide: Any
    number: Any

    @classmethod
    def of(cls, dtype: torch.dtype) -> Magnitudes:
        """Returns the integer representation of the magnitudes of ``dtype``."""
        return _RAW[dtype]

    def number_of(self, bits: Any) -> float:
        """Converts a magnitude, given as the integer ``bits``, to a float."""
        return float(self.wide(int(bits) << self.shift).view(self.number))


_RAW: Mapping[torch.dtype, Magnitudes] = MappingProxyType(
    {
        torch.float16: Magnitudes(torch.int16, np.int16(2**15 - 1), 0, np.int16, np.float16),
        torch.bfloat16: Magnitudes(torch.int16, np.int16(2**15 - 1), 16, np.int32, np.float32),
        torch.float32: Magnitudes(torch.int32, np.int32(2**31 - 1), 0, np.int32, np.float32),
        torch.float64: Magnitudes(torch.int64, np.int64(2**63 - 1), 0, np.int64, np.float64),
    }
)


def host_reads(values: Tensor) -> bool:
    """Returns whether the host can read results of operations on ``values``, of any shape, without waiting."""
    return values.device.type == "cpu"


def peak_of(values: Tensor) -> Tensor:
    """Returns the largest magnitude in ``values``, shape (n,), as a scalar on their device; NaN if one is NaN."""
    return torch.linalg.vector_norm(values, ord=math.inf) if values.numel() else values.new_zeros(())


def largest_magnitude(parts: Iterable[Tensor]) -> float:
    """Returns the largest magnitude in ``parts``, tensors of shape (m,); NaN if one is NaN, 0 without entries."""
    found = [_peak(part.detach()) for part in parts if part.numel()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def divide(values: Tensor, count: int) -> float:
    """Divides a vector by a number, and returns its largest magnitude before the division.

    Args:
        values: Tensor of shape (n,), modified in place.
        count: Integer divisor.

    Returns:
        The largest magnitude before the division; NaN if one is NaN.
    """
    raw = _raw(values)
    # numpy has no bfloat16, and numba cannot divide float16.
    if raw is None or raw.shift or values.dtype == torch.float16:
        peak = largest_magnitude([values])
        values.div_(count)
        return peak
    from spardl.vector.kernels import selection  # noqa: PLC0415 - takes seconds to import

    bits, divisor = values.view(raw.bits).numpy(), raw.number(count)
    return raw.number_of(selection.divide(values.numpy(), bits, raw.mask, divisor))


def _raw(part: Tensor) -> Magnitudes | None:
    """Returns the representation for the compiled kernel; ``None`` where torch is faster or nothing is compiled."""
    # Kernels run on one thread; torch uses all of them.
    small = part.numel() < _SMALL or torch.get_num_threads() > 1
    return None if small or not compiled(part) else _RAW.get(part.dtype)


def _peak(part: Tensor) -> float:
    if part.device.type != "cpu":
        return float(torch.stack(part.aminmax()).abs().max())  # synchronizes with the device once
    raw = _raw(part)
    if raw is None:
        low, high = part.aminmax()
        return max(-float(low), float(high))
    # Runs at memory speed; on one thread, torch's comparisons are slower than its additions.
    from spardl.vector.kernels import selection  # noqa: PLC0415 - takes seconds to import

    return raw.number_of(selection.largest_magnitude(part.view(raw.bits).numpy(), raw.mask))


def _exponent(peak: float, length: int) -> int:
    """Exponent of a power of two: the sum of ``length`` squares of at most ``peak``, divided by it, fits in 62 bits."""
    return 2 * math.frexp(peak)[1] + length.bit_length() - _BITS


def sum_of_squares(parts: Iterable[Tensor], peak: float, length: int) -> int:
    """Returns the sum of squares of one worker's parts of a vector, in a unit that all workers share.

    Args:
        parts: Parts of the vector on this worker, shape (m,) each.
        peak: Largest magnitude in the whole vector.
        length: Number of entries of the whole vector.

    Returns:
        The sum as an integer; 0 if ``peak`` is not finite. Add the sums of all workers, and pass the total to
        ``norm_of``.
    """
    if not math.isfinite(peak):
        return 0
    scale = -_exponent(peak, length)
    return sum(_chunk_sum(chunk, scale) for part in parts for chunk in part.split(_CHUNK) if part.numel())


def _chunk_sum(chunk: Tensor, scale: int) -> int:
    # Scale by half of the exponent before squaring, or squares of small numbers would underflow; and in two steps,
    # because each power of two must be finite.
    quarter = scale // 4
    scaled = chunk.to(torch.float64, copy=True)
    for exponent in (quarter, scale // 2 - quarter):
        scaled.mul_(math.ldexp(1.0, exponent))
    squares = scaled.square_().mul_(math.ldexp(1.0, scale % 2))
    return int(squares.round_().to(torch.int64).sum())


def norm_of(total: int, peak: float, length: int) -> float:
    """Returns the 2-norm, given the ``total`` of ``sum_of_squares`` over all workers; not finite if ``peak`` is not."""
    if not math.isfinite(peak):
        return peak
    exponent = _exponent(peak, length)
    return math.ldexp(math.sqrt(math.ldexp(total, exponent % 2)), exponent // 2)


def clip_factor(norm: float, limit: float) -> float:
    """Returns the factor that limits the norm of a gradient to ``limit``, as in ``torch.nn.utils.clip_grad_norm_``."""
    # 1e-6 as in torch, for equal factors.
    factor = limit / (norm + 1e-6)
    # min(1.0, nan) would be 1.0 and hide the NaN.
    return factor if math.isnan(factor) else min(1.0, factor)


# Overflow detection without an extra pass.
#
# A sum of finite numbers can overflow, and a search for that would be another pass over memory in every step. Instead,
# a bound of the residual's magnitudes grows by the largest magnitude of each gradient, which the check for non-finite
# entries computes anyway. The vector itself is searched only if the bound exceeds the largest number of its dtype.


# Largest bound, as a share of the largest number: the remainder covers rounding errors of the bound itself.
_SAFE = 0.99


def fits(magnitude: float, dtype: torch.dtype) -> bool:
    """Returns whether ``magnitude`` is in the range of ``dtype``, with a margin for rounding errors; false for NaN."""
    return magnitude <= _SAFE * torch.finfo(dtype).max


@dataclass
class Bound:
    """An upper bound of the magnitudes in a vector.

    Attributes:
        value: Largest possible magnitude; infinite if unknown.
    """

    value: float = math.inf

    def grow(self, values: Tensor, most: float) -> bool:
        """Raises the bound after entries have grown; if it is then too large for the dtype, clips overflowed entries.

        Args:
            values: Vector of shape (n,); entries that overflowed become nearly the largest number of their dtype.
            most: Largest possible increase of a magnitude.

        Returns:
            Whether an entry had overflowed.
        """
        # Adding up rounds, possibly down, so the bound is increased by the rounding error.
        self.value = (self.value + most) * (1 + torch.finfo(values.dtype).eps)
        return not fits(self.value, values.dtype) and self.look(values)

    def look(self, values: Tensor) -> bool:
        """Recomputes the bound from ``values``, shape (n,), and clips overflowed entries.

        Returns:
            Whether an entry had overflowed.
        """
        self.value = largest_magnitude([values])
        if math.isfinite(self.value):
            return False
        limits = torch.finfo(values.dtype)
        # Below the largest number, which marks a sum over workers that was clipped.
        most = limits.max * (1 - limits.eps)
        values.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
        self.value = limits.max
        return True

    def include(self, magnitude: float) -> None:
        """Raises the bound to at least ``magnitude``, which must be finite, because entries up to it were written."""
        self.value = max(self.value, magnitude)


def clip_overflow(sums: Tensor) -> Tensor:
    """Clips sums of finite numbers that overflowed to the largest number of their dtype, in place.

    Args:
        sums: Tensor of any shape; a NaN (a difference of infinities) becomes 0.

    Returns:
        The same tensor, of the same shape.
    """
    # On a GPU, one pass over the sums costs less than waiting for the result of the comparison.
    return sums if host_reads(sums) and math.isfinite(largest_magnitude([sums])) else sums.nan_to_num_(nan=0.0)
