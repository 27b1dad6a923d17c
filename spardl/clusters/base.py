"""The interface of a cluster: the ranks of this process, and the ways to run their programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from spardl.clusters.ledger import Ledger
from spardl.communicators.steps.transfer import all_gather
from spardl.protocol.programs import Boundary, Phase, Program, Worker, whole_team

__all__ = ["Cluster", "Work", "gather_rows"]

T = TypeVar("T")


class Work(ABC, Generic[T]):
    """A synchronization that runs while the workers compute.

    Each worker has one communication stream, which runs programs in the order in which they are released. All
    workers must therefore release their programs in the same order.
    """

    @abstractmethod
    def release(self, local: int) -> None:
        """Allows the program of the local rank ``local`` to run."""

    @abstractmethod
    def boundary(self, local: int) -> Boundary:
        """Waits until the program of the local rank ``local`` pauses at its boundary, and returns the boundary."""

    @abstractmethod
    def resume(self) -> None:
        """Resumes the paused programs of all local ranks."""

    @abstractmethod
    def wait(self, local: int) -> T:
        """Waits until the program of the local rank ``local`` ends, and returns its result.

        Raises:
            PeerError: if the connection to another worker is lost, or a worker does not answer in time.
        """


class Cluster(ABC):
    """P workers that run communication programs.

    Attributes:
        size: number of workers, P.
        local_ranks: ranks that run in this process, in ascending order.
        ledgers: one ledger per local rank, for the messages and the time of training.
        device: device of all messages.
        counts_calibration: whether the messages that a schedule sends to measure the network are entered in the
            ledgers.
    """

    size: int
    local_ranks: Sequence[int]
    ledgers: Sequence[Ledger]
    device: torch.device
    counts_calibration: ClassVar[bool] = False

    @property
    def leads(self) -> bool:
        """Whether this process runs rank 0, which writes shared output."""
        return 0 in self.local_ranks

    @property
    def local_workers(self) -> list[Worker]:
        """Workers that run in this process."""
        return [Worker(rank, self.size) for rank in self.local_ranks]

    def name_phases(self, *, on: bool) -> None:
        """Shows phases as ranges ``spardl.PHASE`` in traces of ``torch.profiler``, if ``on``."""
        for ledger in self.ledgers:
            ledger.traced = on

    @abstractmethod
    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs one program per local rank and enters its cost in the ledgers.

        Args:
            programs: one program per local rank, in the order of ``local_ranks``.

        Returns:
            The results of the programs.

        Raises:
            PeerError: if the connection to another worker is lost, or a worker does not answer in time.
            ProgramError: if the programs of two workers do not match.
        """

    @abstractmethod
    def run_uncounted(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs ``programs`` like ``run``, but does not enter them in the ledgers: they are not part of training."""

    @abstractmethod
    def time_uncounted(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Runs ``programs`` like ``run_uncounted``; returns the seconds of each local rank on the cluster's clock."""

    @abstractmethod
    def enqueue(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Work[T]:
        """Prepares one program per local rank, which starts when it is released and runs while the workers compute.

        Args:
            programs: one program per local rank, in the order of ``local_ranks``.
            pauses: whether the programs pause at their first ``Boundary`` until they are resumed.

        Returns:
            A handle that releases the programs and waits for them.
        """

    @abstractmethod
    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Enters the time spent in the ``with`` block. A nested block counts for its own phase only.

        Args:
            phase: phase to charge.
            local: positions in ``local_ranks`` of the ranks to charge.

        Returns:
            A context manager.
        """

    @abstractmethod
    def expect(self, layers: Sequence[int]) -> None:
        """Checks the number of entries of each of the model's ``layers``.

        Raises:
            ConfigError: if this cluster uses the profile of a different model.
        """

    @abstractmethod
    def computing(self, local: int) -> AbstractContextManager[None]:
        """Marks the ``with`` block as one forward and backward pass of the local rank ``local``."""

    @abstractmethod
    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Reports the progress of a local rank's pass.

        Args:
            local: position of the rank in ``local_ranks``.
            layers: layers that the forward pass is about to use, or whose gradients the backward pass has completed;
                empty at the start of a pass.
            backward: whether the backward pass runs, rather than the forward pass.
        """

    @abstractmethod
    def now(self, local: int) -> float:
        """Current time of the local rank ``local``, in seconds, after all queued GPU work has ended."""

    @abstractmethod
    def seconds(self) -> float:
        """Wall-clock seconds since the cluster was created, or virtual seconds of the slowest worker."""

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of the cluster."""


def gather_rows(cluster: Cluster, rows: Sequence[Tensor], *, counted: bool = False) -> list[Tensor]:
    """Gathers the rows of all ranks on every process.

    Args:
        cluster: the workers that take part.
        rows: one tensor of shape (m,) per local rank, with the same length and dtype on all ranks.
        counted: whether the messages are part of training and entered in the ledgers.

    Returns:
        One tensor of shape (m,) per rank, ordered by rank, on the device of the first row.
    """
    # Equal rows need no exchange of sizes first.
    sizes = [rows[0].numel()] * cluster.size
    programs = [
        all_gather(whole_team(worker), row.to(cluster.device), sizes, sizes)
        for worker, row in zip(cluster.local_workers, rows, strict=True)
    ]
    run = cluster.run if counted else cluster.run_uncounted
    # All local ranks receive the same rows.
    return [row.to(rows[0].device) for row in run(programs)[0]]
