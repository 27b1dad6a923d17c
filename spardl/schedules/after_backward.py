"""One synchronization of the whole gradient after the backward pass.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.2 (the
naive solution).
"""

from __future__ import annotations

from dataclasses import dataclass

from spardl.clusters.base import Cluster
from spardl.method.method import Method
from spardl.schedules.base import Schedule
from spardl.schedules.engine import Engine
from spardl.schedules.training import Training

__all__ = ["AfterBackward"]


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
