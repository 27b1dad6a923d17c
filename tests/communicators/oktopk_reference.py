"""A slow, obvious model of Ok-Topk on a whole cluster, written from its description in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from spardl.communicators import OkTopk
from spardl.compressors import ReusedThreshold

Vector: TypeAlias = list[float]


class Reference:
    """P workers with residuals and thresholds; nothing is sent, sums are made where they are needed.

    Attributes:
        found: how often a local and the global threshold were found exactly.
        repartitions: how often regions were chosen.
    """

    def __init__(self, workers: int, length: int, compressor: ReusedThreshold, communicator: OkTopk) -> None:
        self.workers, self.length = workers, length
        self.local, self.whole = compressor, communicator
        self.residuals = [[0.0] * length for _ in range(workers)]
        self.local_thresholds = [0.0] * workers
        self.threshold = 0.0
        self.borders: list[int] = []
        self.found = {"local": 0, "global": 0}
        self.repartitions = 0
        self.time = 0

    def step(self, gradients: Sequence[Vector], k: int) -> Vector:
        """One synchronization.

        Returns:
            The average; the residuals are those of the next step afterwards.
        """
        accumulated = [
            [old + new for old, new in zip(*pair, strict=True)] for pair in zip(self.residuals, gradients, strict=True)
        ]
        chosen = [self._choose(rank, vector, k) for rank, vector in enumerate(accumulated)]
        if self.time % self.whole.repartition_period == 0:
            self._repartition(chosen)
        result = self._reduce(accumulated, chosen, k)
        average = [0.0] * self.length
        for i, value in result.items():
            average[i] = value / self.workers
        for vector, sent in zip(accumulated, chosen, strict=True):
            for i in sent:
                if i in result:
                    vector[i] = 0.0
        self.residuals = accumulated
        self.time += 1
        return average

    def _choose(self, rank: int, vector: Vector, k: int) -> list[int]:
        rule, threshold = self.local, self.local_thresholds[rank]
        if k >= self.length:
            return list(range(self.length))
        exact = self.time % rule.period == 0 or threshold == 0
        chosen: list[int] = []
        if not exact:
            chosen = [i for i in range(self.length) if abs(vector[i]) >= threshold]
            times = 0
            while times < rule.pre_corrections and len(chosen) > rule.pre_limit * k:
                threshold *= rule.pre_factor
                chosen = [i for i in range(self.length) if abs(vector[i]) >= threshold]
                times += 1
            exact = far(len(chosen), k, rule.reevaluate_beyond)
        if exact:
            self.found["local"] += 1
            order = sorted(range(self.length), key=lambda i: (-abs(vector[i]), i))[:k]
            threshold = abs(vector[order[-1]])
            chosen = sorted(i for i in order if vector[i] != 0)
        if len(chosen) < rule.low * k:
            threshold /= rule.lower_factor
        elif len(chosen) > rule.high * k:
            threshold *= rule.raise_factor
        self.local_thresholds[rank] = threshold
        return chosen

    def _repartition(self, chosen: Sequence[Sequence[int]]) -> None:
        self.repartitions += 1
        proposals = []
        for sent in chosen:
            if sent:
                proposals.append([0] + [sent[part * len(sent) // self.workers] for part in range(1, self.workers)])
            else:
                proposals.append([part * self.length // self.workers for part in range(self.workers)])
        self.borders = [sum(column) // self.workers for column in zip(*proposals, strict=True)] + [self.length]

    def _reduce(self, accumulated: Sequence[Vector], chosen: Sequence[Sequence[int]], k: int) -> dict[int, float]:
        """The sums in the result. Regions only say who adds up, and rank by rank is the order everywhere."""
        sums: dict[int, float] = {}
        for vector, sent in zip(accumulated, chosen, strict=True):
            for i in sent:
                sums[i] = sums.get(i, 0.0) + vector[i]
        if k >= self.length:
            return sums
        if self.time % self.whole.threshold_period and self.threshold > 0:
            kept = {i: value for i, value in sums.items() if abs(value) >= self.threshold and value != 0}
            if not far(len(kept), k, self.whole.reevaluate_beyond):
                if len(kept) < self.whole.low * k:
                    self.threshold /= self.whole.lower_factor
                elif len(kept) > self.whole.high * k:
                    self.threshold *= self.whole.raise_factor
                return kept
        self.found["global"] += 1
        order = sorted((i for i in sums if sums[i] != 0), key=lambda i: (-abs(sums[i]), i))[:k]
        self.threshold = abs(sums[order[-1]]) if len(order) == k else 0.0
        return {i: sums[i] for i in order}


def far(count: int, k: int, beyond: float | None) -> bool:
    """Whether a threshold is to be found ahead of time."""
    return beyond is not None and (count > beyond * k or count < k / beyond)
