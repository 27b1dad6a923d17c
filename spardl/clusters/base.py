"""What the trainer sees of a cluster: the ranks that live in this process, and a way to run their programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from spardl.clusters.ledger import Ledger
from spardl.communicators.bruck import all_gather
from spardl.programs import Phase, Program, Worker, whole_team

__all__ = ["Cluster", "gather_rows"]

T = TypeVar("T")


class Cluster(ABC):
    """P workers.

    Attributes:
        size: P.
        local_ranks: the ranks that this process plays, in order.
        ledgers: one per local rank: what training itself sent and spent.
        device: where messages live.
    """

    size: int
    local_ranks: Sequence[int]
    ledgers: Sequence[Ledger]
    device: torch.device

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

        Returns:
            The programs' results.

        Raises:
            PeerError: if contact with another worker is lost, or it does not answer in time.
            ProgramError: if two workers' programs do not fit together.
        """

    @abstractmethod
    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Like ``run``, for housekeeping that is not part of training: not entered in the ledgers."""

    @abstractmethod
    @contextmanager
    def timed(self, phase: Phase, local: Sequence[int]) -> Iterator[None]:
        """Enters the seconds spent inside as a phase of some local ranks (their places in ``local_ranks``)."""

    @abstractmethod
    def seconds(self) -> float:
        """The cluster's clock: wall seconds since it was made, or virtual seconds of the slowest worker."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the cluster."""


def gather_rows(cluster: Cluster, rows: Sequence[Tensor]) -> list[Tensor]:
    """Gives every process the rows of all ranks, for housekeeping.

    Args:
        cluster: the workers.
        rows: one 1-D tensor per local rank; all ranks' have the same length and type.

    Returns:
        One tensor per rank, in the order of the ranks, on the device of the first row.
    """
    sizes = [rows[0].numel()] * cluster.size
    programs = [
        all_gather(whole_team(worker), row.to(cluster.device), sizes, sizes)
        for worker, row in zip(cluster.local_workers, rows, strict=True)
    ]
    return [row.to(rows[0].device) for row in cluster.run_aside(programs)[0]]
