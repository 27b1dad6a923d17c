"""QSGD: rounds entries at random to a few levels, relative to the norm of their bucket.

Source: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017, section
3 (the quantizer), section 4 (buckets, and the largest magnitude instead of the norm). Codes have a fixed number of bits
here; the paper's Elias coding is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from spardl.basics.checks import check_choice, check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.compressors.base import CodeCompressor, Mass
from spardl.protocol.programs import Combination, Context, State, seeded_generator
from spardl.vector.bits import ScaledCodes
from spardl.vector.levels import round_stochastically

__all__ = ["METHODS", "NORMS", "QSGD"]

METHODS = (Combination("qsgd", compressor="qsgd", communicator="allgather_codes", residual="none"),)

NORMS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "l2": lambda rows: torch.linalg.vector_norm(rows, dim=1),
        "max": lambda rows: torch.linalg.vector_norm(rows, ord=torch.inf, dim=1),
    }
)
"""Norm of each row of a tensor of shape (rows, entries)."""


@dataclass(frozen=True)
class QSGD(CodeCompressor):
    """Sends the norm of each bucket, and the sign and level of each entry relative to the norm.

    With s = 2^(bits-1) - 1 levels, entry v of a bucket with norm N becomes N/s times a random integer with mean v s/N.
    A 2-norm that exceeds the largest number of the dtype is sent as this number, which no entry exceeds. All finite
    vectors therefore have finite decoded values, which are still unbiased. Values below the smallest normal number of
    the dtype are as coarse as the dtype itself.

    Args:
        bits: Bits per code: 2, 4 or 8; lower is more aggressive.
        bucket_entries: Number of entries per norm; higher is more aggressive.
        norm: Norm of a bucket: ``l2``, or ``max`` (largest magnitude), with less noise and fewer zeros.
        seed: Seed of the random numbers.

    Raises:
        ConfigError: If a value is out of range.
    """

    bits: int = 4
    bucket_entries: int = 512
    norm: str = "l2"
    seed: int = 0

    name = "qsgd"
    mass = Mass.UNBIASED

    def __post_init__(self) -> None:
        if not is_number(int, self.bits) or self.bits not in (2, 4, 8):
            raise ConfigError(f"compressor.bits must be one of 2, 4, 8, got {self.bits!r}")
        check_choice("compressor.norm", self.norm, NORMS)
        check_integer("compressor.bucket_entries", self.bucket_entries, least=1)
        check_integer("compressor.seed", self.seed)

    @property
    def levels(self) -> int:
        """Highest level, s, of an entry; the lowest level is -s."""
        return int(2 ** (self.bits - 1)) - 1

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        """Returns the size of a message in bytes; norms are sent in the dtype of the vector."""
        return self._form(context).size(dtype)

    def _form(self, context: Context) -> ScaledCodes:
        length = context.layout.length
        return ScaledCodes(-(-length // self.bucket_entries), length, self.bits)

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        """Encodes the norms, then one code per entry, from 0 (level -s) to 2s (level s)."""
        form = self._form(context)
        padded = F.pad(vector, (0, form.scales * self.bucket_entries - form.codes))
        norms = self._scale(padded.view(form.scales, self.bucket_entries))
        generator = seeded_generator(self.seed, context.step, context.worker.rank)
        levels = round_stochastically(padded[: form.codes], generator)
        return form.write(norms, levels.add_(self.levels).to(torch.uint8))

    def _scale(self, rows: Tensor) -> Tensor:
        """Divides rows by their norms and multiplies them by s, in place; returns the norms."""
        # Relative to the largest magnitude, so that nothing overflows or underflows.
        largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
        some = largest > 0
        rows.div_(torch.where(some, largest, 1).unsqueeze(1))
        norms: Tensor = (largest * NORMS[self.norm](rows)).clamp_(max=torch.finfo(rows.dtype).max)
        rows.mul_(torch.where(some, largest / norms, 0).mul_(self.levels).unsqueeze(1))
        return norms

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """Decodes each entry as its signed level / s, times the norm of its bucket."""
        form = self._form(context)
        norms, codes = form.read(message, dtype)
        padded = torch.zeros(form.scales * self.bucket_entries, dtype=dtype, device=message.device)
        padded[: form.codes] = codes
        padded.sub_(self.levels).div_(self.levels).view(form.scales, self.bucket_entries).mul_(norms.unsqueeze(1))
        return padded[: form.codes]
