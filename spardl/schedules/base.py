"""When gradients are sent: the interface between a training loop and a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from spardl.sparse import Sum

__all__ = ["Schedule"]


class Schedule(ABC):
    """Synchronizes the gradients of one model.

    A step is: for each local rank its backward passes and then ``collect``, then ``finish`` once.

    Attributes:
        name: how configurations call it.
    """

    name: ClassVar[str]

    @abstractmethod
    def collect(self, local: int) -> None:
        """Takes over the gradient that a local rank's backward pass left, and clears it."""

    @abstractmethod
    def finish(self) -> Sequence[Sum]:
        """Leaves the average over all workers in the parameters' gradients.

        Returns:
            What each local rank computed as the average: all must be equal to the last bit.
        """

    @abstractmethod
    def refused(self) -> int:
        """Gradients of local ranks that were left out because they were not finite."""

    @abstractmethod
    def state_dict(self, local: int) -> dict[str, Any]:
        """What a local rank carries from step to step, as plain data."""

    @abstractmethod
    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave."""
