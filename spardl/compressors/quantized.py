"""Block quantization: every entry in 8, 4 or 2 bits, with a scale for each block of entries.

Source: the quantizers of ZeRO++ (Wang et al., ICLR 2024: a scale per block), LoCo (Xie et al., arXiv 2407.04480: error
feedback) and SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526: 4 bits, rotated by Hadamard's matrix); with E4M3,
that of FP8-LM (Peng et al., arXiv 2310.18313). By ``allreduce_codes``: 2(P-1)/P (n bits/32 + n/block) words per worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spardl.basics.checks import check_choice, check_flag, check_whole
from spardl.basics.errors import ConfigError
from spardl.compressors.base import CodeCompressor, Mass
from spardl.protocol.programs import Combination, Context, State, seeded_generator
from spardl.vector.bits import ScaledCodes
from spardl.vector.layout import Layout
from spardl.vector.levels import (
    Written,
    divide_rows,
    in_blocks,
    pack_float8,
    pack_levels,
    read_float8,
    read_levels,
    round_stochastically,
)

__all__ = ["FORMATS", "METHODS", "ROUNDINGS", "Quantized", "hadamard"]

_QUANTIZED = Combination("quantized", compressor="quantized", communicator="allreduce_codes", residual="local")
METHODS = (
    _QUANTIZED,
    *(replace(_QUANTIZED, name=each, compressor_options={"format": each}) for each in ("int8", "int4", "int2", "fp8")),
)


class _Format(Protocol):
    """How blocks of entries are written in a few bits each."""

    @property
    def bits(self) -> int:
        """Of a code."""

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """Scales and packed codes of values, shape (n,): the nearest ones, or drawn by a generator.

        Values keep what their codes lack, if it is said where to write these.
        """

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """Writes, or adds, what these stand for, of the type of the scales."""


class _Integers(NamedTuple):
    """Levels at equal distances, as many below zero as above it, and zero itself."""

    bits: int

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """See :meth:`_Format.write`."""
        rounded = partial(round_stochastically, generator=generator) if generator else None
        return pack_levels(values, block, self.bits, rounded, leave=into is not None, into=into)

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """See :meth:`_Format.read`."""
        read_levels(scales, packed, block, self.bits, values, add=add)


class _Float8(NamedTuple):
    """Floating-point numbers of 8 bits, E4M3: finer near zero, and never drawn."""

    bits: int = 8

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """See :meth:`_Format.write`."""
        return pack_float8(values, block, leave=into is not None, into=into)

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """See :meth:`_Format.read`."""
        read_float8(scales, packed, block, values, add=add)


FORMATS: Mapping[str, _Format] = MappingProxyType(
    {"int8": _Integers(8), "int4": _Integers(4), "int2": _Integers(2), "fp8": _Float8()}
)
# Vectors are padded to whole blocks, so a larger one would only take memory: 64 MiB in float32 at most.
_LARGEST_BLOCK = 1 << 24
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantized(CodeCompressor):
    """Sends the largest magnitude of each block, and each entry's share of it in a few bits.

    Args:
        format: ``int8``, ``int4``, ``int2`` (-1, 0 and 1), or ``fp8``; fewer bits are more aggressive.
        block: entries with a scale of their own; higher is more aggressive.
        rounding: ``nearest``, or ``stochastic``: right on average, with more noise.
        rotate: whether each block is turned by Hadamard's matrix first, which spreads single large entries; needs a
            block that is a power of two.
        exempt: tensors of one dimension with at most so many entries (norms, biases) are sent as they are; 0: none.
        seed: of the random numbers.

    Raises:
        ConfigError: if a value is out of range, or two do not fit.
    """

    format: str = "int8"
    block: int = 256
    rounding: str = "nearest"
    rotate: bool = False
    exempt: int = 16384
    seed: int = 0

    name = "quantized"
    mass = Mass.LEFT

    def __post_init__(self) -> None:
        check_choice("compressor.format", self.format, FORMATS)
        check_whole("compressor.block", self.block, least=1, most=_LARGEST_BLOCK)
        check_choice("compressor.rounding", self.rounding, ROUNDINGS)
        check_flag("compressor.rotate", self.rotate)
        check_whole("compressor.exempt", self.exempt, least=0)
        check_whole("compressor.seed", self.seed)
        if self.rotate and self.block & (self.block - 1):
            raise ConfigError(f"compressor.rotate needs a block that is a power of two, got {self.block}; use 256")
        if self.format == "fp8" and self.rounding != "nearest":
            raise ConfigError("compressor.format=fp8 rounds to the nearest; use compressor.rounding=nearest, or int8")

    @property
    def lessens(self) -> bool:
        """Less than a level is lacking, and none is above the largest magnitude of its block."""
        return not self.rotate

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a message: scales and what is exempt have the type of the vector."""
        coded, exempt = _parts(context.layout, self.exempt)
        return self._form(coded.entries).size(dtype) + exempt.entries * dtype.itemsize

    def _form(self, count: int) -> ScaledCodes:
        scales = -(-count // self.block)
        # A block that was turned is nowhere zero, also where it was filled up.
        return ScaledCodes(scales, scales * self.block if self.rotate else count, FORMATS[self.format].bits)

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Scales, codes, then what is exempt."""
        coded, exempt = _parts(context.layout, self.exempt)
        values = coded.of(vector)
        wide, turned = values.to(_wide(values.dtype)), None
        if self.rotate:
            rows = in_blocks(wide, self.block)
            turned = divide_rows(rows)
            wide = hadamard(rows).view(-1)
        scales, codes = FORMATS[self.format].write(wide, self.block, self._generator(context))
        if turned is not None:
            scales.mul_(turned).clamp_(max=torch.finfo(vector.dtype).max)
        return _joined(scales.to(vector.dtype), codes, exempt.of(vector))

    def take(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """In one go, where scales stay as they were found."""
        if self.rotate or _wide(vector.dtype) != vector.dtype:
            return super().take(vector, context, state)
        coded, exempt = _parts(context.layout, self.exempt)
        values = coded.of(vector)
        message, form = vector.new_empty(self.size(context, vector.dtype), dtype=torch.uint8), self._form(coded.entries)
        places = form.places(message, vector.dtype)
        FORMATS[self.format].write(values, self.block, self._generator(context), places)
        message[form.size(vector.dtype) :] = exempt.of(vector).view(torch.uint8)
        coded.put(values, vector)
        exempt.clear(vector)
        return message

    def _generator(self, context: Context) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        return seeded_generator(self.seed, context.step, context.worker.rank)

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Shares times scales, and what is exempt."""
        vector = message.new_empty(context.layout.length, dtype=dtype)
        self.decode_into(vector, message, context)
        return vector

    def decode_into(self, vector: Tensor, message: Tensor, context: Context, *, add: bool = False) -> None:
        """See :meth:`decode`."""
        coded, exempt = _parts(context.layout, self.exempt)
        border = self._form(coded.entries).size(vector.dtype)
        scales, codes = self._form(coded.entries).cut(message[:border], vector.dtype)
        if len(coded.borders) == 1 and not self.rotate and _wide(vector.dtype) == vector.dtype:
            FORMATS[self.format].read(scales, codes, self.block, coded.of(vector), add=add)
        else:
            coded.put(self._values(scales, codes, coded.entries), vector, add=add)
        exempt.put(message[border:].clone().view(vector.dtype), vector, add=add)

    def _values(self, scales: Tensor, codes: Tensor, count: int) -> Tensor:
        wide, form = scales.to(_wide(scales.dtype)), FORMATS[self.format]
        if not self.rotate:
            values = wide.new_empty(count)
            form.read(wide, codes, self.block, values, add=False)
            return values.to(scales.dtype)
        # Turned back before they are multiplied, since sums of large numbers could overflow.
        shares = wide.new_empty(wide.numel() * self.block)
        form.read(torch.ones_like(wide), codes, self.block, shares, add=False)
        turned = hadamard(shares.view(-1, self.block)).mul_(wide.unsqueeze(1)).view(-1)[:count]
        # A scale as large as the type allows can stand for more than that.
        limit = torch.finfo(scales.dtype).max
        return turned.clamp_(-limit, limit).to(scales.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.promote_types(dtype, torch.float32)


def _joined(scales: Tensor, codes: Tensor, exempt: Tensor) -> Tensor:
    return torch.cat((scales.view(torch.uint8), codes, exempt.view(torch.uint8)))


def hadamard(rows: Tensor) -> Tensor:
    """Rows times Hadamard's matrix in Sylvester's order, divided by the root of its size: its own inverse.

    Args:
        rows: shape (rows, size); the size is a power of two.

    Returns:
        The same shape, (rows, size), in memory of its own.
    """
    size = rows.shape[1]
    turned, width = rows.clone(), 1
    while width < size:
        pairs = turned.view(-1, 2, width)
        first, second = pairs.unbind(1)
        turned = torch.stack((first + second, first - second), dim=1)
        width *= 2
    return turned.view(rows.shape).div_(math.sqrt(size))


class _Ranges(NamedTuple):
    """Some ranges of a vector."""

    borders: tuple[tuple[int, int], ...]
    entries: int

    @classmethod
    def joined(cls, ranges: Iterable[tuple[int, int]]) -> _Ranges:
        """The same ranges, neighbours as one."""
        found: list[tuple[int, int]] = []
        for start, stop in ranges:
            first = found.pop()[0] if found and found[-1][1] == start else start
            found.append((first, stop))
        return cls(tuple(found), sum(stop - start for start, stop in found))

    def of(self, vector: Tensor) -> Tensor:
        """What a vector has there; its own memory, if that is one range."""
        if len(self.borders) == 1:
            return vector[slice(*self.borders[0])]
        return torch.cat([vector[start:stop] for start, stop in self.borders]) if self.borders else vector[:0]

    def put(self, values: Tensor, vector: Tensor, *, add: bool = False) -> None:
        """Writes what ``of`` gave into a vector, or adds it; nothing, if that is the vector's own memory."""
        pieces = values.split([stop - start for start, stop in self.borders]) if self.borders else ()
        for (start, stop), piece in zip(self.borders, pieces, strict=True):
            place = vector[start:stop]
            if add:
                place.add_(piece)
            elif place.data_ptr() != piece.data_ptr():
                place.copy_(piece)

    def clear(self, vector: Tensor) -> None:
        """Writes zeros."""
        for start, stop in self.borders:
            vector[start:stop] = 0


@lru_cache(maxsize=256)
def _parts(layout: Layout, limit: int) -> tuple[_Ranges, _Ranges]:
    """What is coded, and what is exempt: tensors of one dimension with at most ``limit`` entries."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for shape, border, entries in zip(layout.shapes, layout.tensors, layout.wholes, strict=True):
        found[len(shape) < 2 and entries <= limit].append(border)
    return _Ranges.joined(found[False]), _Ranges.joined(found[True])
