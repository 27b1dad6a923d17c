"""Casts: sends the gradient as 16-bit floating-point numbers, and sums in 16 bits.

Source: the communication hooks ``fp16_compress_hook`` and ``bf16_compress_hook`` of torch's DistributedDataParallel.
One dense sum: with ``dense`` 2(P-1) rounds and 2n(P-1)/P two-byte words per worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from spardl.basics.checks import check_choice
from spardl.compressors.base import DenseCompressor, Mass, Total
from spardl.protocol.programs import Combination, Context, Program, State
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum

__all__ = ["FORMATS", "METHODS", "Cast"]

_CAST = Combination("cast", compressor="cast", communicator="dense", residual="none", faster="backend")
METHODS = (
    _CAST,
    replace(_CAST, name="bf16", compressor_options={"format": "bf16"}),
    replace(_CAST, name="fp16", compressor_options={"format": "fp16"}),
)

FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})
# Number of entries that stay in the processor's cache from one operation to the next.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Cast(DenseCompressor):
    """Sends and sums all entries in 16 bits.

    Gradients are divided by P before they are cast, so their sum is the average. In fp16, magnitudes of 65,520 or more
    become infinite and stay so in the averaged gradient, as with torch's hooks; magnitudes below 3e-8 become zero. bf16
    has the range of float32, but a precision of 8 bits instead of fp16's 11.

    Args:
        format: Number format, ``fp16`` or ``bf16``.

    Raises:
        ConfigError: If the format is not one of them.
    """

    format: str = "bf16"

    name = "cast"
    mass = Mass.ROUNDED
    one_sum = True

    def __post_init__(self) -> None:
        check_choice("compressor.format", self.format, FORMATS)

    def sizes(self, context: Context) -> list[int]:
        """Returns a list of one number: the length of the whole vector."""
        return [context.layout.length]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """Divides the gradients by P, sums them in 16 bits, and multiplies the result by P."""
        values, workers = accumulated.values, context.worker.size
        shares = torch.empty_like(values, dtype=FORMATS[self.format])
        # Chunk by chunk, so that the division and the cast read an entry from memory once.
        for value, share in _chunks(values, shares):
            share.copy_(value.div_(workers))
        average = yield from total(shares)
        sums = torch.empty_like(values) if accumulated.sum_buffer is None else accumulated.sum_buffer
        for share, entry in _chunks(average, sums):
            entry.copy_(share).mul_(workers)
        return sums

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the 16-bit dtype of the format."""
        return FORMATS[self.format]

    def entries(self, part: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Multiplies consecutive entries of the average by P, in the given dtype, which gives those of the sum."""
        return part.to(dtype).mul_(context.worker.size)


def _chunks(one: Tensor, other: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields corresponding chunks of two vectors; the whole vectors on a GPU."""
    size = _CHUNK if one.device.type == "cpu" else max(len(one), 1)
    return zip(one.split(size), other.split(size), strict=True)
