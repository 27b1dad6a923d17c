"""Redistribution of saved residuals when the world size changes.

Each old residual has *owners* among the new workers: the new ranks r with ``r % old_size == old_rank``. If there are
none, because the world size shrinks, the owner is rank ``old_rank % new_size``. The m owners of a residual share its
entries: the first one takes entries 0, m, 2m, ..., the second one entries 1, m + 1, .... Every entry of every old
residual thus goes to exactly one new worker, unchanged. If workers join, the sum over all workers is bit-identical. If
workers leave, some residuals are added, and the sum is equal up to the rounding of this addition.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spardl.protocol.programs import Worker

__all__ = ["owners", "redistribute", "sources"]


def owners(rank: int, before: int, now: int) -> list[int]:
    """Returns the owners of an old worker's residual: the new workers that share its entries.

    Args:
        rank: Rank of the old worker.
        before: Number of workers that saved the residuals.
        now: New world size.

    Returns:
        New ranks, at least one.
    """
    return [new for new in range(now) if new % before == rank] or [rank % now]


def sources(worker: Worker, before: int) -> list[int]:
    """Returns the old ranks, at least one, in whose residuals ``worker`` owns entries.

    The residuals were saved by ``before`` workers.
    """
    return [rank for rank in range(before) if worker.rank in owners(rank, before, worker.size)]


def redistribute(vectors: Sequence[Tensor], worker: Worker, before: int, into: Tensor) -> None:
    """Sums the entries of old workers' vectors that a new worker owns; all other entries become zero.

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
