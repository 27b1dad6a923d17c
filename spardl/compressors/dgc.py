"""Selection of Deep Gradient Compression: a sampled threshold, then exact top-k among the entries above it.

Source: Lin et al., Deep Gradient Compression, ICLR 2018 (hierarchical selection of the threshold). The method's other
parts are momentum correction with factor masking (``momentum=corrected``) and density warm-up (``warmup_steps``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.compressors.base import Output
from spardl.compressors.budget import PiecewiseCompressor
from spardl.protocol.programs import Combination, Context, State, seeded_generator
from spardl.vector.selection import top_k

__all__ = ["METHODS", "SampledTopK"]

METHODS = (
    Combination(
        "dgc",
        compressor="dgc",
        communicator="allgather",
        residual="local",
        momentum="corrected",
        compressor_options={"scope": "layer"},
    ),
)


@dataclass(frozen=True)
class SampledTopK(PiecewiseCompressor):
    """Keeps at most k entries, nearly always among the largest; ``Budget`` describes the other arguments.

    The threshold is the k-th largest magnitude of a strided sample, with k scaled to the size of the sample. If more
    than k entries reach the threshold, the k largest of them are kept. While fewer than ``low`` times k entries reach
    it, it is lowered.

    Args:
        sample_ratio: Share of the entries in the sample; lower is faster and less exact.
        least_sample: Minimum number of entries in the sample; top-k is exact in a piece with at most this number.
        low: Share of k; the threshold is lowered while fewer entries reach it.
        factor: Factor that the threshold is multiplied by to lower it.
        lowerings: Maximum number of times that the threshold is lowered.

    Raises:
        ConfigError: If a value is out of range.
    """

    sample_ratio: float = 0.01
    least_sample: int = 4096
    low: float = 0.8
    factor: float = 0.8
    lowerings: int = 10

    name = "dgc"
    output = Output.AT_MOST_K

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(float, self.sample_ratio) or not 0 < self.sample_ratio <= 1:
            raise ConfigError(f"compressor.sample_ratio must be above 0 and at most 1, got {self.sample_ratio!r}")
        check_integer("compressor.least_sample", self.least_sample, least=1)
        check_integer("compressor.lowerings", self.lowerings, least=0)
        if not is_number(float, self.low) or not 0 <= self.low <= 1:
            raise ConfigError(f"compressor.low must be at least 0 and at most 1, got {self.low!r}")
        if not is_number(float, self.factor) or not 0 < self.factor < 1:
            raise ConfigError(f"compressor.factor must be above 0 and below 1, got {self.factor!r}")

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Selects the top k of the candidates above a sampled threshold; exact top-k if the sample has all entries."""
        stride = self._stride(values.numel())
        if stride == 1 or k == values.numel():
            return top_k(values, k)
        magnitude = values.abs()
        candidates = self._candidates(magnitude, magnitude[self._start(stride, part, context) :: stride], k)
        return candidates[top_k(magnitude[candidates], k)]

    def _stride(self, length: int) -> int:
        """Stride of the sampled entries."""
        return max(1, length // max(self.least_sample, math.ceil(self.sample_ratio * length)))

    def _start(self, stride: int, part: int, context: Context) -> int:
        """Returns the first sampled entry; it changes in each step, so that periodic layers do not bias the sample."""
        return int(torch.randint(stride, (), generator=seeded_generator(context.step, part)))

    def _candidates(self, magnitude: Tensor, sample: Tensor, k: int) -> Tensor:
        """Positions above the sample's threshold, or above a lower one."""
        kept = max(1, round(k * sample.numel() / magnitude.numel()))
        threshold = sample.kthvalue(sample.numel() - kept + 1).values
        candidates = (magnitude >= threshold).nonzero().squeeze(1)
        for _ in range(self.lowerings):
            if candidates.numel() >= self.low * k:
                break
            threshold = threshold * self.factor
            candidates = (magnitude >= threshold).nonzero().squeeze(1)
        return candidates
