"""When gradients are sent: what a configuration chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from spardl.clusters.base import Cluster
from spardl.method.method import Method
from spardl.schedules.engine import Engine
from spardl.schedules.training import Training

__all__ = ["Schedule"]


class Schedule(ABC):
    """A way to interleave communication with computation. Immutable: what changes is in the ``Engine``.

    Attributes:
        name: how configurations call it.
        alone: whether each worker's optimizer makes steps of its own, and keeps its own state.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False

    def check(self, method: Method, *, clips: bool) -> None:
        """Accepts a method, before any worker starts.

        Args:
            method: how gradients are averaged.
            clips: whether the norm of the average is limited.

        Raises:
            ConfigError: if this schedule cannot run it; the message says what to do instead.
        """

    def start(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Makes what goes through the steps of one training; all workers must call this at once.

        Args:
            method: how gradients are averaged.
            cluster: the workers.
            training: what is trained.

        Returns:
            The object whose methods the training loop calls.

        Raises:
            ConfigError: on all workers, if they were not given the same.
        """
        engine = self.make(method, cluster, training)
        engine.compare()
        return engine

    @abstractmethod
    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """The same as ``start``, but that workers do not compare what they were given yet.

        Args:
            method: how gradients are averaged.
            cluster: the workers.
            training: what is trained.

        Returns:
            What is not compared yet.
        """
