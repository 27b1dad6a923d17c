"""Synchronization after the backward pass, and wait-free backpropagation (WFBP) with buckets of a fixed size.

Sources: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters,
USENIX ATC 2017; Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020 (buckets;
section 3.2 describes the naive solution, ``AfterBackward``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters.base import Cluster, Flight
from spardl.method.method import Method
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import Range, by_megabytes
from spardl.vector.sparse import Sum

__all__ = ["AfterBackward", "InBackward", "Wfbp", "check_megabytes"]


# One synchronization after the backward pass.


@dataclass(frozen=True)
class AfterBackward(Schedule):
    """Synchronizes the whole gradient as one flat vector after the backward pass."""

    name = "after_backward"

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine with one group that contains all layers."""
        return _AtTheEnd(method, cluster, training, [(0, len(training.gradient.layers))])


class _AtTheEnd(Engine):
    def collect(self) -> None:
        """Adds the flat gradient to the residual of the local rank."""
        self._clip_first()
        for number in range(len(self._groups)):
            self._hand_over(number)

    def finish(self) -> None:
        """Runs the method's program on every worker, and updates."""
        for number, group in enumerate(self._groups):
            averages = self._cluster.run(self._programs(number))
            for own, average in zip(self._averages, averages, strict=True):
                own[number] = average
            self._take_over(group, averages[0])
        self._update_all()


# Wait-free backpropagation.


class InBackward(Engine):
    """Starts the synchronization of each group as soon as its gradients are complete, in a fixed order.

    The order is that of the backward pass and equal on all ranks, although gradients may become complete in another
    order on each. If the norm of each worker's own gradient is limited, all groups wait for the last gradient, because
    the norm is not known before.

    Attributes:
        pauses: Whether each synchronization pauses between its two halves.
    """

    pauses: ClassVar[bool] = False

    def __init__(self, method: Method, cluster: Cluster, training: Training, partition: Sequence[Range]) -> None:
        self._flights: list[Flight[Sum]] = []
        self._missing: list[set[int]] = []
        self._waiting: list[int] = []
        super().__init__(method, cluster, training, partition)

    def _begin_groups(self) -> None:
        super()._begin_groups()
        self._group_of = [number for number, group in enumerate(self._groups) for _ in range(*group.tensors)]

    def _order(self) -> list[int]:
        """Numbers of the groups in the order in which the backward pass completes them."""
        numbers = list(range(len(self._groups)))
        return numbers if self._gradient.backwards else numbers[::-1]

    def begin(self, local: int = 0) -> None:
        """Creates the synchronizations of the step when the first local rank begins."""
        super().begin(local)
        if local == 0:
            self._flights = [
                self._cluster.flight(self._programs(number), pauses=self.pauses) for number in range(len(self._groups))
            ]
        # Until the last backward pass, gradients accumulate and must not be sent.
        self._missing = []
        self._waiting = self._order()[::-1]

    def before_backward(self, *, last: bool) -> None:
        """Allows complete gradients to be sent from the last backward pass on."""
        super().before_backward(last=last)
        if last:
            if not self._waiting:
                raise TrainingError(
                    "begin() was not called in this step; call it for each local rank before its forward pass"
                )
            self._missing = [set(range(*group.tensors)) for group in self._groups]

    def awaits(self, number: int) -> bool:
        """Whether the gradient of parameter ``number`` is still missing in this step."""
        return bool(self._missing) and number in self._missing[self._group_of[number]]

    def complete(self, number: int) -> None:
        """Starts the synchronizations whose gradients are complete with this one."""
        if not self._missing:
            return
        if not self.awaits(number):
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} was complete twice in one backward pass, after it "
                "may have been sent (reentrant checkpointing does that); use schedule=after_backward"
            )
        self._missing[self._group_of[number]].remove(number)
        # The norm of the worker's whole gradient decides by which factor each part of it is multiplied.
        if self.limit.before is not None:
            if any(self._missing):
                return
            self._cluster.reach(self._local, range(len(self._gradient.layers)), backward=True)
            self._clip_first()
        # Only the next group in the common order may start: ranks that start in different orders would deadlock.
        while self._waiting and not self._missing[self._waiting[-1]]:
            self._cluster.reach(self._local, range(*self._groups[self._waiting[-1]].layers), backward=True)
            self._release()

    def _release(self) -> None:
        number = self._waiting.pop()
        self._hand_over(number)
        self._flights[number].release(self._local)

    def collect(self) -> None:
        """Starts the remaining groups, some of whose parameters have no gradient."""
        self._missing = []
        # Nothing is clipped yet if a gradient is missing: ``complete`` waits for the last one.
        if self._waiting:
            self._clip_first()
        while self._waiting:
            self._release()

    def finish(self) -> None:
        """Waits for all groups, and updates."""
        ranks = range(len(self._cluster.local_ranks))
        self._averages = [{} for _ in ranks]
        for number in self._order():
            for local in ranks:
                self._averages[local][number] = self._flights[number].wait(local)
            self._take_over(self._groups[number], self._averages[0][number])
        self._update_all()

    def give_up(self) -> None:
        """Ends a step whose backward pass failed: waits for the groups in flight and discards the others."""
        self._missing = []
        released = [self._flights[number] for number in self._order() if number not in self._waiting]
        self._waiting = []
        for flight in released:
            # Other workers may be in the second half already and need this one's messages.
            if self.pauses:
                flight.resume()
            flight.wait(0)


def check_megabytes(name: str, value: object) -> None:
    """Checks a size in megabytes (2^20 bytes), which may be infinite.

    Args:
        name: Name of the setting, for the error message.
        value: Value of the setting, in megabytes.

    Raises:
        ConfigError: If the value is not a number that is at least 0.
    """
    if not is_a(float, value) or not (isinstance(value, int | float) and value >= 0) or math.isnan(value):
        raise ConfigError(f"{name} must be a number of megabytes, at least 0 (0: one per layer), got {value!r}")


@dataclass(frozen=True)
class Wfbp(Schedule):
    """Sends buckets during the backward pass, from the last layer to the first.

    Args:
        bucket_mb: Largest size of a bucket in megabytes of gradients; layers are never split. 0 for one per layer.

    Raises:
        ConfigError: If the size is not a number that is at least 0.
    """

    bucket_mb: float = 25.0

    name = "wfbp"

    def __post_init__(self) -> None:
        check_megabytes("schedule.bucket_mb", self.bucket_mb)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine with buckets that are filled from the last layer on."""
        return InBackward(method, cluster, training, by_megabytes(training.gradient, self.bucket_mb))
