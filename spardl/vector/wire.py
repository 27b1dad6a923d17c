"""How the values of sparse messages travel: as they are, or rounded to fewer bits.

What rounding takes from a value stays with the worker that sends it: error feedback, as for entries that are not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from spardl.basics.checks import check_choice

__all__ = ["EXACT", "TYPES", "Wire"]

TYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"exact": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


@dataclass(frozen=True)
class Wire:
    """The type of values on the wire.

    Args:
        values: ``exact`` (the gradient's own type), ``float32``, ``bfloat16`` or ``float16``; never wider than the
            gradient's own type.

    Raises:
        ConfigError: if it is none of these.
    """

    values: str = "exact"

    def __post_init__(self) -> None:
        check_choice("wire.values", self.values, TYPES)

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """The type on the wire of values that are of type ``own`` in memory."""
        wanted = TYPES[self.values]
        return own if wanted is None or wanted.itemsize >= own.itemsize else wanted

    def rounded(self, values: Tensor) -> Tensor:
        """Values as their receiver will see them, in their own type.

        To the nearest, ties to even. A finite value that would overflow becomes the largest that does not; infinities
        and NaNs stay what they are.

        Args:
            values: of any shape.

        Returns:
            A tensor of that shape; the very tensor, if the type is its own.
        """
        dtype = self.dtype(values.dtype)
        if dtype == values.dtype:
            return values
        largest = torch.finfo(dtype).max
        cut = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
        return cut.to(dtype).to(values.dtype)


EXACT: Final = Wire()
