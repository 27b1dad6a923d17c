"""Model of the timeline of one training step under each schedule.

All workers are assumed equal, so one is modelled. It has two lanes (resources that work in parallel). The compute lane
runs the passes and the update. The network lane is the communication thread, which compresses and sends one group of
layers at a time, in the order of their release. A group is released (may be sent) once all its gradients are complete
and all groups of later layers are released, so the group of the last layers goes first. A span is an uninterrupted
piece of work on a lane.

A timeline covers one period, from the start of a backward pass to the start of the next. All periods are equal from the
first step on, because the forward pass waits for all messages, so that none is under way when the next backward pass
starts.
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
    "fused",
    "groups_by_size",
    "halves",
    "ideal",
    "ideal_halves",
    "in_backward",
    "in_halves",
    "overlapping_both",
    "whole",
]


# Seconds of a synchronization: rounds * alpha + bytes * beta + compression. Rounds and words are the published ones; a
# word has 4 bytes (float32) or, for entries with indices, the size in the wire format.


# A step after every warm-up that is a multiple of no period, so that it contains no periodic extra work.
ORDINARY_STEP = 1_000_003


class Work(NamedTuple):
    """Time that the communication thread needs for one group of layers.

    Attributes:
        compress: Time of compression before the first message, in seconds.
        latency: Time of the messages that does not depend on their sizes, in seconds.
        bandwidth: Time of the messages' bytes, in seconds.
    """

    compress: float
    latency: float
    bandwidth: float = 0.0

    @classmethod
    def of(cls, compress: float, rounds: float, nbytes: float, network: Network) -> Work:
        """Returns the times of successive messages in the alpha-beta model of a network.

        Args:
            compress: Time of compression before the first message, in seconds.
            rounds: Number of messages that follow one another.
            nbytes: Bytes of these messages together.
            network: Network that transfers the bytes.
        """
        return cls(compress, rounds * network.alpha, nbytes * network.beta)

    @property
    def transfer(self) -> float:
        """Time of the messages, in seconds."""
        return self.latency + self.bandwidth

    @property
    def seconds(self) -> float:
        """Time of compression and messages together, in seconds."""
        return self.compress + self.transfer


@dataclass(frozen=True)
class GroupCost:
    """Function that returns the times of compression and messages of a group of layers, given its number of entries.

    Args:
        formula: Function that returns rounds and words for a number of entries. If one of them is a lower and an upper
            bound, their mean is used.
        word: Function that returns the bytes per word for a number of entries.
        network: Network that transfers the words.
        compression: Function that returns the seconds of compression for a number of entries.
    """

    formula: Callable[[int], Cost]
    word: Callable[[int], float]
    network: Network
    compression: Callable[[int], float]

    def __call__(self, entries: int) -> Work:
        """Returns the times for a group of ``entries`` entries."""
        rounds, words = map(_mean, self.formula(entries))
        return Work.of(self.compression(entries), rounds, words * self.word(entries), self.network)

    def seconds(self, entries: int) -> float:
        """Returns the seconds of compression and messages together, for functions that form groups."""
        return self(entries).seconds

    @property
    def startup(self) -> float:
        """Fixed time per group in seconds, which merging two groups saves once: the time of a group of one entry."""
        return self.seconds(1)


def whole(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> GroupCost:
    """Returns the cost of a method's complete synchronization, without a pause between two halves.

    A group counts as one vector. A method that compresses matrices therefore has the cost of a dense sum, unless
    ``layout`` is given: then each entry has the average cost over all tensors of the model.

    Args:
        method: Method that averages the gradients.
        workers: Number of workers, P.
        network: Network that transfers the words.
        compression: Function that returns the seconds of compression for a number of entries, such as a ``Linear``.
        dtype: Dtype of the gradients.
        layout: Shapes of the model's tensors, if known.

    Raises:
        ConfigError: If the method does not support this number of workers.
    """
    method.communicator.check_workers(workers)
    if layout and method.compressor.by_matrix:
        return GroupCost(_average_cost(method, workers, layout), lambda entries: dtype.itemsize, network, compression)
    # Cached, because schedules that form groups evaluate the same sizes many times.
    formula = cache(lambda entries: method.published_cost(_context(workers, entries)))
    return GroupCost(formula, _word_bytes(method, workers, dtype), network, compression)


def halves(
    method: Method,
    workers: int,
    network: Network,
    compression: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
) -> tuple[GroupCost, GroupCost]:
    """Returns the costs of the two halves of a synchronization.

    The first half is the reduce-scatter, after which each worker holds the sum of its shard; the second half is the
    all-gather. The whole time of compression counts in the first half, in which entries are selected.

    Args:
        method: Method that averages the gradients.
        workers: Number of workers, P.
        network: Network that transfers the words.
        compression: Function that returns the seconds of compression for a number of entries.
        dtype: Dtype of the gradients.

    Raises:
        ConfigError: If the method cannot be split, or does not support this number of workers.
    """
    method.communicator.check_workers(workers)
    both = cache(lambda entries: method.half_costs(_context(workers, entries)))
    both(1)  # raises for a method that cannot be split
    word = _word_bytes(method, workers, dtype)
    first = GroupCost(lambda entries: both(entries)[0], word, network, compression)
    return first, GroupCost(lambda entries: both(entries)[1], word, network, lambda entries: 0.0)


def _average_cost(method: Method, workers: int, layout: Layout) -> Callable[[int], Cost]:
    """Returns the cost of a group with its share of the words of all matrices; rounds are those of any group."""
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
    """The two resources of a worker that work in parallel."""

    COMPUTE = "compute"
    NETWORK = "network"


class Kind(Enum):
    """The kinds of work in a training step."""

    BACKWARD = "backward"
    FORWARD = "forward"
    UPDATE = "update"
    COMPRESS = "compress"
    SEND = "send"
    GATHER = "second half"

    @property
    def lane(self) -> Lane:
        """Lane on which this kind of work runs."""
        return Lane.COMPUTE if self in (Kind.BACKWARD, Kind.FORWARD, Kind.UPDATE) else Lane.NETWORK


@dataclass(frozen=True)
class Span:
    """An uninterrupted piece of work on a lane.

    Attributes:
        kind: Kind of the work.
        label: Name of the layers for which the work is done; empty if it concerns all layers.
        start: Start in seconds from the start of the backward pass.
        stop: End in seconds from the start of the backward pass.
    """

    kind: Kind
    label: str
    start: float
    stop: float

    @property
    def lane(self) -> Lane:
        """Lane on which this work runs."""
        return self.kind.lane


@dataclass(frozen=True)
class Timeline:
    """One period of training: a backward pass, and everything up to the next one.

    Attributes:
        spans: All work of the period; the spans of one lane do not overlap.
        seconds: Length of the period in seconds: the time of a step.
    """

    spans: tuple[Span, ...]
    seconds: float

    def busy(self, lane: Lane) -> float:
        """Returns the seconds during which a lane works."""
        return sum(span.stop - span.start for span in self.spans if span.lane is lane)


@dataclass
class _Spans:
    """A lane to which work is appended.

    Attributes:
        free: Time at which all its work so far is done, in seconds.
    """

    spans: list[Span] = field(default_factory=list)
    free: float = 0.0

    def wait(self, until: float) -> None:
        self.free = max(self.free, until)

    def work(self, kind: Kind, label: str, seconds: float) -> None:
        start, self.free = self.free, self.free + seconds
        if self.free > start:  # spans of length 0 would only clutter pictures
            self.spans.append(Span(kind, label, start, self.free))


def after_backward(profile: Profile, cost: GroupWork) -> Timeline:
    """Returns the timeline for one group of all layers, which is sent after the backward pass.

    Args:
        profile: Layer times of the model.
        cost: Function that returns the times of a group, given its number of entries.
    """
    return _in_backward(profile, [(0, len(profile.layers))], [profile.backward], cost)


def in_backward(profile: Profile, groups: Sequence[Range], cost: GroupWork) -> Timeline:
    """Returns the timeline for groups that are sent during the backward pass, and one update after all (WFBP etc.).

    Args:
        profile: Layer times of the model.
        groups: Ranges of layers, in the order of registration, that cover the model.
        cost: Function that returns the times of a group, given its number of entries.

    Raises:
        ConfigError: If the groups do not cover the model.
    """
    return _in_backward(profile, groups, _ready(profile, groups), cost)


def in_halves(profile: Profile, groups: Sequence[Range], first: GroupWork, second: GroupWork) -> Timeline:
    """Returns the timeline for first halves in the backward pass and second halves in the next forward pass (DeAR).

    At the end of the backward pass, the second halves of all groups are queued in the order of registration. When the
    next forward pass first needs a layer of a group, it waits for the second half of the group, updates the group, and
    continues.

    Args:
        profile: Layer times of the model.
        groups: Ranges of layers, in the order of registration, that cover the model.
        first: Function that returns the times of a group's reduce-scatter, given its number of entries.
        second: Function that returns the times of a group's all-gather, given its number of entries.

    Raises:
        ConfigError: If the groups do not cover the model.
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
    # In the order of use, which may differ from the order of registration.
    for needed, number in sorted((_needed(profile, group), number) for number, group in enumerate(groups)):
        compute.work(Kind.FORWARD, "", needed - passed)
        passed = needed
        compute.wait(arrived[number])
        compute.work(Kind.UPDATE, _label(profile, groups[number]), profile.update * _entries(profile, groups[number]))
    compute.work(Kind.FORWARD, "", profile.forward - passed)
    return Timeline((*compute.spans, *network.spans), compute.free)


def ideal(profile: Profile, network: float) -> float:
    """Returns a lower bound of the seconds of a step whose communication overlaps the backward pass.

    Args:
        profile: Layer times of the model.
        network: Time of communication and compression of the whole model, in seconds.

    Source: Zhang et al., DeAR, ICDCS 2023: t_ff + max(t_bp, t_ar), to which the update is added.
    """
    return max(profile.backward, network) + _update(profile) + profile.forward


def ideal_halves(profile: Profile, first: float, second: float) -> float:
    """Returns a lower bound of the seconds of a step whose communication overlaps both passes (DeAR).

    Args:
        profile: Layer times of the model.
        first: Time of the first halves (reduce-scatter) of the whole model, in seconds; they overlap the backward pass.
        second: Time of the second halves (all-gather) of the whole model, in seconds; they overlap the forward pass.

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
    """Synchronizes groups from the last to the first, each as soon as it is ready."""
    for group, moment in zip(reversed(groups), reversed(ready), strict=True):
        network.wait(moment)
        _synchronize(network, profile, group, cost, Kind.SEND)


def _synchronize(network: _Spans, profile: Profile, group: Range, cost: GroupWork, kind: Kind) -> None:
    work = cost(_entries(profile, group))
    network.work(Kind.COMPRESS, _label(profile, group), work.compress)
    network.work(kind, _label(profile, group), work.transfer)


def _ready(profile: Profile, groups: Sequence[Range]) -> list[float]:
    """Checks that the groups cover the model; returns the seconds at which the gradients of each are complete."""
    borders = [0, *(stop for _, stop in groups)]
    fit = all(start == border < stop for (start, stop), border in zip(groups, borders, strict=False))
    if not fit or borders[-1] != len(profile.layers):
        raise ConfigError(
            f"groups must be consecutive ranges that cover all {len(profile.layers)} layers of {profile.model}, got "
            f"{list(groups)}"
        )
    # A group is sent once its last gradient is complete.
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


# The schedules by name: the groups that they form, and the time at which they send them.


ENTRIES_PER_MB = (1 << 20) // 4
BUCKET_MB = 25.0
# The start value of DeAR's tuning, and four sizes per doubling over its range.
SWEPT_MB = (BUCKET_MB, *(2 ** (step / 4) for step in range(33)))


@dataclass(frozen=True)
class MethodCosts:
    """Costs of a method on a network.

    Attributes:
        whole: Cost of a complete synchronization, without a pause between two halves.
        split: Costs of its two halves; ``None`` if the method cannot be split.
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
        """Returns the costs of a method for a number of workers.

        Args:
            method: Method that averages the gradients.
            workers: Number of workers, P.
            network: Network that transfers the words.
            compressing: Function that returns the seconds of compression for a number of entries.
            layout: Shapes of the model's tensors, if known.

        Raises:
            ConfigError: If the method does not support this number of workers.
        """
        # A method that cannot be split still supports the schedules without halves.
        try:
            split = halves(method, workers, network, compressing)
        except ConfigError:
            split = None
        return cls(whole(method, workers, network, compressing, layout=layout), split)

    def on(self, network: Network, compressing: Callable[[int], float]) -> MethodCosts:
        """Returns the costs of this method on another network or machine; reuses the computed rounds and words."""
        first = self.split and replace(self.split[0], network=network, compression=compressing)
        second = self.split and replace(self.split[1], network=network)
        split = (first, second) if first and second else None
        return MethodCosts(replace(self.whole, network=network, compression=compressing), split)


def groups_by_size(megabytes: float, profile: Profile, cost: GroupCost) -> list[Range]:
    """Returns groups of adjacent layers of limited size: a group is at most ``megabytes`` large or a single layer."""
    return by_size(profile.entries, megabytes * ENTRIES_PER_MB)


def merged(profile: Profile, cost: GroupCost) -> list[Range]:
    """Returns the groups of layers that the schedule MG-WFBP forms, as ranges of layers."""
    return merge(profile.entries, profile.ready, cost.seconds, cost.startup)


def fused(profile: Profile, cost: GroupCost) -> list[Range]:
    """Returns the groups of layers that the schedule LayerFusion forms, as ranges of layers."""
    return optimal(profile.entries, profile.ready, cost.seconds)


def one_synchronization(profile: Profile, costs: MethodCosts) -> Timeline:
    """Returns the timeline for one synchronization of the whole model after the backward pass."""
    return after_backward(profile, costs.whole)


def overlapping_backward(
    cut: Callable[[Profile, GroupCost], list[Range]], profile: Profile, costs: MethodCosts
) -> Timeline:
    """Returns the timeline for groups that are sent during the backward pass; the function ``cut`` forms the groups."""
    return in_backward(profile, cut(profile, costs.whole), costs.whole)


def overlapping_both(megabytes: float, profile: Profile, costs: MethodCosts) -> Timeline | None:
    """Returns the timeline for halves that overlap both passes (DeAR), in groups of at most ``megabytes``.

    Returns:
        The timeline, or ``None`` if the method cannot be split into halves.
    """
    if not costs.split:
        return None
    return in_halves(profile, groups_by_size(megabytes, profile, costs.whole), *costs.split)


def beside_both_tuned(profile: Profile, costs: MethodCosts) -> Timeline | None:
    """Returns the fastest timeline for halves that overlap both passes (DeAR), over several group sizes.

    Returns:
        The timeline, or ``None`` if the method cannot be split into halves.
    """
    found = [timeline for size in SWEPT_MB if (timeline := overlapping_both(size, profile, costs))]
    return min(found, key=lambda timeline: timeline.seconds, default=None)


Predict = Callable[[Profile, MethodCosts], Timeline | None]
SCHEDULES: Mapping[str, Predict] = MappingProxyType(
    {
        "after_backward": one_synchronization,
        "per_layer": partial(overlapping_backward, partial(groups_by_size, 0)),
        "wfbp": partial(overlapping_backward, partial(groups_by_size, BUCKET_MB)),
        "mg_wfbp": partial(overlapping_backward, merged),
        "layer_fusion": partial(overlapping_backward, fused),
        "dear_per_layer": partial(overlapping_both, 0),
        "dear": partial(overlapping_both, BUCKET_MB),
        "dear_tuned": beside_both_tuned,
    }
)
