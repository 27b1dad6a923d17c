"""Every schedule by name, as the timeline model predicts it: which groups it cuts, and when they are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from spardl.basics.errors import ConfigError
from spardl.clusters.network import Network
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.costs import GroupCost, halves, whole
from spardl.diagnostics.timeline.model import Timeline, after_backward, in_backward, in_halves
from spardl.method.method import Method
from spardl.schedules.fusion import Range, by_size
from spardl.schedules.layer_fusion import optimal
from spardl.schedules.mg_wfbp import merge
from spardl.vector.layout import Layout

__all__ = ["SCHEDULES", "MethodCosts", "Predict", "beside_both", "fused", "per_size"]

ENTRIES_PER_MB = (1 << 20) // 4
BUCKET_MB = 25.0
# Where DeAR's tuning starts, and four sizes for each doubling over the range that it tunes in.
SWEPT_MB = (BUCKET_MB, *(2 ** (step / 4) for step in range(33)))


@dataclass(frozen=True)
class MethodCosts:
    """What a method costs on a network.

    Attributes:
        whole: in one piece.
        split: in two halves; ``None`` if it cannot be split.
    """

    whole: GroupCost
    split: tuple[GroupCost, GroupCost] | None

    @classmethod
    def of(
        cls,
        method: Method,
        workers: int,
        network: Network,
        compressing: Callable[[int], float],
        layout: Layout | None = None,
    ) -> MethodCosts:
        """Of a method on so many workers.

        Args:
            method: how gradients are averaged.
            workers: P.
            network: what moves them.
            compressing: seconds to compress a number of entries.
            layout: the model's tensors, if they are known.

        Raises:
            ConfigError: if it does not run on them.
        """
        try:
            split = halves(method, workers, network, compressing)
        except ConfigError:
            split = None
        return cls(whole(method, workers, network, compressing, layout=layout), split)

    def on(self, network: Network, compressing: Callable[[int], float]) -> MethodCosts:
        """The same elsewhere; what was worked out about rounds and words is kept."""
        first = self.split and replace(self.split[0], network=network, compression=compressing)
        second = self.split and replace(self.split[1], network=network)
        split = (first, second) if first and second else None
        return MethodCosts(replace(self.whole, network=network, compression=compressing), split)


def per_size(megabytes: float, profile: Profile, cost: GroupCost) -> list[Range]:
    """Groups of a limited size."""
    return by_size(profile.entries, megabytes * ENTRIES_PER_MB)


def merged(profile: Profile, cost: GroupCost) -> list[Range]:
    """MG-WFBP's groups."""
    return merge(profile.entries, profile.ready, cost.seconds, cost.startup)


def fused(profile: Profile, cost: GroupCost) -> list[Range]:
    """LayerFusion's groups."""
    return optimal(profile.entries, profile.ready, cost.seconds)


def at_the_end(profile: Profile, costs: MethodCosts) -> Timeline:
    """One synchronization after the backward pass."""
    return after_backward(profile, costs.whole)


def beside_backward(cut: Callable[[Profile, GroupCost], list[Range]], profile: Profile, costs: MethodCosts) -> Timeline:
    """Groups beside the backward pass."""
    return in_backward(profile, cut(profile, costs.whole), costs.whole)


def beside_both(megabytes: float, profile: Profile, costs: MethodCosts) -> Timeline | None:
    """Halves beside both passes; ``None`` if the method has no halves."""
    if not costs.split:
        return None
    return in_halves(profile, per_size(megabytes, profile, costs.whole), *costs.split)


def beside_both_tuned(profile: Profile, costs: MethodCosts) -> Timeline | None:
    """The best of a sweep of sizes."""
    found = [timeline for size in SWEPT_MB if (timeline := beside_both(size, profile, costs))]
    return min(found, key=lambda timeline: timeline.seconds, default=None)


Predict = Callable[[Profile, MethodCosts], Timeline | None]
SCHEDULES: Mapping[str, Predict] = MappingProxyType(
    {
        "after_backward": at_the_end,
        "per_layer": partial(beside_backward, partial(per_size, 0)),
        "wfbp": partial(beside_backward, partial(per_size, BUCKET_MB)),
        "mg_wfbp": partial(beside_backward, merged),
        "layer_fusion": partial(beside_backward, fused),
        "dear_per_layer": partial(beside_both, 0),
        "dear": partial(beside_both, BUCKET_MB),
        "dear_tuned": beside_both_tuned,
    }
)
