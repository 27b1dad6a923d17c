"""Merged-gradient wait-free backpropagation: neighbouring layers share a start-up time where that pays.

Source: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and TPDS 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spardl.schedules.fusion import Range
from spardl.schedules.linear import Linear
from spardl.schedules.measured import Measuring

__all__ = ["MgWfbp", "merge"]


def merge(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float], startup: float) -> list[Range]:
    """Decides from the last layer to the first whether the group so far waits for the next layer.

    Algorithm 1 of Shi, Chu, Li: MG-WFBP (INFOCOM 2019, TPDS 2021). Let a group be begun, let ``begin`` be the time
    at which its synchronization could start (all its gradients are there, and the groups behind it have ended), and
    let ``next`` be the time at which the gradient of the layer before it is there. That layer joins the group if

    * ``next <= begin``: it is there before the group could be sent, so nobody waits for it; or
    * ``next - begin < startup``: waiting costs less than the start-up time that one message less saves.

    Otherwise the group is closed, and ends at ``begin + cost(its entries)``. The paper writes both as
    ``next < begin + startup``; they differ only if ``startup`` is 0, where layers that are there anyway still join.
    Its cost is ``startup + beta * bytes``; here it may be any function of the size. The rule sees one layer ahead, so
    the result is not always the best partition: see ``spardl.schedules.layer_fusion.optimal``.

    Args:
        entries: of each layer, in flat order.
        ready: when the gradient of each layer is there, in seconds since the backward pass began.
        cost: seconds that the synchronization of so many entries takes.
        startup: the part of it that does not depend on the size (alpha in the paper), in seconds.

    Returns:
        The partition, in flat order: empty if there is no layer.
    """
    if not entries:
        return []
    groups: list[Range] = []
    stop, begin = len(entries), max(0.0, ready[-1])
    for layer in reversed(range(len(entries) - 1)):
        if ready[layer] > begin and ready[layer] - begin >= startup:
            groups.append((layer + 1, stop))
            begin += cost(sum(entries[layer + 1 : stop]))
            stop = layer + 1
        begin = max(begin, ready[layer])
    return [(0, stop), *reversed(groups)]


@dataclass(frozen=True)
class MgWfbp(Measuring):
    """Merges layers by what the first steps measure, and sends them during the backward pass."""

    name = "mg_wfbp"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """The partition that merging leads to: see ``merge``.

        Args:
            entries: of each layer, in flat order.
            ready: when the gradient of each layer is there, in seconds since the backward pass began.
            cost: seconds that the synchronization of so many entries takes.

        Returns:
            It, in flat order.
        """
        return merge(entries, ready, cost, cost.fixed)
