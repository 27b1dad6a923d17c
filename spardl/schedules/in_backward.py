"""Groups of layers that are sent while the backward pass goes on: wait-free backpropagation.

Source: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters,
USENIX ATC 2017; with groups: Li et al., PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from spardl.basics.errors import TrainingError
from spardl.clusters.base import Cluster, Flight
from spardl.method.method import Method
from spardl.schedules.fusion import Range
from spardl.schedules.synchronizer import Synchronizer, Training
from spardl.vector.sparse import Sum

__all__ = ["InBackward"]


class InBackward(Synchronizer):
    """Releases every group as soon as its gradients are there, strictly from the last one to the first.

    Attributes:
        pauses: whether synchronizations rest at their boundary.
    """

    pauses: ClassVar[bool] = False

    def __init__(self, method: Method, cluster: Cluster, training: Training, partition: Sequence[Range]) -> None:
        self._flights: list[Flight[Sum]] = []
        self._missing: list[set[int]] = []
        self._next = -1
        super().__init__(method, cluster, training, partition)

    def _regroup(self, partition: Sequence[Range]) -> None:
        super()._regroup(partition)
        self._group_of = [number for number, group in enumerate(self._groups) for _ in range(*group.tensors)]

    def begin(self, local: int = 0) -> None:
        """Prepares the step's synchronizations when the first local rank begins."""
        super().begin(local)
        if local == 0:
            self._flights = [self._cluster.flight(self._programs(each), pauses=self.pauses) for each in self._groups]
        self._missing = []
        self._next = len(self._groups) - 1

    def before_backward(self, *, last: bool) -> None:
        """From the last backward pass on, complete gradients are sent."""
        super().before_backward(last=last)
        if last:
            self._missing = [set(range(*group.tensors)) for group in self._groups]

    def _on_gradient(self, number: int) -> None:
        if not self._missing:
            return
        group = self._group_of[number]
        if number not in self._missing[group]:
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} was complete twice in one backward pass, and may be "
                "on its way already (reentrant checkpointing does that); use schedule=after_backward"
            )
        self._missing[group].remove(number)
        while self._next >= 0 and not self._missing[self._next]:
            self._cluster.reach(self._local, range(*self._groups[self._next].layers), backward=True)
            self._release()

    def _release(self) -> None:
        self._accumulate(self._groups[self._next])
        self._flights[self._next].release(self._local)
        self._next -= 1

    def collect(self) -> None:
        """Sends what waited for a gradient that did not come."""
        self._missing = []
        while self._next >= 0:
            self._release()

    def finish(self) -> None:
        """Waits for all groups, and updates."""
        ranks = range(len(self._cluster.local_ranks))
        self._averages = [{} for _ in ranks]
        for number, group in reversed(list(enumerate(self._groups))):
            for local in ranks:
                self._averages[local][number] = self._flights[number].wait(local)
            self._take_over(group, self._averages[0][number])
        self._update_all()
