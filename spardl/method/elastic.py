"""Residuals of P workers, dealt out to another number of them.

Each old residual has owners among the new workers: those whose rank is its own modulo the old number, or, if they are
fewer, the one whose rank that is modulo the new number. Its entries go to its owners in turn. So every entry of every
old residual goes to exactly one new worker, unchanged: the sum over all workers stays what it was, to the last bit
where workers join, and up to the rounding of one addition where workers leave and their residuals are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spardl.protocol.programs import Worker

__all__ = ["deal", "owners", "sources"]


def owners(rank: int, before: int, now: int) -> list[int]:
    """The new workers who share the residual of an old one.

    Args:
        rank: of the old worker.
        before: how many there were.
        now: how many there are.
    """
    return [new for new in range(now) if new % before == rank] or [rank % now]


def sources(worker: Worker, before: int) -> list[int]:
    """The old workers of whose residuals a new one gets a part; at least one."""
    return [rank for rank in range(before) if worker.rank in owners(rank, before, worker.size)]


def deal(vectors: Sequence[Tensor], worker: Worker, before: int, into: Tensor) -> None:
    """Gives a new worker its part of old workers' vectors.

    Args:
        vectors: shape (n,) each: of ``sources(worker, before)``, in that order.
        worker: the new one.
        before: how many there were.
        into: shape (n,): where it goes.

    Raises:
        ValueError: if a vector has another length than ``into``.
    """
    into.zero_()
    for rank, vector in zip(sources(worker, before), vectors, strict=True):
        if vector.shape != into.shape:
            raise ValueError(f"a saved vector has {vector.numel()} entries, expected {into.numel()}")
        sharing = owners(rank, before, worker.size)
        mine = slice(sharing.index(worker.rank), None, len(sharing))
        into[mine] += vector[mine].to(into.device)
