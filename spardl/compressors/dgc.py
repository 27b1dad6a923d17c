"""The selection of Deep Gradient Compression: a threshold from a sample, then exact top-k among what exceeds it.

Source: Lin et al., Deep Gradient Compression, ICLR 2018 (hierarchical selection of the threshold). The method's other
parts are momentum correction with factor masking (``momentum=corrected``) and the warm-up of the density
(``warmup_steps``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.checks import check_whole, is_a
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
    """Keeps at most k entries, nearly always among the largest; see ``Budget`` for the other arguments.

    The threshold is that of top-k in a sample of every so-many-th entry. Too many entries above it are cut down to
    the k largest; while there are far too few of them, it is lowered.

    Args:
        sample_ratio: entries in the sample / entries; lower is faster and less exact.
        least_sample: entries in the sample at least; where there are no more than that, top-k is exact.
        low: share of k below which the threshold is lowered.
        factor: factor that the threshold is multiplied by to lower it.
        lowerings: how often at most.

    Raises:
        ConfigError: if a value is out of range.
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
        if not is_a(float, self.sample_ratio) or not 0 < self.sample_ratio <= 1:
            raise ConfigError(f"compressor.sample_ratio must be above 0 and at most 1, got {self.sample_ratio!r}")
        check_whole("compressor.least_sample", self.least_sample, least=1)
        check_whole("compressor.lowerings", self.lowerings, least=0)
        if not is_a(float, self.low) or not 0 <= self.low <= 1:
            raise ConfigError(f"compressor.low must be at least 0 and at most 1, got {self.low!r}")
        if not is_a(float, self.factor) or not 0 < self.factor < 1:
            raise ConfigError(f"compressor.factor must be above 0 and below 1, got {self.factor!r}")

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Sampled threshold, candidates, and top-k of these; exact top-k where all would be in the sample."""
        stride = self._stride(values.numel())
        if stride == 1 or k == values.numel():
            return top_k(values, k)
        magnitude = values.abs()
        candidates = self._candidates(magnitude, magnitude[self._start(stride, part, context) :: stride], k)
        return candidates[top_k(magnitude[candidates], k)]

    def _stride(self, length: int) -> int:
        """Distance of the sampled entries."""
        return max(1, length // max(self.least_sample, math.ceil(self.sample_ratio * length)))

    def _start(self, stride: int, part: int, context: Context) -> int:
        """The first sampled entry, at another place in each step, so that no regularity of the layer is met twice."""
        return int(torch.randint(stride, (), generator=seeded_generator(context.step, part)))

    def _candidates(self, magnitude: Tensor, sample: Tensor, k: int) -> Tensor:
        """The positions above the sample's own threshold, or above a lower one."""
        kept = max(1, round(k * sample.numel() / magnitude.numel()))
        threshold = sample.kthvalue(sample.numel() - kept + 1).values
        candidates = (magnitude >= threshold).nonzero().squeeze(1)
        for _ in range(self.lowerings):
            if candidates.numel() >= self.low * k:
                break
            threshold = threshold * self.factor
            candidates = (magnitude >= threshold).nonzero().squeeze(1)
        return candidates
