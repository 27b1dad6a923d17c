"""Parameters whose gradients are averaged together: the same ones in every step and in every process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spardl.clusters.process_group import ProcessFlight
from spardl.method.method import Method
from spardl.method.method_state import MethodState
from spardl.vector.layout import Layout

__all__ = ["Group", "Named", "cut"]

_MEGABYTE = 1024 * 1024


class Named(NamedTuple):
    """A parameter and its name."""

    name: str
    parameter: nn.Parameter


class Group:
    """Parameters that are averaged together.

    Attributes:
        members: numbers of the parameters, in the order of the vector.
        layout: their sizes.
        vector: shape (n,): their gradients, then their averages.
        state: of the method.
        awaited: members whose gradient is not there yet.
        flight: what is under way.
        refused: whether some worker's gradient overflowed, or the sum, so that the vector is no average.
        norm: of the last gradient that was measured, without its scale.
    """

    def __init__(self, members: Sequence[int], parameters: Sequence[nn.Parameter], method: Method) -> None:
        first = parameters[members[0]]
        self.members = list(members)
        self.layout = Layout.of(parameters[number].shape for number in members)
        self.ranges = dict(zip(members, self.layout.tensors, strict=True))
        self.vector: Tensor = torch.zeros(self.layout.length, dtype=first.dtype, device=first.device)
        self.awaited = set(members)
        self.flight: ProcessFlight[None] | None = None
        self.norm = 0.0
        self.state: MethodState
        self.refused: bool
        self.forget(method)

    def forget(self, method: Method) -> None:
        """Begins as in the first step."""
        self.state = method.init_state(self.layout, self.vector.dtype, self.vector.device)
        self.refused = False

    def part(self, number: int) -> Tensor:
        """A member's part of the vector, shape (entries,)."""
        return self.vector[slice(*self.ranges[number])]


def cut(parameters: Sequence[nn.Parameter], bucket_mb: float) -> Iterator[list[int]]:
    """Groups of neighbours of one type and place, from the last parameter to the first.

    Args:
        parameters: of any shape.
        bucket_mb: most megabytes (2^20 bytes) of gradients in a group; a parameter is never cut.

    Yields:
        The numbers of a group's members.
    """
    found: list[int] = []
    size = 0
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        alike = not found or (parameter.dtype, parameter.device) == (
            parameters[found[0]].dtype,
            parameters[found[0]].device,
        )
        if found and (not alike or size + parameter.nbytes > bucket_mb * _MEGABYTE):
            yield found
            found, size = [], 0
        found.append(number)
        size += parameter.nbytes
    yield found
