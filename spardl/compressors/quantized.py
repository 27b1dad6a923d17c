"""Block quantization: 8, 4 or 2 bits per entry, with one scale per block.

Source: the quantizers of ZeRO++ (Wang et al., ICLR 2024: one scale per block), LoCo (Xie et al., arXiv 2407.04480:
error feedback) and SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526: 4 bits after a Hadamard rotation); with E4M3,
that of FP8-LM (Peng et al., arXiv 2310.18313). With ``allreduce_codes``: 2(P-1)/P (n bits/32 + n/block) words per
worker.
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

from spardl.basics.checks import check_bool, check_choice, check_integer
from spardl.basics.errors import ConfigError
from spardl.compressors.base import CodeCompressor, Mass
from spardl.protocol.programs import Combination, Context, State, seeded_generator
from spardl.vector.bits import ScaledCodes, aligned
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
    """Number format of quantized entries."""

    @property
    def bits(self) -> int:
        """Bits per code."""

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """Returns scales and codes of values, shape (n,); rounds to nearest, or at random with a generator.

        With ``into``, writes them there, and replaces the values by their quantization errors.
        """

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """Decodes codes; writes the result to ``values``, or adds it to them with ``add``."""


class _Integers(NamedTuple):
    """Evenly spaced levels, symmetric about zero."""

    bits: int

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """Quantizes values to evenly spaced levels."""
        rounded = partial(round_stochastically, generator=generator) if generator else None
        return pack_levels(values, block, self.bits, rounded, leave=into is not None, into=into)

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """Decodes levels; writes the result to ``values``, or adds it to them with ``add``."""
        read_levels(scales, packed, block, self.bits, values, add=add)


class _Float8(NamedTuple):
    """E4M3: 8-bit floating point, finer near zero, without stochastic rounding."""

    bits: int = 8

    def write(
        self, values: Tensor, block: int, generator: torch.Generator | None, into: Written | None = None
    ) -> Written:
        """Quantizes values to E4M3."""
        return pack_float8(values, block, leave=into is not None, into=into)

    def read(self, scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool) -> None:
        """Decodes E4M3; writes the result to ``values``, or adds it to them with ``add``."""
        read_float8(scales, packed, block, values, add=add)


FORMATS: Mapping[str, _Format] = MappingProxyType(
    {"int8": _Integers(8), "int4": _Integers(4), "int2": _Integers(2), "fp8": _Float8()}
)
# Vectors are padded to whole blocks, so larger blocks would only waste memory; such a block takes 64 MiB in float32.
_LARGEST_BLOCK = 1 << 24
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantized(CodeCompressor):
    """Sends the largest magnitude of each block, and for each entry its ratio to this magnitude in a few bits.

    Args:
        format: Number format: ``int8``, ``int4``, ``int2`` (-1, 0 and 1) or ``fp8``; fewer bits are more aggressive.
        block: Number of entries per scale; higher is more aggressive.
        rounding: Rounding mode: ``nearest``, or ``stochastic``, which is unbiased but noisier.
        rotate: Whether to multiply each block by a Hadamard matrix first, which spreads outliers; requires a block size
            that is a power of two.
        exempt: One-dimensional tensors (norms, biases) of at most this number of entries are sent uncompressed; 0 for
            none.
        seed: Seed of the random numbers.

    Raises:
        ConfigError: If a value is out of range, or two values conflict.
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
        check_integer("compressor.block", self.block, least=1, most=_LARGEST_BLOCK)
        check_choice("compressor.rounding", self.rounding, ROUNDINGS)
        check_bool("compressor.rotate", self.rotate)
        check_integer("compressor.exempt", self.exempt, least=0)
        check_integer("compressor.seed", self.seed)
        if self.rotate and self.block & (self.block - 1):
            raise ConfigError(f"compressor.block must be a power of two with rotate, got {self.block}; use 256")
        if self.format == "fp8" and self.rounding != "nearest":
            raise ConfigError("compressor.format=fp8 requires compressor.rounding=nearest; set it, or use format=int8")

    @property
    def lessens(self) -> bool:
        """Whether all errors are at most the largest magnitude in the vector: true unless blocks are rotated."""
        return not self.rotate

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Returns the size of a message in bytes; scales and exempt tensors are sent in the dtype of the vector."""
        coded, exempt = _parts(context.layout, self.exempt)
        return self._form(coded.entries).size(dtype) + exempt.entries * dtype.itemsize

    def _form(self, count: int) -> ScaledCodes:
        scales = -(-count // self.block)
        # A rotated block is non-zero everywhere, including its padding.
        return ScaledCodes(scales, scales * self.block if self.rotate else count, FORMATS[self.format].bits)

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes the scales of all blocks, then the codes of the entries, then the exempt tensors."""
        coded, exempt = _parts(context.layout, self.exempt)
        values = coded.of(vector)
        wide, magnitudes = values.to(_compute_dtype(values.dtype)), None
        if self.rotate:
            rows = in_blocks(wide, self.block)
            magnitudes = divide_rows(rows)
            wide = hadamard(rows).view(-1)
        scales, codes = FORMATS[self.format].write(wide, self.block, self._generator(context))
        if magnitudes is not None:
            scales.mul_(magnitudes).clamp_(max=torch.finfo(vector.dtype).max)
        return _joined(scales.to(vector.dtype), codes, exempt.of(vector))

    def take(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes the vector as a message, and leaves the compression errors in it; in one pass if possible."""
        if self.rotate or _compute_dtype(vector.dtype) != vector.dtype:
            return super().take(vector, context, state)
        coded, exempt = _parts(context.layout, self.exempt)
        values = coded.of(vector)
        message, form = vector.new_empty(self.size(context, vector.dtype), dtype=torch.uint8), self._form(coded.entries)
        places = form.places(message, vector.dtype)
        FORMATS[self.format].write(values, self.block, self._generator(context), places)
        message[form.size(vector.dtype) :] = exempt.of(vector).view(torch.uint8)
        # A copy only if the coded tensors are not one range; otherwise their errors are in place already.
        coded.put(values, vector)
        exempt.clear(vector)
        return message

    def _generator(self, context: Context) -> torch.Generator | None:
        if self.rounding == "nearest":
            return None
        return seeded_generator(self.seed, context.step, context.worker.rank)

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Decodes the codes, and copies the exempt tensors."""
        vector = message.new_empty(context.layout.length, dtype=dtype)
        self.decode_into(vector, message, context)
        return vector

    def decode_into(self, vector: Tensor, message: Tensor, context: Context, *, add: bool = False) -> None:
        """Decodes a message into ``vector``; adds to it with ``add``, otherwise overwrites it."""
        coded, exempt = _parts(context.layout, self.exempt)
        border = self._form(coded.entries).size(vector.dtype)
        scales, codes = self._form(coded.entries).cut(message[:border], vector.dtype)
        if len(coded.borders) == 1 and not self.rotate and _compute_dtype(vector.dtype) == vector.dtype:
            FORMATS[self.format].read(scales, codes, self.block, coded.of(vector), add=add)
        else:
            numbers = aligned(scales, vector.dtype)
            coded.put(self._values(numbers, codes, coded.entries), vector, add=add)
        if add:
            exempt.put(aligned(message[border:], vector.dtype), vector, add=True)
        else:
            exempt.put_bytes(message[border:], vector)

    def _values(self, scales: Tensor, codes: Tensor, count: int) -> Tensor:
        wide, form = scales.to(_compute_dtype(scales.dtype)), FORMATS[self.format]
        if not self.rotate:
            values = wide.new_empty(count)
            form.read(wide, codes, self.block, values, add=False)
            return values.to(scales.dtype)
        # Rotate back before scaling, because sums of large numbers could overflow.
        shares = wide.new_empty(wide.numel() * self.block)
        form.read(torch.ones_like(wide), codes, self.block, shares, add=False)
        rotated = hadamard(shares.view(-1, self.block)).mul_(wide.unsqueeze(1)).view(-1)[:count]
        # With a scale near the largest number of the dtype, a decoded value can exceed that number.
        limit = torch.finfo(scales.dtype).max
        return rotated.clamp_(-limit, limit).to(scales.dtype)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype to compute in."""
    return torch.promote_types(dtype, torch.float32)


def _joined(scales: Tensor, codes: Tensor, exempt: Tensor) -> Tensor:
    return torch.cat((scales.view(torch.uint8), codes, exempt.view(torch.uint8)))


def hadamard(rows: Tensor) -> Tensor:
    """Multiplies rows by the orthonormal Hadamard matrix in Sylvester's order, which is its own inverse.

    Args:
        rows: Tensor of shape (rows, size); the size must be a power of two.

    Returns:
        The product in new memory, shape (rows, size).
    """
    size = rows.shape[1]
    rotated, width = rows.clone(), 1
    while width < size:
        pairs = rotated.view(-1, 2, width)
        first, second = pairs.unbind(1)
        rotated = torch.stack((first + second, first - second), dim=1)
        width *= 2
    return rotated.view(rows.shape).div_(math.sqrt(size))


class _Ranges(NamedTuple):
    """Disjoint ranges of a vector."""

    borders: tuple[tuple[int, int], ...]
    entries: int

    @classmethod
    def joined(cls, ranges: Iterable[tuple[int, int]]) -> _Ranges:
        """Merges adjacent ranges."""
        found: list[tuple[int, int]] = []
        for start, stop in ranges:
            first = found.pop()[0] if found and found[-1][1] == start else start
            found.append((first, stop))
        return cls(tuple(found), sum(stop - start for start, stop in found))

    def of(self, vector: Tensor) -> Tensor:
        """Returns the entries of a vector in these ranges; a view if there is a single range."""
        if len(self.borders) == 1:
            return vector[slice(*self.borders[0])]
        return torch.cat([vector[start:stop] for start, stop in self.borders]) if self.borders else vector[:0]

    def put(self, values: Tensor, vector: Tensor, *, add: bool = False) -> None:
        """Writes or adds values to these ranges of a vector; skips the copy if they are views of it."""
        pieces = values.split([stop - start for start, stop in self.borders]) if self.borders else ()
        for (start, stop), piece in zip(self.borders, pieces, strict=True):
            place = vector[start:stop]
            if add:
                place.add_(piece)
            elif place.data_ptr() != piece.data_ptr():
                place.copy_(piece)

    def put_bytes(self, message: Tensor, vector: Tensor) -> None:
        """Writes values, given as bytes that need not be aligned, to these ranges of a vector."""
        start = 0
        for first, last in self.borders:
            place = vector[first:last].view(torch.uint8)
            place.copy_(message[start : start + place.numel()])
            start += place.numel()

    def clear(self, vector: Tensor) -> None:
        """Sets the entries in these ranges to zero."""
        for start, stop in self.borders:
            vector[start:stop].zero_()


@lru_cache(maxsize=256)
def _parts(layout: Layout, limit: int) -> tuple[_Ranges, _Ranges]:
    """Returns the ranges of quantized and of exempt tensors (one-dimensional, with at most ``limit`` entries)."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for shape, border, entries in zip(layout.shapes, layout.tensors, layout.wholes, strict=True):
        found[len(shape) < 2 and entries <= limit].append(border)
    return _Ranges.joined(found[False]), _Ranges.joined(found[True])
