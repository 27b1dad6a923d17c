"""Instructions of the processor that numba has no name for: of words of 64 bits, and of the caches."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["adds_halves", "fetch", "is_short", "lowest_bit", "number_of_bits", "reaches", "sum_at"]


# Sums and comparisons of single entries in compiled form, for types that numba has no name for as well.
#
# A vector of bfloat16 comes as uint16, one of float16 as int16: numpy has no bfloat16, and numba adds up no float16.


def adds_halves() -> bool:
    """Whether this processor turns float16 into float32 and back; elsewhere there may be nothing to call instead."""
    features = binding.get_host_cpu_features()
    return bool(features.get("f16c") or features.get("fullfp16"))


def is_short(dtype: Any) -> bool:
    """Whether numba's ``dtype`` stands for one of two bytes, of which a sum is some instructions."""
    return dtype in (types.uint16, types.int16)


def sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    """The entry of ``memory`` at a ``place``, plus that of ``gradient``, if that is not ``None``."""
    raise NotImplementedError("compiled only")


def reaches(value: Any, bound: Any) -> Any:
    """Whether the magnitude of a ``value`` is at least a ``bound``, of the same type."""
    raise NotImplementedError("compiled only")


@overload(sum_at, inline="always")
def _sum_at_for(memory: Any, gradient: Any, place: Any) -> Any:
    if isinstance(gradient, types.NoneType):
        return _alone_at
    if isinstance(memory.dtype, types.Float):
        return _float_sum_at
    return _half_sum_at if memory.dtype == types.int16 else _brain_sum_at


def _alone_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place]


def _float_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place] + gradient[place]


def _half_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    return _half_sum(memory[place], gradient[place])


@intrinsic
def _half_sum(typing: Any, value: Any, other: Any) -> Any:
    """The bits of the sum of two float16 numbers, given as int16: a float32, rounded to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half, single = ir.HalfType(), ir.FloatType()
        one, two = (builder.fpext(builder.bitcast(bits, half), single) for bits in arguments)
        return builder.bitcast(builder.fptrunc(builder.fadd(one, two), half), ir.IntType(16))

    return types.int16(types.int16, types.int16), generate


def _brain_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    # Numba widens what it shifts.
    one = np.uint32(np.uint32(memory[place]) << np.uint32(16)).view(np.float32)
    other = np.uint32(np.uint32(gradient[place]) << np.uint32(16)).view(np.float32)
    bits = np.float32(one + other).view(np.uint32)
    # To the nearest, ties to even. Finite numbers add up to no NaN, which this would not keep.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@overload(reaches, inline="always")
def _reaches_for(value: Any, bound: Any) -> Any:
    if isinstance(value, types.Float):
        return _float_reaches
    return _half_reaches if value == types.int16 else _brain_reaches


def _float_reaches(value: Any, bound: Any) -> Any:
    return abs(value) >= bound


def _half_reaches(value: Any, bound: Any) -> Any:
    return (value & np.int16(0x7FFF)) >= bound


def _brain_reaches(value: Any, bound: Any) -> Any:
    return (value & np.uint16(0x7FFF)) >= bound


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """The position of the lowest bit of a uint64 that is set; 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # False: a word without bits gives 64, where it would be undefined otherwise. Decoding four bits at a time asks
        # that of words that have run empty.
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.uint64(types.uint64), generate


@intrinsic
def number_of_bits(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def fetch(typing: Any, array: Any, place: Any) -> Any:
    """Asks for what is at a place of an array, and is about to be read or written; does nothing, wherever that is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(start, [arguments[1]]), cgutils.voidptr_t)
        whole = ir.IntType(32)
        # For a write, to be kept in all caches, of data.
        how = [ir.Constant(whole, number) for number in (1, 3, 1)]
        kind = ir.FunctionType(ir.VoidType(), [address.type, whole, whole, whole])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind), [address, *how])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
