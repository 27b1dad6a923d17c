"""LayerFusion: the groups of layers with which the last synchronization ends first.

Source: Dai et al., Sketch-Fusion SGD, JPDC 185, 2024, by what its abstract states; the formulation is ours, see
``optimal``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spardl.basics.errors import ConfigError
from spardl.schedules.fusion import Range
from spardl.schedules.linear import Linear
from spardl.schedules.measured import Measuring

__all__ = ["LayerFusion", "optimal"]

Table: TypeAlias = npt.NDArray[np.float64]


def optimal(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> list[Range]:
    """Of all partitions of the layers, the one with which the last synchronization ends first, by ``fusion.finish``.

    After LayerFusion in Dai et al.: Sketch-Fusion SGD (JPDC 185, 2024), which chooses groups of layers by measured
    times and without a hyper-parameter. Its equations were not at hand: this is our formulation of the objective that
    its abstract states, not a copy of its algorithm. With f[i] the earliest end of layers i and after,

        f[i] = min over j > i of max(f[j], ready[i:j]) + cost(entries[i:j]),    f[L] = 0,

    which is exact for any ready times and any cost, since an earlier end of the layers behind never hurts. It takes
    O(L^2) calls of ``cost``, time and memory. A second pass then takes the fewest groups that end as early: a group
    that gains nothing would still add a message. It takes O(L^2) for each group.

    Args:
        entries: of each layer, in flat order.
        ready: when the gradient of each layer is there, in seconds since the backward pass began.
        cost: seconds that compressing and synchronizing a group of so many entries takes, at least 0.

    Returns:
        The partition, in flat order: empty if there is no layer.

    Raises:
        ConfigError: if a time is not finite.
    """
    layers = len(entries)
    waits, costs = _tables(entries, ready, cost)
    earliest = np.zeros(layers + 1)
    for layer in reversed(range(layers)):
        after = slice(layer + 1, None)
        earliest[layer] = (np.maximum(earliest[after], waits[layer, after]) + costs[layer, after]).min()
    if not np.isfinite(earliest).all():
        raise ConfigError("layer_fusion: a ready time or a cost is not finite; measure the profile again")
    return _fewest(waits, costs, float(earliest[0]))


def _tables(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> tuple[Table, Table]:
    """At [i, j] when layers [i, j) are all there, and what they cost: infinite where i < j does not hold."""
    layers = len(entries)
    waits = np.full((layers + 1, layers + 1), np.inf)
    costs = waits.copy()
    for layer in range(layers):
        waits[layer, layer + 1 :] = np.maximum.accumulate(ready[layer:])
        costs[layer, layer + 1 :] = [cost(size) for size in accumulate(entries[layer:])]
    return waits, costs


def _fewest(waits: Table, costs: Table, goal: float) -> list[Range]:
    """The fewest groups with which the last synchronization ends at ``goal``, which must be within reach.

    Row g of the search is the earliest end of layers i and after in exactly g groups. Both passes round alike, so
    that the goal is met to the last bit.
    """
    layers = len(waits) - 1
    found = np.full(layers + 1, np.inf)
    found[layers] = 0.0
    nexts: list[npt.NDArray[np.intp]] = []
    while found[0] > goal:
        candidates = np.maximum(found, waits) + costs
        nexts.append(candidates.argmin(axis=1))
        found = candidates.min(axis=1)
    groups: list[Range] = []
    start = 0
    for best in reversed(nexts):
        stop = int(best[start])
        groups.append((start, stop))
        start = stop
    return groups


@dataclass(frozen=True)
class LayerFusion(Measuring):
    """Cuts the gradient where the last synchronization ends first, by what the first steps measure."""

    name = "layer_fusion"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """The best partition: see ``optimal``.

        Args:
            entries: of each layer, in flat order.
            ready: when the gradient of each layer is there, in seconds since the backward pass began.
            cost: seconds that the synchronization of so many entries takes.

        Returns:
            It, in flat order.

        Raises:
            ConfigError: if a time is not finite.
        """
        return optimal(entries, ready, cost)
