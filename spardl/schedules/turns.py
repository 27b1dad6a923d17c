"""When fragments of a model are sent, and when workers go on from what that led to; see :class:`OuterSteps`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Due", "Turns", "go_on"]


class Due(NamedTuple):
    """What happens after a step, in this order.

    Attributes:
        landing: numbers of fragments that were sent long enough ago.
        leaving: numbers of fragments that are to be sent.
    """

    landing: list[int]
    leaving: list[int]


class Turns:
    """Counts local steps.

    Args:
        every: steps between two exchanges of a fragment.
        fragments: how many take turns, at equal distances.

    Attributes:
        left: steps until each is sent.
        aloft: steps until workers go on from what each led to, of those that are under way.
    """

    def __init__(self, every: int, fragments: int) -> None:
        self.every = every
        self.left = [math.ceil((number + 1) * every / fragments) for number in range(fragments)]
        self.aloft: dict[int, int] = {}

    def step(self) -> Due:
        """All have made a step."""
        self.left = [left - 1 for left in self.left]
        self.aloft = {number: left - 1 for number, left in self.aloft.items()}
        landing = [number for number, left in self.aloft.items() if not left]
        return Due(landing, [number for number, left in enumerate(self.left) if not left])

    def leave(self, number: int, delay: int) -> None:
        """A fragment is sent, beside so many steps."""
        self.aloft[number], self.left[number] = delay, self.every

    def land(self, number: int) -> None:
        """Workers go on from what a fragment led to."""
        del self.aloft[number]

    @property
    def begun(self) -> list[int]:
        """Fragments that have made steps since they were sent."""
        return [number for number, left in enumerate(self.left) if left < self.every]


@torch.no_grad()
def go_on(own: Tensor, anchor: Tensor, mixing: float) -> None:
    """A worker goes on from what an exchange led to.

    Args:
        own: weights of the worker, of any shape.
        anchor: those that all agree on, of the same shape.
        mixing: share of these; 1 keeps nothing of one's own, as one that has diverged is not mixed with anything.
    """
    own.lerp_(anchor, mixing) if mixing < 1 else own.copy_(anchor)
