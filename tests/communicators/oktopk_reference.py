"""Reference implementation of Ok-Topk on all workers at once, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from spardl.communicators import OkTopk
from spardl.compressors import ReusedThreshold

Vector: TypeAlias = list[float]


class Reference:
    """P workers with residuals and thresholds; nothing is sent, sums are made where they are needed.

    Attributes:
        found: how often a local and the global threshold were found.
        cut: how often a worker's selection, and that of the sums, was cut because it had more than 4k/3.
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
        self.cut = {"local": 0, "global": 0}
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
        for vector, sent in zip(accumulated, chosen, strict=True):
            if len(sent) * 3 > 4 * k:
                self.cut["local"] += 1
                sent[:] = largest(dict(zip(sent, (vector[i] for i in sent), strict=True)), k)
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
        sums = {i: value for i, value in sums.items() if value != 0}
        due, usable = self.time % self.whole.threshold_period == 0, self.threshold > 0
        above = {i: value for i, value in sums.items() if abs(value) >= self.threshold}
        if not due and usable and not far(len(above), k, self.whole.reevaluate_beyond):
            if len(above) < self.whole.low * k:
                self.threshold /= self.whole.lower_factor
            elif len(above) > self.whole.high * k:
                self.threshold *= self.whole.raise_factor
            if len(above) * 3 <= 4 * k:
                return above
            self.cut["global"] += 1
            return {i: sums[i] for i in largest(self._fitting(above, k), k)}
        self.found["global"] += 1
        # What is below the threshold is not among the k largest, if k reach it.
        candidates = sums if due else self._fitting(above if len(above) >= k else sums, math.floor(4 * k / 3))
        order = largest(candidates, k)
        self.threshold = min(abs(sums[i]) for i in order) if len(order) == k else 0.0
        return {i: sums[i] for i in order}

    def _fitting(self, sums: dict[int, float], budget: int) -> dict[int, float]:
        """Of each region its largest sums, as large a share of the budget as of all sums, and not less than that."""
        if len(sums) <= budget:
            return sums
        fitting: dict[int, float] = {}
        for start, stop in pairwise(self.borders):
            inside = {i: value for i, value in sums.items() if start <= i < stop}
            share = math.ceil(Fraction(budget * len(inside), len(sums)))
            fitting |= {i: inside[i] for i in largest(inside, share)}
        return fitting


def largest(values: dict[int, float], count: int) -> list[int]:
    """Where the largest are, of equal ones the first, in order of place."""
    return sorted(sorted(values, key=lambda i: (-abs(values[i]), i))[:count])


def far(count: int, k: int, beyond: float | None) -> bool:
    """Whether a threshold is to be found ahead of time."""
    return beyond is not None and (count > beyond * k or count < k / beyond)
