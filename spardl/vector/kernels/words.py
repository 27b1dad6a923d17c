"""LLVM intrinsics and typed additions that numba lacks: bit counts, prefetches, and 16-bit floats.

numba cannot add 16-bit floats, so kernels get vectors of float16 as int16 arrays, and vectors of bfloat16 as uint16
arrays, with the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["adds_halves", "fetch", "is_short", "lowest_bit", "number_of_bits", "reaches", "sum_at"]


# Typed sums and comparisons of single entries.
#
# Vectors of bfloat16 are passed as uint16 and those of float16 as int16: numpy has no bfloat16, and numba cannot add
# float16.


def adds_halves() -> bool:
    """Returns whether this processor can convert between float16 and float32; compiled float16 sums need this."""
    features = binding.get_host_cpu_features()
    return bool(features.get("f16c") or features.get("fullfp16"))


def is_short(dtype: Any) -> bool:
    """Returns whether numba's ``dtype`` is an integer type of 16 bits, in which kernels get 16-bit floats."""
    return dtype in (types.uint16, types.int16)


def sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    """Returns ``memory[place] + gradient[place]``, or ``memory[place]`` if ``gradient`` is ``None``."""
    raise NotImplementedError("sum_at() has no Python version; call it only in functions compiled by numba")


def reaches(value: Any, bound: Any) -> Any:
    """Returns whether the magnitude of ``value`` is at least ``bound``, of the same type."""
    raise NotImplementedError("reaches() has no Python version; call it only in functions compiled by numba")


@overload(sum_at, inline="always")
def _sum_at_for(memory: Any, gradient: Any, place: Any) -> Any:
    if isinstance(gradient, types.NoneType):
        return _entry_at
    if isinstance(memory.dtype, types.Float):
        return _float_sum_at
    return _float16_sum_at if memory.dtype == types.int16 else _bfloat16_sum_at


def _entry_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place]


def _float_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place] + gradient[place]


def _float16_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    return _float16_sum(memory[place], gradient[place])


@intrinsic
def _float16_sum(typing: Any, value: Any, other: Any) -> Any:
    """Bits of the sum of two float16 numbers given as int16: added in float32, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half, single = ir.HalfType(), ir.FloatType()
        one, two = (builder.fpext(builder.bitcast(bits, half), single) for bits in arguments)
        return builder.bitcast(builder.fptrunc(builder.fadd(one, two), half), ir.IntType(16))

    return types.int16(types.int16, types.int16), generate


def _bfloat16_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    # The casts keep numba from widening shifted integers.
    one = np.uint32(np.uint32(memory[place]) << np.uint32(16)).view(np.float32)
    other = np.uint32(np.uint32(gradient[place]) << np.uint32(16)).view(np.float32)
    bits = np.float32(one + other).view(np.uint32)
    # Rounds to nearest, ties to even. Finite numbers add up to no NaN, which this rounding would destroy.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@overload(reaches, inline="always")
def _reaches_for(value: Any, bound: Any) -> Any:
    if isinstance(value, types.Float):
        return _float_reaches
    return _float16_reaches if value == types.int16 else _bfloat16_reaches


def _float_reaches(value: Any, bound: Any) -> Any:
    return abs(value) >= bound


def _float16_reaches(value: Any, bound: Any) -> Any:
    return (value & np.int16(0x7FFF)) >= bound


def _bfloat16_reaches(value: Any, bound: Any) -> Any:
    return (value & np.uint16(0x7FFF)) >= bound


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """Returns the position of the lowest set bit of a uint64; 64 if no bit is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # False: the result for 0 is 64 instead of undefined. Decoding four bits at a time passes words without bits.
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.uint64(types.uint64), generate


@intrinsic
def number_of_bits(typing: Any, word: Any) -> Any:
    """Returns the number of set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def fetch(typing: Any, array: Any, place: Any) -> Any:
    """Loads an array element into the cache before it is read or written; does nothing for invalid positions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(start, [arguments[1]]), cgutils.voidptr_t)
        whole = ir.IntType(32)
        # Arguments: prefetch for a write, keep in all cache levels, data cache.
        how = [ir.Constant(whole, number) for number in (1, 3, 1)]
        kind = ir.FunctionType(ir.VoidType(), [address.type, whole, whole, whole])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind), [address, *how])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
