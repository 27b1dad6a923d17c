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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.costs import Work
from spardl.schedules.fusion import Range

__all__ = [
    "Kind",
    "Lane",
    "Span",
    "Timeline",
    "after_backward",
    "ideal",
    "ideal_halves",
    "in_backward",
    "in_halves",
]

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
