"""What a step really cost, by the workers' ledgers, and when its compression pays."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.clusters.base import Cluster, gather_rows
from spardl.clusters.ledger import Ledger
from spardl.protocol.programs import Phase

__all__ = ["StepCosts", "break_even_gbit", "gather_costs"]


@dataclass(frozen=True)
class StepCosts:
    """What one step cost, on average over steps and workers.

    Attributes:
        seconds: by phase.
        beside: seconds of what ran beside these, by phase.
        rounds: exchanges, of the worker that has most.
        words: sent, an index or a value being one.
        bytes_sent: sent by a worker.
        dense_bytes: what a ring all-reduce of the same gradient would send.
        peak_memory: largest resident memory of a process, in bytes.
    """

    seconds: dict[str, float]
    beside: dict[str, float]
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    peak_memory: float

    @property
    def overhead(self) -> float:
        """Seconds that compressing takes: selecting, packing and merging."""
        local = (Phase.SELECT.value, Phase.PACK.value, Phase.MERGE.value)
        return sum(self.seconds[phase] + self.beside[phase] for phase in local)


def gather_costs(cluster: Cluster, steps: int, gradient: Tensor) -> StepCosts:
    """Averages all workers' ledgers; of no step at all, they are 0.

    Args:
        cluster: the workers.
        steps: that the ledgers count.
        gradient: of the whole model, shape (n,).
    """
    steps = max(1, steps)
    rows = gather_rows(cluster, [_row(ledger, gradient.device) for ledger in cluster.ledgers])
    table = torch.stack(rows).cpu()
    _, words, sent, *seconds = (table[:, :-1].mean(0) / steps).tolist()
    return StepCosts(
        seconds={phase.value: value for phase, value in zip(Phase, seconds[: len(Phase)], strict=True)},
        beside={phase.value: value for phase, value in zip(Phase, seconds[len(Phase) :], strict=True)},
        rounds=float(table[:, 0].max()) / steps,
        words=words,
        bytes_sent=sent,
        dense_bytes=2 * gradient.nbytes * (cluster.size - 1) / cluster.size,
        peak_memory=float(table[:, -1].max()),
    )


def _row(ledger: Ledger, device: torch.device) -> Tensor:
    counts = [ledger.rounds, ledger.words, ledger.bytes_sent]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    values = [*counts, *(ledger.seconds[phase] for phase in Phase), *(ledger.beside[phase] for phase in Phase), peak]
    return torch.tensor(values, dtype=torch.float64, device=device)


def break_even_gbit(costs: StepCosts) -> float | None:
    """The bandwidth under which compressing is faster than sending the dense gradient.

    Per step, compressing costs its seconds of selecting, packing and merging, and saves bytes. Both are equal
    at (bytes saved) / (seconds spent); on a slower network compressing wins. The seconds that a dense
    all-reduce spends on its own additions are left out, in its favour.

    Returns:
        Gbit/s per worker, or ``None`` if no bytes are saved.
    """
    saved = costs.dense_bytes - costs.bytes_sent
    if saved <= 0 or costs.overhead <= 0:
        return None
    return 8e-9 * saved / costs.overhead
