"""Words of 64 bits: instructions of the processor that numba has no name for."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["lowest_bit", "number_of_bits"]


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
