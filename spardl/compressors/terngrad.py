"""TernGrad: each entry becomes -1, 0 or 1 times the largest magnitude of its layer.

Source: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017,
section 3.1 (ternary gradients), section 3.3 (layer-wise ternarizing, gradient clipping). The paper shares scales among
workers to limit the number of levels in a parameter server's sum. An all-gather has no server, so scales differ here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.compressors.base import CodeCompressor, Mass
from spardl.protocol.programs import Combination, Context, State, seeded_generator
from spardl.vector.bits import ScaledCodes
from spardl.vector.levels import round_stochastically

__all__ = ["METHODS", "TernGrad"]

METHODS = (Combination("terngrad", compressor="terngrad", communicator="allgather_codes", residual="none"),)


@dataclass(frozen=True)
class TernGrad(CodeCompressor):
    """Sends the scale of each layer, and two bits per entry.

    An entry is non-zero with probability magnitude / scale, so rounding is unbiased. Clipping is biased: it reduces the
    largest entries of a layer in every step, but also the noise of all others. The published default clips.

    Args:
        clip: Largest magnitude, in standard deviations of the layer about zero; ``null`` disables clipping, which makes
            the result unbiased.
        seed: Seed of the random numbers.

    Raises:
        ConfigError: If a value is out of range.
    """

    clip: float | None = 2.5
    seed: int = 0

    name = "terngrad"
    mass = Mass.CLIPPED

    @property
    def own_mass(self) -> Mass:
        """``Mass.CLIPPED``; without clipping ``Mass.UNBIASED``: rounding errors are zero on average."""
        return Mass.UNBIASED if self.clip is None else self.mass

    def __post_init__(self) -> None:
        if self.clip is not None and not (is_number(float, self.clip) and 0 < self.clip < math.inf):
            raise ConfigError(f"compressor.clip must be above 0, or null for no clipping, got {self.clip!r}")
        check_integer("compressor.seed", self.seed)

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Returns the size of a message in bytes; scales are sent in the dtype of the vector."""
        return _form(context).size(dtype)

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes the scale of each layer, then one code per entry: 0 for -1, 1 for 0, 2 for 1."""
        ratios = vector.clone()
        scales = vector.new_zeros(len(context.layout.tensors))
        for layer, (start, stop) in enumerate(context.layout.tensors):
            if stop > start:
                scales[layer] = self._scale(ratios[start:stop])
        generator = seeded_generator(self.seed, context.step, context.worker.rank)
        signs = round_stochastically(ratios, generator)
        return _form(context).write(scales, signs.add_(1).to(torch.uint8))

    def _scale(self, layer: Tensor) -> Tensor:
        """Clips a layer and divides it by its largest magnitude, in place; returns the scale."""
        # Relative to the largest magnitude, so that nothing overflows or underflows.
        largest: Tensor = torch.linalg.vector_norm(layer, ord=torch.inf)
        layer.div_(torch.where(largest > 0, largest, 1))
        if self.clip is None:
            return largest
        deviation = torch.linalg.vector_norm(layer) / math.sqrt(layer.numel())
        # At least the smallest normal number, because the layer is divided by the limit.
        limit: Tensor = torch.where(largest > 0, (self.clip * deviation).clamp_(torch.finfo(layer.dtype).tiny, 1), 1)
        layer.clamp_(-limit, limit).div_(limit)
        return largest * limit

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Decodes each entry as -1, 0 or 1 times the scale of its layer."""
        scales, codes = _form(context).read(message, dtype)
        vector = codes.to(dtype).sub_(1)
        for scale, (start, stop) in zip(scales, context.layout.tensors, strict=True):
            vector[start:stop].mul_(scale)
        return vector


def _form(context: Context) -> ScaledCodes:
    return ScaledCodes(len(context.layout.tensors), context.layout.length, 2)
