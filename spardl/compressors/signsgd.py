"""Scaled signs: sends one bit per entry, and the mean magnitude of each layer.

Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019. With the
local residual this is their EF-signSGD, without a residual their scaled signSGD. ``onebit`` applies error feedback to
the gradients and to their sums, as the compressed all-reduce of 1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_choice
from spardl.compressors.base import CodeCompressor, Mass
from spardl.compressors.budget import SCOPES
from spardl.protocol.programs import Combination, Context, State
from spardl.vector.bits import ScaledCodes

__all__ = ["METHODS", "SignSGD"]

METHODS = (
    Combination("signsgd", compressor="signsgd", communicator="allgather_codes", residual="local"),
    Combination("onebit", compressor="signsgd", communicator="allreduce_codes", residual="local", momentum="auto"),
)


@dataclass(frozen=True)
class SignSGD(CodeCompressor):
    """Sends the mean magnitude of each layer or of the model, and the sign of each entry (+ for zero).

    Args:
        scope: Entries that share a mean: those of each ``layer`` or of the ``model``.

    Raises:
        ConfigError: If ``scope`` is neither.
    """

    scope: str = "layer"

    name = "signsgd"
    mass = Mass.LEFT

    def __post_init__(self) -> None:
        check_choice("compressor.scope", self.scope, ("layer", "model"))

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Returns the size of a message in bytes; mean magnitudes are sent in the dtype of the vector."""
        return self._form(context).size(dtype)

    def _form(self, context: Context) -> ScaledCodes:
        return ScaledCodes(len(self._parts(context)), context.layout.length, 1)

    def _parts(self, context: Context) -> list[tuple[int, int]]:
        return SCOPES[self.scope].cut(context.layout, 1)

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes the mean magnitudes (scales), then one bit per entry: 1 if it is not negative."""
        parts = self._parts(context)
        scales = vector.new_zeros(len(parts))
        for number, (start, stop) in enumerate(parts):
            if stop > start:
                scales[number] = _mean_magnitude(vector[start:stop])
        # A view suffices, because booleans are stored as bytes of 0 and 1.
        return self._form(context).write(scales, (vector >= 0).view(torch.uint8))

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Decodes each entry as its sign times the scale of its layer."""
        scales, codes = self._form(context).read(message, dtype)
        vector = codes.to(dtype).mul_(2).sub_(1)
        for scale, (start, stop) in zip(scales, self._parts(context), strict=True):
            vector[start:stop].mul_(scale)
        return vector


def _mean_magnitude(values: Tensor) -> Tensor:
    # Relative to the largest magnitude, so that the sum cannot overflow.
    magnitude = values.abs()
    largest = magnitude.max()
    return magnitude.div_(torch.where(largest > 0, largest, 1)).mean() * largest
