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
from spardl.vector.coarse import CoarseValues
from spardl.vector.messages import Coarse, Form, Typed
from spardl.vector.norms import largest
from spardl.vector.packing import NIBBLE

__all__ = ["COARSE", "EXACT", "TYPES", "Wire"]

TYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"exact": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
COARSE: Mapping[str, CoarseValues] = MappingProxyType(
    {"int8": CoarseValues(8), "int4": CoarseValues(4), "int2": CoarseValues(2)}
)


@dataclass(frozen=True)
class Wire:
    """The type of values on the wire.

    Args:
        values: ``exact`` (the gradient's own type), ``float32``, ``bfloat16`` or ``float16``, never wider than the
            gradient's own type; or ``int8``, ``int4``, ``int2``: a sign, and a place between the smallest and the
            largest magnitude of 256 values, for communicators that send whole what they round (``allgather``,
            ``spardl``, ``gtopk``).

    Raises:
        ConfigError: if it is none of these.
    """

    values: str = "exact"

    def __post_init__(self) -> None:
        check_choice("wire.values", self.values, [*TYPES, *COARSE])

    @property
    def coarse(self) -> bool:
        """Whether values share limits with others of their message."""
        return self.values in COARSE

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """The type on the wire of values that are of type ``own`` in memory and travel alone."""
        wanted = TYPES.get(self.values)
        return own if wanted is None or wanted.itemsize >= own.itemsize else wanted

    def rounds(self, own: torch.dtype) -> bool:
        """Whether values that are of type ``own`` in memory travel as anything else."""
        return self.coarse or self.dtype(own) != own

    def form(self, own: torch.dtype, step: int = NIBBLE) -> Form:
        """The form of messages with values that are of type ``own`` in memory; ``step``: of their slots."""
        return Coarse(own, COARSE[self.values], step) if self.coarse else Typed(own, self.dtype(own), step)

    def rounded(self, values: Tensor) -> Tensor:
        """Values as their receiver will see them, in their own type.

        To the nearest, ties to even. A finite value that would overflow becomes the largest that does not; infinities
        and NaNs stay what they are, but for ``int8`` and fewer bits, where all 256 values around them become NaN.

        Args:
            values: of any shape; of ``int8`` and fewer bits all values of a message, shape (m,).

        Returns:
            A tensor of that shape; the very tensor, if the type is its own.
        """
        if self.coarse:
            return COARSE[self.values].rounded(values)
        if not self.rounds(values.dtype):
            return values
        dtype = self.dtype(values.dtype)
        most = torch.finfo(dtype).max
        # A look at the largest takes less than to ask each; but it would wait for a GPU.
        if values.device.type != "cpu" or not largest([values]) <= most:
            values = torch.where(values.isfinite(), values.clamp(-most, most), values)
        return values.to(dtype).to(values.dtype)


EXACT: Final = Wire()
