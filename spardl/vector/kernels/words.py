"""Instructions of the processor that numba has no name for: of words of 64 bits, and of the caches."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["fetch", "lowest_bit", "number_of_bits"]


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
