"""The norm of a vector whose parts are with different workers, the same bits however it is cut.

A sum of floating-point numbers depends on their order, and so would the factor of a clipped gradient on the cut. Here
squares are rounded to multiples of one power of two and added up as whole numbers, of which the order does not matter.
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
    "largest",
    "norm_of",
    "sum_of_squares",
]


# Entries that are squared at a time: so many stay in a cache, and no vector needs three more of its size.
_CHUNK = 1 << 15
_BITS = 62
# Entries below which torch is faster than the call of a compiled kernel.
_SMALL = 1 << 13


class Magnitudes(NamedTuple):
    """How a type's magnitudes compare as integers, and how to read one.

    Attributes:
        bits: the integers.
        mask: removes the sign.
        shift: by how much a magnitude is shifted to be read.
        wide: numpy's type of the integers that are read.
        number: the type that they are read as.
    """

    bits: torch.dtype
    mask: Any
    # numpy knows no bfloat16, which is the upper half of a float32.
    shift: int
    wide: Any
    number: Any

    @classmethod
    def of(cls, dtype: torch.dtype) -> Magnitudes:
        """Those of a type, ``dtype``."""
        return _RAW[dtype]

    def number_of(self, bits: Any) -> float:
        """What the ``bits`` of a magnitude are, as a number."""
        return float(self.wide(int(bits) << self.shift).view(self.number))


_RAW: Mapping[torch.dtype, Magnitudes] = MappingProxyType(
    {
        torch.float16: Magnitudes(torch.int16, np.int16(2**15 - 1), 0, np.int16, np.float16),
        torch.bfloat16: Magnitudes(torch.int16, np.int16(2**15 - 1), 16, np.int32, np.float32),
        torch.float32: Magnitudes(torch.int32, np.int32(2**31 - 1), 0, np.int32, np.float32),
        torch.float64: Magnitudes(torch.int64, np.int64(2**63 - 1), 0, np.int64, np.float64),
    }
)


def largest(parts: Iterable[Tensor]) -> float:
    """The largest magnitude in ``parts``, tensors of shape (m,); NaN if there is one, 0 if there is nothing."""
    found = [_peak(part.detach()) for part in parts if part.numel()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def divide(values: Tensor, count: int) -> float:
    """Divides by a whole number, and tells the largest magnitude before, in one pass over memory where that is quicker.

    Args:
        values: shape (n,), changed in place.
        count: the number.

    Returns:
        As ``largest`` has it.
    """
    raw = _raw(values)
    if raw is None or raw.shift or values.dtype == torch.float16:
        peak = largest([values])
        values.div_(count)
        return peak
    from spardl.vector.kernels import selection  # noqa: PLC0415 - takes seconds to import

    bits, divisor = values.view(raw.bits).numpy(), raw.number(count)
    return raw.number_of(selection.divide(values.numpy(), bits, raw.mask, divisor))


def _raw(part: Tensor) -> Magnitudes | None:
    """How to look at magnitudes in compiled form; ``None`` where torch is faster, or nothing is compiled."""
    small = part.numel() < _SMALL or torch.get_num_threads() > 1
    return None if small or not compiled(part) else _RAW.get(part.dtype)


def _peak(part: Tensor) -> float:
    """At the speed of memory: in one thread, torch compares numbers more slowly than it adds them up."""
    if part.device.type != "cpu":
        return float(torch.stack(part.aminmax()).abs().max())  # waits for the device once
    raw = _raw(part)
    if raw is None:
        low, high = part.aminmax()
        return max(-float(low), float(high))
    from spardl.vector.kernels import selection  # noqa: PLC0415 - takes seconds to import

    return raw.number_of(selection.largest_magnitude(part.view(raw.bits).numpy(), raw.mask))


def _exponent(peak: float, length: int) -> int:
    """Of the power of two that ``length`` squares of at most ``peak``, divided by it, stay in 62 bits with."""
    return 2 * math.frexp(peak)[1] + length.bit_length() - _BITS


def sum_of_squares(parts: Iterable[Tensor], peak: float, length: int) -> int:
    """The sum of squares of one worker's part of a vector, in units that depend on the whole vector only.

    Args:
        parts: tensors of shape (m,).
        peak: the largest magnitude in the whole vector.
        length: entries of the whole vector.

    Returns:
        A whole number, 0 if ``peak`` is not finite; those of all workers add up to what ``norm_of`` reads.
    """
    if not math.isfinite(peak):
        return 0
    scale = -_exponent(peak, length)
    return sum(_chunk_sum(chunk, scale) for part in parts for chunk in part.split(_CHUNK) if part.numel())


def _chunk_sum(chunk: Tensor, scale: int) -> int:
    # Half of the scale before squaring, or the square of a small number could be lost; and this half in two steps,
    # since each power of two must be finite.
    quarter = scale // 4
    scaled = chunk.to(torch.float64, copy=True)
    for exponent in (quarter, scale // 2 - quarter):
        scaled.mul_(math.ldexp(1.0, exponent))
    squares = scaled.square_().mul_(math.ldexp(1.0, scale % 2))
    return int(squares.round_().to(torch.int64).sum())


def norm_of(total: int, peak: float, length: int) -> float:
    """The Euclidean norm from the sum over all workers; NaN or infinite if ``peak`` is."""
    if not math.isfinite(peak):
        return peak
    exponent = _exponent(peak, length)
    return math.ldexp(math.sqrt(math.ldexp(total, exponent % 2)), exponent // 2)


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient is multiplied by so that its norm is at most ``limit``, as ``clip_grad_norm_`` has it."""
    factor = limit / (norm + 1e-6)
    return factor if math.isnan(factor) else min(1.0, factor)


# How large the entries of a vector can be: known without looking, until they may no longer fit into their type.
#
# A sum of finite numbers can overflow. To look for that would be one more pass over memory in every step; instead, a
# bound of what was carried over grows by the largest magnitude of each gradient, which the search for NaNs and
# infinities finds in passing. Only where the bound exceeds the largest number of the type is the vector itself looked
# at.


# What a bound may be, as a share of the largest number: its own rounding errors stay below the rest.
_SAFE = 0.99


def fits(magnitude: float, dtype: torch.dtype) -> bool:
    """Whether numbers of a type can be so large, with room for rounding errors; ``magnitude`` may be NaN."""
    return magnitude <= _SAFE * torch.finfo(dtype).max


@dataclass
class Bound:
    """An upper bound of the magnitudes in one vector, and how it is kept finite.

    Attributes:
        value: no entry is larger; infinite: not known.
    """

    value: float = math.inf

    def grow(self, values: Tensor, most: float) -> bool:
        """Is told that entries have grown.

        Args:
            values: the vector, shape (n,); entries that overflowed become nearly the largest number of their type.
            most: by how much at most, in magnitude.

        Returns:
            Whether some had overflowed.
        """
        self.value = (self.value + most) * (1 + torch.finfo(values.dtype).eps)
        return not fits(self.value, values.dtype) and self.look(values)

    def look(self, values: Tensor) -> bool:
        """Finds the least bound of ``values``, shape (n,); cuts and answers as ``grow`` does."""
        self.value = largest([values])
        if math.isfinite(self.value):
            return False
        limits = torch.finfo(values.dtype)
        # Less than the very largest: that is the mark of a sum over workers that was cut.
        most = limits.max * (1 - limits.eps)
        values.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
        self.value = limits.max
        return True

    def include(self, magnitude: float) -> None:
        """Is told of new entries, of a finite ``magnitude`` at most."""
        self.value = max(self.value, magnitude)


def clip_overflow(sums: Tensor) -> Tensor:
    """Makes sums of finite numbers that overflowed the largest number of their type, in place.

    Args:
        sums: of any shape; a NaN, which is a difference of two infinities, becomes 0.

    Returns:
        The same tensor, of the same shape.
    """
    return sums if math.isfinite(largest([sums])) else sums.nan_to_num_(nan=0.0)
