"""The timeline of one training step under each kind of overlap.

One worker is looked at; all are alike. It has a compute lane, which runs the passes and the update, and a network lane,
the communication thread, which works off groups one at a time, in the order in which they were handed over; compressing
is done there, too. A group is handed over when all its gradients are there, and not before the group behind it: the
last one goes first.

A timeline shows one period, from the start of a backward pass to the start of the next. It is steady from the first
step on, as nothing is in flight where a backward pass starts: whatever was sent is waited for in the forward pass
before it, at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from spardl.basics.errors import ConfigError
from spardl.clusters.network import Network
from spardl.clusters.profile import Profile
from spardl.method.method import Method
from spardl.protocol.programs import Bounds, Context, Cost, Worker
from spardl.schedules.fusion import Range, by_size
from spardl.schedules.measured import merge, optimal
from spardl.vector.layout import Layout

__all__ = [
    "SCHEDULES",
    "GroupCost",
    "Kind",
    "Lane",
    "MethodCosts",
    "Predict",
    "Span",
    "Timeline",
    "Work",
    "after_backward",
    "beside_both",
    "fused",
    "halves",
    "ideal",
    "ideal_halves",
    "in_backward",
    "in_halves",
    "per_size",
    "whole",
]


# Seconds of a synchronization: the published rounds and words on an alpha-beta network, and what compressing takes.
#
# seconds = rounds * alpha + bytes * beta + compression, a word having 4 bytes (float32), or, where entries are sent
# with their indices, what the wire format makes of it.


# Past every warm-up, and a multiple of no period: nothing that is done every so many steps falls into it.
ORDINARY_STEP = 1_000_003


class Work(NamedTuple):
    """What the communication thread does for one group.

    Attributes:
        compress: seconds before the first message.
        transfer: seconds of messages.
    """

    compress: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.compress + self.transfer


@dataclass(frozen=True)
class GroupCost:
    """The work for a group of any size.

    Args:
        formula: rounds and words of a number of entries. Where only limits are known, their mean is taken.
        word: bytes of a word, for a number of entries.
        network: what moves them.
        compression: seconds to compress a number of entries.
    """

    formula: Callable[[int], Cost]
    word: Callable[[int], float]
    network: Network
    compression: Callable[[int], float]

    def __call__(self, entries: int) -> Work:
        """The work for one group of so many entries."""
        rounds, words = map(_mean, self.formula(entries))
        seconds = rounds * self.network.alpha + words * self.word(entries) * self.network.beta
        return Work(self.compression(entries), seconds)

    def seconds(self, entries: int) -> float:
        """Of compression and messages together, as the functions that cut models into groups ask for it."""
        return self(entries).seconds

    @property
    def startup(self) -> float:
        """Seconds of the smallest group: what joining two groups saves."""
        return self.seconds(1)


def whole(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> GroupCost:
    """A method's synchronization in one piece.

    A group is taken for one vector of unknown tensors. A method that compresses by matrix is taken for dense by that,
    unless the model's tensors are known: then each entry costs what it does on average over the model.

    Args:
        method: how gradients are averaged.
        workers: P.
        network: what moves them.
        compression: seconds to compress a number of entries, such as a ``Linear``.
        dtype: of the gradients.
        layout: the model's tensors, if they are known.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    if layout and method.compressor.by_matrix:
        return GroupCost(_on_average(method, workers, layout), lambda entries: dtype.itemsize, network, compression)
    formula = cache(lambda entries: method.published_cost(_context(workers, entries)))
    return GroupCost(formula, _word_bytes(method, workers, dtype), network, compression)


def halves(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
) -> tuple[GroupCost, GroupCost]:
    """A method's synchronization in two: up to each worker's reduced shard, and the rest.

    All compression counts with the first, in which entries are selected.

    Args:
        method: how gradients are averaged.
        workers: P.
        network: what moves them.
        compression: seconds to compress a number of entries.
        dtype: of the gradients.

    Raises:
        ConfigError: if the method cannot be split, or does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    both = cache(lambda entries: method.half_costs(_context(workers, entries)))
    both(1)
    word = _word_bytes(method, workers, dtype)
    first = GroupCost(lambda entries: both(entries)[0], word, network, compression)
    return first, GroupCost(lambda entries: both(entries)[1], word, network, lambda entries: 0.0)


def _on_average(method: Method, workers: int, layout: Layout) -> Callable[[int], Cost]:
    """Words of a group as if it had its share of all matrices of the model; the rounds are those of any group."""
    model = method.published_cost(Context(Worker(0, workers), layout, ORDINARY_STEP))

    def formula(entries: int) -> Cost:
        low, high = (round(words * entries / layout.length) for words in model.words)
        return Cost(model.rounds, Bounds(low, high))

    return cache(formula)


def _word_bytes(method: Method, workers: int, dtype: torch.dtype) -> Callable[[int], float]:
    return cache(lambda entries: method.word_bytes(_context(workers, entries), dtype))


def _context(workers: int, entries: int) -> Context:
    return Context(Worker(0, workers), Layout.flat(entries), ORDINARY_STEP)


def _mean(bounds: Bounds) -> float:
    return (bounds.low + bounds.high) / 2


GroupWork: TypeAlias = Callable[[int], Work]


class Lane(Enum):
    """What works."""

    COMPUTE = "compute"
    NETWORK = "network"


class Kind(Enum):
    """What it works at."""

    BACKWARD = "backward"
    FORWARD = "forward"
    UPDATE = "update"
    COMPRESS = "compress"
    SEND = "send"
    GATHER = "second half"

    @property
    def lane(self) -> Lane:
        """Where it is done."""
        return Lane.COMPUTE if self in (Kind.BACKWARD, Kind.FORWARD, Kind.UPDATE) else Lane.NETWORK


@dataclass(frozen=True)
class Span:
    """An uninterrupted piece of work.

    Attributes:
        kind: what is done.
        label: for which layers.
        start: seconds from the start of the backward pass.
        stop: likewise.
    """

    kind: Kind
    label: str
    start: float
    stop: float

    @property
    def lane(self) -> Lane:
        """Where it is done."""
        return self.kind.lane


@dataclass(frozen=True)
class Timeline:
    """One period of training.

    Attributes:
        spans: what is done when; those of a lane do not overlap.
        seconds: the period: an iteration's time.
    """

    spans: tuple[Span, ...]
    seconds: float

    def busy(self, lane: Lane) -> float:
        """Seconds that a lane works."""
        return sum(span.stop - span.start for span in self.spans if span.lane is lane)


@dataclass
class _Spans:
    """One lane under construction.

    Attributes:
        free: when it is done with all it was given so far.
    """

    spans: list[Span] = field(default_factory=list)
    free: float = 0.0

    def wait(self, until: float) -> None:
        self.free = max(self.free, until)

    def work(self, kind: Kind, label: str, seconds: float) -> None:
        start, self.free = self.free, self.free + seconds
        if self.free > start:
            self.spans.append(Span(kind, label, start, self.free))


def after_backward(profile: Profile, cost: GroupWork) -> Timeline:
    """All in one group, handed over when the backward pass is over.

    Args:
        profile: of the model.
        cost: work for so many entries.
    """
    return _in_backward(profile, [(0, len(profile.layers))], [profile.backward], cost)


def in_backward(profile: Profile, groups: Sequence[Range], cost: GroupWork) -> Timeline:
    """Groups are synchronized while the backward pass goes on; all are updated after the last (WFBP and its kin).

    Args:
        profile: of the model.
        groups: ranges of layers, in flat order, that cover the model.
        cost: work for a group of so many entries.

    Raises:
        ConfigError: if the groups do not cover the model.
    """
    return _in_backward(profile, groups, _ready(profile, groups), cost)


def in_halves(profile: Profile, groups: Sequence[Range], first: GroupWork, second: GroupWork) -> Timeline:
    """The first halves run in the backward pass, the second ones in the next forward pass (DeAR).

    When the backward pass is over, the second halves are queued in flat order. The next forward pass goes on until it
    needs a layer of a group whose second half has not ended, waits for that, updates the group, and goes on.

    Args:
        profile: of the model.
        groups: ranges of layers, in flat order, that cover the model.
        first: work for the half of a group that ends with reduced shards.
        second: work for the other half.

    Raises:
        ConfigError: if the groups do not cover the model.
    """
    compute, network = _Spans(), _Spans()
    compute.work(Kind.BACKWARD, "", profile.backward)
    _send(network, profile, groups, _ready(profile, groups), first)
    network.wait(profile.backward)
    arrived = []
    for group in groups:
        _synchronize(network, profile, group, second, Kind.GATHER)
        arrived.append(network.free)
    passed = 0.0
    for needed, number in sorted((_needed(profile, group), number) for number, group in enumerate(groups)):
        compute.work(Kind.FORWARD, "", needed - passed)
        passed = needed
        compute.wait(arrived[number])
        compute.work(Kind.UPDATE, _label(profile, groups[number]), profile.update * _entries(profile, groups[number]))
    compute.work(Kind.FORWARD, "", profile.forward - passed)
    return Timeline((*compute.spans, *network.spans), compute.free)


def ideal(profile: Profile, network: float) -> float:
    """Seconds of an iteration that overlaps communication perfectly with the backward pass, without start-ups.

    Args:
        profile: of the model.
        network: seconds of communication and compression.

    Source: Zhang et al., DeAR, ICDCS 2023: t_ff + max(t_bp, t_ar), to which the update is added.
    """
    return max(profile.backward, network) + _update(profile) + profile.forward


def ideal_halves(profile: Profile, first: float, second: float) -> float:
    """Seconds of an iteration that overlaps perfectly with both passes, without start-ups.

    Args:
        profile: of the model.
        first: seconds of the halves in the backward pass.
        second: seconds of those in the forward pass.

    Source: Zhang et al., DeAR, ICDCS 2023: max(t_bp, t_rs) + max(t_ff, t_ag), the update counted with the forward pass.
    """
    return max(profile.backward, first) + max(profile.forward + _update(profile), second)


def _in_backward(profile: Profile, groups: Sequence[Range], ready: Sequence[float], cost: GroupWork) -> Timeline:
    compute, network = _Spans(), _Spans()
    compute.work(Kind.BACKWARD, "", profile.backward)
    _send(network, profile, groups, ready, cost)
    compute.wait(network.free)
    compute.work(Kind.UPDATE, "", _update(profile))
    compute.work(Kind.FORWARD, "", profile.forward)
    return Timeline((*compute.spans, *network.spans), compute.free)


def _send(network: _Spans, profile: Profile, groups: Sequence[Range], ready: Sequence[float], cost: GroupWork) -> None:
    """Synchronizes groups from the last to the first, each when it is ready."""
    for group, moment in zip(reversed(groups), reversed(ready), strict=True):
        network.wait(moment)
        _synchronize(network, profile, group, cost, Kind.SEND)


def _synchronize(network: _Spans, profile: Profile, group: Range, cost: GroupWork, kind: Kind) -> None:
    work = cost(_entries(profile, group))
    network.work(Kind.COMPRESS, _label(profile, group), work.compress)
    network.work(kind, _label(profile, group), work.transfer)


def _ready(profile: Profile, groups: Sequence[Range]) -> list[float]:
    """When all gradients of each group are there, once the groups are known to cover the model."""
    borders = [0, *(stop for _, stop in groups)]
    fit = all(start == border < stop for (start, stop), border in zip(groups, borders, strict=False))
    if not fit or borders[-1] != len(profile.layers):
        raise ConfigError(
            f"groups must be ranges of layers, in order, that cover all {len(profile.layers)} layers of "
            f"{profile.model}, got {list(groups)}"
        )
    return [max(profile.ready[start:stop]) for start, stop in groups]


def _needed(profile: Profile, group: Range) -> float:
    return min(layer.needed for layer in profile.layers[slice(*group)])


def _entries(profile: Profile, group: Range) -> int:
    return sum(profile.entries[slice(*group)])


def _update(profile: Profile) -> float:
    return profile.update * sum(profile.entries)


def _label(profile: Profile, group: Range) -> str:
    first, last = profile.layers[group[0]].name, profile.layers[group[1] - 1].name
    return first if first == last else f"{first} .. {last}"


# Every schedule by name, as the timeline model predicts it: which groups it cuts, and when they are sent.


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
