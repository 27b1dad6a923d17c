"""Casts: the gradient as 16-bit floating-point numbers, summed as such.

Source: the communication hooks ``fp16_compress_hook`` and ``bf16_compress_hook`` of torch's DistributedDataParallel.
One dense sum: 2(P-1) rounds with ``dense`` and 2n(P-1)/P words of two bytes per worker.
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
# Entries that stay in a processor's cache from one operation to the next.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Cast(DenseCompressor):
    """Sends every entry in half the bits, and adds up in them, too.

    Gradients are divided by P first, so only an average that is too large for the format overflows. In fp16 that is
    anything above 65504; it becomes an infinity, which the averaged gradient shows, as with torch's hooks. And what is
    below 6e-8 becomes zero. bf16 has the range of float32, but only 8 bits of precision to fp16's 11.

    Args:
        format: ``fp16`` or ``bf16``.

    Raises:
        ConfigError: if the format is another.
    """

    format: str = "bf16"

    name = "cast"
    mass = Mass.ROUNDED
    one_sum = True

    def __post_init__(self) -> None:
        check_choice("compressor.format", self.format, FORMATS)

    def sizes(self, context: Context) -> list[int]:
        """The whole vector."""
        return [context.layout.length]

    def rounds(self, accumulated: Accumulator, context: Context, total: Total, state: State) -> Program[Sum]:
        """One dense sum of averages."""
        values, workers = accumulated.values, context.worker.size
        shares = torch.empty_like(values, dtype=FORMATS[self.format])
        for value, share in _chunks(values, shares):
            share.copy_(value.div_(workers))
        average = yield from total(shares)
        sums = torch.empty_like(values) if accumulated.room is None else accumulated.room
        for share, entry in _chunks(average, sums):
            entry.copy_(share).mul_(workers)
        return sums

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """The format."""
        return FORMATS[self.format]

    def entries(self, part: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Sums of averages, as sums."""
        return part.to(dtype).mul_(context.worker.size)


def _chunks(one: Tensor, other: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Parts of two vectors, the same of both; a GPU gets them whole."""
    size = _CHUNK if one.device.type == "cpu" else max(len(one), 1)
    return zip(one.split(size), other.split(size), strict=True)
