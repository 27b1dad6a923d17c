"""The limit on a gradient's norm: of the average, or of each worker's own before anything remembers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from spardl.vector.norms import clip_factor, largest, norm_of, sum_of_squares

__all__ = ["Limit", "norm_in"]


class Limit:
    """What gradients are multiplied by, so that their norm is at most so much.

    Args:
        norm: the largest 2-norm; ``None`` for any.
        first: whether it is that of each worker's own gradient, rather than of the average.

    Attributes:
        measured: norm of this worker's last gradient before it was limited; ``None`` if none was measured.
    """

    def __init__(self, norm: float | None, *, first: bool) -> None:
        self.before = norm if first else None
        self.after = None if first else norm
        self.measured: float | None = None

    def shorten(self, vectors: Sequence[Tensor], length: int, scale: float) -> None:
        """Limits a worker's own gradient, in place.

        Args:
            vectors: that hold it, shape (m,) each; one with a NaN or an infinity stays as it is, and does not count.
            length: of all of them.
            scale: that it is multiplied by.
        """
        if self.before is None:
            return
        finite = vectors
        if not math.isfinite(norm := norm_in(vectors, length) / scale):
            finite = [vector for vector in vectors if math.isfinite(largest([vector]))]
            norm = norm_in(finite, length) / scale
        self.measured = norm
        if math.isfinite(norm) and (factor := clip_factor(norm, self.before)) != 1:
            for vector in finite:
                vector.mul_(factor)

    def factor(self, norm: Callable[[], float], scale: float) -> float | None:
        """What the average is multiplied by before it is used, if by anything.

        Args:
            norm: tells that of the average.
            scale: that it is multiplied by.
        """
        if self.after is None:
            return 1 / scale if scale != 1 else None
        return clip_factor(norm() / scale, self.after) / scale


def norm_in(vectors: Sequence[Tensor], length: int) -> float:
    """The 2-norm of what some ``vectors`` of any shapes hold together: ``length`` entries; the same for any cut."""
    peak = largest(vectors)
    return norm_of(sum_of_squares(vectors, peak, length), peak, length)
