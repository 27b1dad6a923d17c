"""Redistribution of saved residuals when the world size changes.

Each old residual has owners among the new workers: all new ranks that are equal to the old rank modulo the old world
size or, if the world size shrinks below it, the old rank modulo the new world size. The owners take turns with its
entries. Every entry of every old residual thus goes to exactly one new worker, unchanged. The sum over all workers is
bit-identical if workers join, and equal up to the rounding of one addition if workers leave and residuals are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spardl.protocol.programs import Worker

__all__ = ["owners", "redistribute", "sources"]


def owners(rank: int, before: int, now: int) -> list[int]:
    """Returns the new workers that share the residual of an old worker.

    Args:
        rank: Rank of the old worker.
        before: Number of workers that saved the residuals.
        now: New world size.

    Returns:
        New ranks, at least one.
    """
    return [new for new in range(now) if new % before == rank] or [rank % now]


def sources(worker: Worker, before: int) -> list[int]:
    """Returns the old ranks (at least one) whose residuals ``worker`` takes entries from, of ``before`` old workers."""
    return [rank for rank in range(before) if worker.rank in owners(rank, before, worker.size)]


def redistribute(vectors: Sequence[Tensor], worker: Worker, before: int, into: Tensor) -> None:
    """Writes a new worker's part of the vectors of old workers.

    Args:
        vectors: Vectors of ``sources(worker, before)``, in that order, shape (n,) each.
        worker: New worker.
        before: Old world size.
        into: Tensor that receives the result, shape (n,).

    Raises:
        ValueError: If a vector and ``into`` have different lengths.
    """
    into.zero_()
    for rank, vector in zip(sources(worker, before), vectors, strict=True):
        if vector.shape != into.shape:
            raise ValueError(f"a saved residual or moment must have {into.numel()} entries, got {vector.numel()}")
        sharing = owners(rank, before, worker.size)
        mine = slice(sharing.index(worker.rank), None, len(sharing))
        into[mine] += vector[mine].to(into.device)
