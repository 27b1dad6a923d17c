"""Wait-free backpropagation with buckets of a fixed size.

Source: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters,
USENIX ATC 2017; with buckets: Li et al., PyTorch Distributed, VLDB 2020.
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


# One synchronization of the whole gradient after the backward pass.
#
# Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.2
# (the naive solution).


@dataclass(frozen=True)
class AfterBackward(Schedule):
    """Sends one flat vector when all gradients are there."""

    name = "after_backward"

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With one group of all layers."""
        return _AtTheEnd(method, cluster, training, [(0, len(training.gradient.layers))])


class _AtTheEnd(Engine):
    def collect(self) -> None:
        """Adds the flat gradient to what the rank carried over."""
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


# Groups of layers that are sent while the backward pass goes on: wait-free backpropagation.
#
# Source: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU
# Clusters, USENIX ATC 2017; with groups: Li et al., PyTorch Distributed, VLDB 2020.


class InBackward(Engine):
    """Releases every group as soon as its gradients are there, strictly in the order of the backward pass.

    Where each worker's own gradient is to be limited, all wait for the last: its norm is not known before.

    All workers must release in one order, and that in which gradients are complete may differ between them.

    Attributes:
        pauses: whether synchronizations rest at their boundary.
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
        """The groups as the backward pass completes them."""
        numbers = list(range(len(self._groups)))
        return numbers if self._gradient.backwards else numbers[::-1]

    def begin(self, local: int = 0) -> None:
        """Prepares the step's synchronizations when the first local rank begins."""
        super().begin(local)
        if local == 0:
            self._flights = [
                self._cluster.flight(self._programs(number), pauses=self.pauses) for number in range(len(self._groups))
            ]
        self._missing = []
        self._waiting = self._order()[::-1]

    def before_backward(self, *, last: bool) -> None:
        """From the last backward pass on, complete gradients are sent."""
        super().before_backward(last=last)
        if last:
            if not self._waiting:
                raise TrainingError("a step begins with begin(), for each local rank; call it before the forward pass")
            self._missing = [set(range(*group.tensors)) for group in self._groups]

    def awaits(self, number: int) -> bool:
        """Whether the gradient of parameter ``number`` is to come in this step."""
        return bool(self._missing) and number in self._missing[self._group_of[number]]

    def complete(self, number: int) -> None:
        """Sends what is complete with this gradient."""
        if not self._missing:
            return
        if not self.awaits(number):
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} was complete twice in one backward pass, and may be "
                "on its way already (reentrant checkpointing does that); use schedule=after_backward"
            )
        self._missing[self._group_of[number]].remove(number)
        if self.limit.before is not None:
            if any(self._missing):
                return
            self._cluster.reach(self._local, range(len(self._gradient.layers)), backward=True)
            self._clip_first()
        while self._waiting and not self._missing[self._waiting[-1]]:
            self._cluster.reach(self._local, range(*self._groups[self._waiting[-1]].layers), backward=True)
            self._release()

    def _release(self) -> None:
        number = self._waiting.pop()
        self._hand_over(number)
        self._flights[number].release(self._local)

    def collect(self) -> None:
        """Sends what waited for a gradient that did not come."""
        self._missing = []
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
        """Ends a step whose backward pass ended early: what was sent is waited for, and the rest left out."""
        self._missing = []
        released = [self._flights[number] for number in self._order() if number not in self._waiting]
        self._waiting = []
        for flight in released:
            if self.pauses:
                flight.resume()
            flight.wait(0)


def check_megabytes(name: str, value: object) -> None:
    """Accepts a size in MB (2^20 bytes), infinity included.

    Raises:
        ConfigError: if it is not a number, at least 0.
    """
    if not is_a(float, value) or not (isinstance(value, int | float) and value >= 0) or math.isnan(value):
        raise ConfigError(f"{name} must be a number of megabytes, at least 0 (0: every layer alone), got {value!r}")


@dataclass(frozen=True)
class Wfbp(Schedule):
    """Sends buckets during the backward pass, from the last layer to the first.

    Args:
        bucket_mb: most megabytes of gradients in a bucket; a layer is never cut. 0: every layer alone.

    Raises:
        ConfigError: if that is not a number, at least 0.
    """

    bucket_mb: float = 25.0

    name = "wfbp"

    def __post_init__(self) -> None:
        check_megabytes("schedule.bucket_mb", self.bucket_mb)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With buckets filled from the last layer on."""
        return InBackward(method, cluster, training, by_megabytes(training.gradient, self.bucket_mb))
