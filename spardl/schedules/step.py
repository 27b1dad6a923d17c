"""State machine of a training step: its phase, the missing gradients, and the synchronizations in flight.

A *local rank* is one of the workers that this process runs; a *group* is a range of layers that are synchronized
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from spardl.basics.errors import TrainingError
from spardl.clusters.base import Work
from spardl.schedules.gradient_state import Group
from spardl.vector.sparse import Sum

__all__ = ["Step", "StepPhase"]


class StepPhase(Enum):
    """Phase of a step. Local ranks pass through the first three phases one after another."""

    FORWARD = "forward"
    """Forward passes, and backward passes whose gradients only accumulate."""
    BACKWARD = "backward"
    """The last backward pass, whose gradients are complete and may be sent."""
    COLLECTED = "collected"
    """All gradients of the local rank can be averaged."""
    IDLE = "idle"
    """No step has begun, or the last one has ended."""


class Step:
    """One training step of all local ranks.

    Args:
        ranks: Number of local ranks.
        backwards: Whether the groups are stored in the order of the backward pass.

    Attributes:
        phase: Phase of the current local rank.
        local: Current local rank: the one whose passes run.
        unsent: Numbers of the groups that the current local rank has not sent yet; the next group to send is the last
            element.
        works: Synchronizations of the groups, by number of the group, if they run in the background.
        averages: Averages of the step: for each local rank, a dict by number of the group.
    """

    def __init__(self, ranks: int, *, backwards: bool) -> None:
        self._ranks, self._backwards = ranks, backwards
        self.phase = StepPhase.IDLE
        self.local = 0
        self.works: list[Work[Sum]] = []
        self.unsent: list[int] = []
        self._groups: Sequence[Group] = []
        self._group_of: list[int] = []
        self._missing: list[set[int]] = []
        self.averages: list[dict[int, Sum]] = []

    def regroup(self, groups: Sequence[Group]) -> None:
        """Replaces the groups by ``groups``, between two steps."""
        self._groups = groups
        self._group_of = [number for number, group in enumerate(groups) for _ in range(*group.tensors)]
        self.forget_averages()

    def forget_averages(self) -> None:
        """Removes all averages."""
        self.averages = [{} for _ in range(self._ranks)]

    @property
    def order(self) -> list[int]:
        """Numbers of the groups, in the order in which the backward pass completes their gradients."""
        numbers = list(range(len(self._groups)))
        return numbers if self._backwards else numbers[::-1]

    def group_of(self, number: int) -> int:
        """Returns the number of the group that contains parameter ``number``."""
        return self._group_of[number]

    # --- phases

    def begin(self, local: int) -> None:
        """Starts the passes of the local rank ``local``."""
        self.phase, self.local = StepPhase.FORWARD, local
        self.unsent = self.order[::-1]

    def begin_last_backward(self) -> None:
        """Starts the last backward pass of the current local rank.

        Raises:
            TrainingError: If the step has not begun.
        """
        if not self.unsent:
            raise TrainingError(
                "the backward pass started before begin() was called; call begin() for each local rank before its "
                "forward pass"
            )
        self.phase = StepPhase.BACKWARD
        self._missing = [set(range(*group.tensors)) for group in self._groups]

    def collect(self) -> None:
        """Ends the backward passes of the current local rank, after which its gradients can be averaged."""
        self.phase = StepPhase.COLLECTED

    def end(self) -> None:
        """Ends the step."""
        self.phase, self.unsent = StepPhase.IDLE, []

    def give_up(self) -> list[Work[Sum]]:
        """Ends a step whose backward pass failed.

        Returns:
            The synchronizations that the local rank has started, in the order in which it started them.
        """
        sent = [self.works[number] for number in self.order if number not in self.unsent]
        self.end()
        return sent

    # --- gradients

    def awaits(self, number: int) -> bool:
        """Returns whether the gradient of parameter ``number`` is still missing in the last backward pass."""
        return self.phase is StepPhase.BACKWARD and number in self._missing[self._group_of[number]]

    def arrive(self, number: int) -> None:
        """Records that the gradient of parameter ``number`` is complete."""
        self._missing[self._group_of[number]].remove(number)

    @property
    def complete(self) -> bool:
        """Whether all gradients of the current local rank are complete."""
        return not any(self._missing)

    @property
    def next_ready(self) -> int | None:
        """Number of the next group to send; ``None`` if its gradients are incomplete, or if no group is left."""
        # Only the next group in the common order may start: ranks that start in different orders would deadlock.
        return self.unsent[-1] if self.unsent and not self._missing[self.unsent[-1]] else None
