"""What the trainer sees of a cluster: the ranks that live in this process, and ways to run their programs."""

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

__all__ = ["Cluster", "Flight", "gather_rows"]

T = TypeVar("T")


class Flight(ABC, Generic[T]):
    """One synchronization that goes on beside the computation.

    Every worker has one stream of communication, which works off what was released in that order; so all workers
    must release in the same order.
    """

    @abstractmethod
    def release(self, local: int) -> None:
        """Lets the program of a local rank, ``local``, run from now on."""

    @abstractmethod
    def boundary(self, local: int) -> Boundary:
        """Waits for the program of a local rank, ``local``, to pause."""

    @abstractmethod
    def resume(self) -> None:
        """Lets the programs of all local ranks go on after their pause."""

    @abstractmethod
    def wait(self, local: int) -> T:
        """Waits for the program of a local rank, ``local``, to end, and returns its result.

        Raises:
            PeerError: if contact with another worker is lost, or it does not answer in time.
        """


class Cluster(ABC):
    """P workers.

    Attributes:
        size: P.
        local_ranks: the ranks that this process plays, in order.
        ledgers: one per local rank: what training itself sent and spent.
        device: where messages live.
        counts_calibration: whether messages by which a schedule measures the network are entered in the ledgers.
    """

    size: int
    local_ranks: Sequence[int]
    ledgers: Sequence[Ledger]
    device: torch.device
    counts_calibration: ClassVar[bool] = False

    @property
    def leads(self) -> bool:
        """Whether this process plays rank 0, which writes what is written once."""
        return 0 in self.local_ranks

    @property
    def local_workers(self) -> list[Worker]:
        """The workers that this process plays."""
        return [Worker(rank, self.size) for rank in self.local_ranks]

    @abstractmethod
    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs one program per local rank to its end, and enters its cost in the ledgers.

        Args:
            programs: of the local ranks, in order.

        Returns:
            The programs' results.

        Raises:
            PeerError: if contact with another worker is lost, or it does not answer in time.
            ProgramError: if two workers' programs do not fit together.
        """

    @abstractmethod
    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs ``programs`` like ``run``, for housekeeping that is no part of training: not entered in the ledgers."""

    @abstractmethod
    def time_aside(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Runs ``programs`` like ``run_aside``; gives the seconds of each local rank by the cluster's clock."""

    @abstractmethod
    def flight(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Flight[T]:
        """Prepares programs, one per local rank, that run beside the computation once they are released.

        Args:
            programs: as for ``run``.
            pauses: whether they rest at their first ``Boundary`` until they are resumed.

        Returns:
            What is released, and waited for.
        """

    @abstractmethod
    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Enters the seconds spent inside. What is timed inside of it does not count for the outer phase.

        Args:
            phase: what they are spent on.
            local: by which local ranks: their places in ``local_ranks``.

        Returns:
            For a ``with`` block.
        """

    @abstractmethod
    def expect(self, layers: Sequence[int]) -> None:
        """Is told the entries of each of the model's ``layers``.

        Raises:
            ConfigError: if this cluster computes with the profile of another model.
        """

    @abstractmethod
    def computing(self, local: int) -> AbstractContextManager[None]:
        """Inside is one forward and backward pass of the local rank ``local``."""

    @abstractmethod
    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Is told how far a local rank's pass is.

        Args:
            local: which rank.
            layers: those of which the forward pass is about to use the first, or of which the backward pass has
                completed all gradients; none where a pass begins.
            backward: which of the two passes.
        """

    @abstractmethod
    def now(self, local: int) -> float:
        """The clock's seconds at which the computation of rank ``local`` is, once a GPU is done with it."""

    @abstractmethod
    def seconds(self) -> float:
        """The cluster's clock: wall seconds since it was made, or virtual seconds of the slowest worker."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the cluster."""


def gather_rows(cluster: Cluster, rows: Sequence[Tensor], *, counted: bool = False) -> list[Tensor]:
    """Gives every process the rows of all ranks.

    Args:
        cluster: the workers.
        rows: one tensor of shape (m,) per local rank; all ranks' have the same length and type.
        counted: whether it is part of training, and entered in the ledgers, or housekeeping.

    Returns:
        One tensor of shape (m,) per rank, in the order of the ranks, on the device of the first row.
    """
    sizes = [rows[0].numel()] * cluster.size
    programs = [
        all_gather(whole_team(worker), row.to(cluster.device), sizes, sizes)
        for worker, row in zip(cluster.local_workers, rows, strict=True)
    ]
    run = cluster.run if counted else cluster.run_aside
    return [row.to(rows[0].device) for row in run(programs)[0]]
