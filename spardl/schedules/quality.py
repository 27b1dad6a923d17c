"""How much waits in residuals, and how long: the price of compression, seen while training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Quality", "Waiting", "on_average"]


class Waiting(NamedTuple):
    """What a worker carries over, as multiples of what it added in a step: gradients, or updates.

    Attributes:
        norm: 2-norm over 2-norm.
        age: sum of magnitudes over sum of magnitudes: by Little's law, the steps that an entry waits in the mean, if
            its sign stays; less where it changes.
    """

    norm: float
    age: float


def on_average(parts: Iterable[Waiting | None]) -> Waiting | None:
    """The mean of several, all of equal weight; ``None`` if one is not known yet."""
    found = list(parts)
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return Waiting(*(sum(figures) / len(known) for figures in zip(*known, strict=True)))


class Quality:
    """Remembers how large what was added last was, by group.

    Args:
        groups: how many there are.
    """

    def __init__(self, groups: int) -> None:
        self._added = [(0.0, 0.0)] * groups

    def note(self, number: int, added: Tensor, scale: float) -> None:
        """Is told what was added to a residual.

        Args:
            number: of the group.
            added: shape (m,); one that is not finite is left out.
            scale: that it is multiplied by.
        """
        sizes = _sizes(added, scale)
        if all(0 < size < math.inf for size in sizes):
            self._added[number] = sizes

    def waiting(self, memories: Sequence[Tensor], scale: float) -> Waiting | None:
        """How much waits; reads all of it.

        Args:
            memories: residuals, of any shapes.
            scale: that they are multiplied by.

        Returns:
            ``None`` as long as nothing was added.
        """
        norm, magnitudes = _together(self._added)
        if not norm:
            return None
        kept = _together([_sizes(memory, scale) for memory in memories])
        return Waiting(kept[0] / norm, kept[1] / magnitudes)


def _sizes(vector: Tensor, scale: float) -> tuple[float, float]:
    """2-norm, and sum of magnitudes."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    norm, magnitudes = (float(torch.linalg.vector_norm(vector, order, dtype=wide)) / scale for order in (2, 1))
    return (norm, magnitudes) if math.isfinite(norm + magnitudes) else (0.0, 0.0)


def _together(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.hypot(*(norm for norm, _ in sizes)), sum(magnitudes for _, magnitudes in sizes)
