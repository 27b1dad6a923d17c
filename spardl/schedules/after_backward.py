"""One synchronization of the whole gradient after the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spardl.clusters.base import Cluster
from spardl.flat import FlatGradient
from spardl.method import Method
from spardl.programs import Phase
from spardl.schedules.base import Schedule
from spardl.sparse import Sum

__all__ = ["AfterBackward"]


class AfterBackward(Schedule):
    """Sends one flat vector when all gradients are there.

    Args:
        method: how to average.
        cluster: the workers.
        gradient: the model's flat gradient.
    """

    name = "after_backward"

    def __init__(self, method: Method, cluster: Cluster, gradient: FlatGradient) -> None:
        self._method = method
        self._cluster = cluster
        self._gradient = gradient
        vector = gradient.vector
        self._states = [method.init_state(gradient.layout, vector.dtype, vector.device) for _ in cluster.local_ranks]

    def collect(self, local: int) -> None:
        """Adds the flat gradient to what the rank carried over."""
        with self._cluster.timed(Phase.SELECT, [local]):
            if self._method.momentum.decay:
                self._gradient.add_weights(self._method.momentum.decay)
            self._method.accumulate(self._gradient.vector, self._states[local])
            self._gradient.zero()

    def finish(self) -> Sequence[Sum]:
        """Runs the method's program on every worker."""
        workers = self._cluster.local_workers
        averages = self._cluster.run(
            [self._method.average(worker, state) for worker, state in zip(workers, self._states, strict=True)]
        )
        with self._cluster.timed(Phase.UPDATE, range(len(workers))):
            self._gradient.write(averages[0])
        return averages

    def refused(self) -> int:
        """Summed over the local ranks."""
        return sum(state.refused for state in self._states)

    def state_dict(self, local: int) -> dict[str, Any]:
        """The method's state."""
        return self._states[local].state_dict()

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Restores the method's state."""
        self._states[local].load_state_dict(values)
