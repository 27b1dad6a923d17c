"""What a momentum before compression remembers of one worker's gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from spardl.vector.bounds import Bound

__all__ = ["Moments", "Spread"]


@dataclass(frozen=True)
class Spread:
    """How far apart the updates of all workers are, from a sample of their entries; equal on all workers.

    Attributes:
        own: running sum of the workers' mean of the squared updates.
        common: running sum of the squares of the averaged update, with the same weights.
        workers: how many workers were compared.
    """

    own: float = 0.0
    common: float = 0.0
    workers: int = 1

    @property
    def factor(self) -> float:
        """The root mean square of the workers' updates / that of their average: 1 to the root of the workers."""
        if not self.common:
            return 1.0
        return math.sqrt(min(max(self.own / self.common, 1.0), float(self.workers)))

    def resized(self, workers: int) -> Spread:
        """What another number of ``workers`` with the same noise would have measured."""
        if workers == self.workers:
            return self
        if self.workers == 1:  # one alone knows nothing of its noise
            return Spread()
        noise = max(self.own - self.common, 0.0) * self.workers / (self.workers - 1)
        signal = max(self.own - noise, 0.0)
        return Spread(self.own, signal + min(noise, self.own) / workers, workers)

    @classmethod
    def pooled(cls, spreads: Iterable[Spread]) -> Spread:
        """The ``spreads`` of several groups of the same workers, taken together."""
        found = list(spreads)
        own, common = (math.fsum(getattr(each, name) for each in found) for name in ("own", "common"))
        return cls(own, common, max((each.workers for each in found), default=1))

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the arguments."""
        return asdict(self)


@dataclass
class Moments:
    """Running means of one worker's gradients.

    Attributes:
        velocity: of the gradients, with their scale, shape (n,); empty if nothing of the kind is kept.
        variance: of their squares, without it, shape (n,); likewise.
        updates: gradients that are in the variance.
        spread: of the workers' updates, if it is measured.
        scale: by which the next gradient is multiplied; not saved, and neither are the following attributes.
        bound: of the velocity's magnitudes.
        step: number of the synchronization that the next gradient is for.
        sample: entries of the last update, shape (m,), if the workers are to compare them.
    """

    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    variance: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: int = 0
    spread: Spread = Spread()
    scale: float = 1.0
    bound: Bound = field(default_factory=Bound)
    step: int = 0
    sample: Tensor | None = None
