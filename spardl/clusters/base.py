"""The interface of a cluster: it runs the communication programs of the workers that live in this process.

A program is a generator that requests the messages of one worker (``spardl.protocol.programs``). A *local rank*
(``local``) is the position, in ``local_ranks``, of a worker that this process runs. A *ledger* records the messages and
times of one worker. A *boundary* is the point between the two halves (reduce-scatter and all-gather) of a program,
where it can pause.
"""

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
    """An asynchronous synchronization: programs of the local ranks that run while the workers compute.

    Each worker has a communication stream, which runs programs in the order in which they are released. All workers
    must therefore release their programs in the same order.
    """

    @abstractmethod
    def release(self, local: int) -> None:
        """Allows the program of local rank ``local`` to run."""

    @abstractmethod
    def boundary(self, local: int) -> Boundary:
        """Waits until the program of local rank ``local`` pauses, and returns the boundary that it has reached."""

    @abstractmethod
    def resume(self) -> None:
        """Resumes the paused programs of all local ranks."""

    @abstractmethod
    def wait(self, local: int) -> T:
        """Waits until the program of local rank ``local`` ends, and returns its result.

        Raises:
            PeerError: If the connection to another worker is lost, or a worker does not answer in time.
        """


class Cluster(ABC):
    """P workers that run communication programs; some or all of them live in this process.

    Attributes:
        size: Number of workers, P.
        local_ranks: Ranks that run in this process, in ascending order.
        ledgers: Records of the messages and times of training, one ledger per local rank.
        device: Device of all messages.
        counts_calibration: Whether the ledgers count the messages that a schedule sends to measure the network.
    """

    size: int
    local_ranks: Sequence[int]
    ledgers: Sequence[Ledger]
    device: torch.device
    counts_calibration: ClassVar[bool] = False

    @property
    def leads(self) -> bool:
        """Whether this process runs rank 0, which writes output on behalf of all workers."""
        return 0 in self.local_ranks

    @property
    def local_workers(self) -> list[Worker]:
        """One :class:`Worker` (rank and number of workers) per local rank, in the order of ``local_ranks``."""
        return [Worker(rank, self.size) for rank in self.local_ranks]

    def name_phases(self, *, on: bool) -> None:
        """Sets whether (``on``) traces of ``torch.profiler`` show each phase as a range, such as ``spardl.select``."""
        for ledger in self.ledgers:
            ledger.traced = on

    @abstractmethod
    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs one program per local rank, waits for the results, and records the costs in the ledgers.

        Args:
            programs: One program per local rank, in the order of ``local_ranks``.

        Returns:
            The results of the programs, one per local rank.

        Raises:
            PeerError: If the connection to another worker is lost, or a worker does not answer in time.
            ProgramError: If the programs of two workers do not match.
        """

    @abstractmethod
    def run_uncounted(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs ``programs`` like ``run``, but records no costs, because these programs are not part of training."""

    @abstractmethod
    def time_uncounted(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Runs ``programs`` like ``run_uncounted``; returns the duration of each in wall-clock or virtual seconds."""

    @abstractmethod
    def enqueue(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Work[T]:
        """Queues one program per local rank; each starts once it is released, and runs while the worker computes.

        Args:
            programs: One program per local rank, in the order of ``local_ranks``.
            pauses: Whether the programs pause at their first ``Boundary`` until they are resumed.

        Returns:
            The asynchronous work, which releases the programs and waits for them.
        """

    @abstractmethod
    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Records the time spent in the ``with`` block, without the time of nested blocks, in the ledgers.

        Args:
            phase: Phase that the time is attributed to.
            local: Local ranks that the time is attributed to, as positions in ``local_ranks``.

        Returns:
            The context manager for the ``with`` block.
        """

    @abstractmethod
    def expect(self, layers: Sequence[int]) -> None:
        """Checks that the cluster supports a model with the given numbers of entries per layer (``layers``).

        Raises:
            ConfigError: If this cluster uses the profile of a different model.
        """

    @abstractmethod
    def computing(self, local: int) -> AbstractContextManager[None]:
        """Returns a context manager to enter for one forward and backward pass of local rank ``local``."""

    @abstractmethod
    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Tells the cluster how far the pass of a local rank has come.

        Args:
            local: Position of the rank in ``local_ranks``.
            layers: Numbers of the layers that the forward pass is about to use, or whose gradients the backward pass
                has completed; empty at the start of a pass.
            backward: Whether this is the backward pass; otherwise it is the forward pass.
        """

    @abstractmethod
    def now(self, local: int) -> float:
        """Returns the current time of local rank ``local`` in seconds, after queued GPU work has ended."""

    @abstractmethod
    def seconds(self) -> float:
        """Returns the seconds since the cluster was created: wall-clock, or the slowest worker's virtual seconds."""

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of the cluster."""


def gather_rows(cluster: Cluster, rows: Sequence[Tensor], *, counted: bool = False) -> list[Tensor]:
    """Gathers one tensor (row) from each rank; every process gets all rows.

    Args:
        cluster: Cluster that connects the workers.
        rows: One tensor of shape (m,) per local rank, with the same length and dtype on all ranks.
        counted: Whether the ledgers count the messages as part of training.

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
