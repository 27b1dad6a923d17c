"""What workers carry from step to step, cut into the groups in which gradients are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.method.method import Method, MethodState
from spardl.method.momentum import Moments, Spread
from spardl.method.refusals import Refused
from spardl.protocol.programs import Worker, copied
from spardl.schedules.fusion import Range, within
from spardl.vector.flat import CopiedGradient, Storage
from spardl.vector.layout import Layout

__all__ = ["Carried", "Group", "Quality", "Snapshot", "Usage", "Waiting", "on_average"]


# How much waits in residuals, and how long: the price of compression, seen while training.


class Waiting(NamedTuple):
    """What a worker carries over, as multiples of what it added in a step: gradients, or updates.

    Attributes:
        norm: 2-norm over 2-norm.
        age: sum of magnitudes over sum of magnitudes: by Little's law, the steps that an entry waits in the mean, if
            its sign stays; less where it changes.
    """

    norm: float
    age: float


def on_average(parts: Iterable[Waiting | None]) -> Waiting | None:
    """The mean of several, all of equal weight; ``None`` if one is not known yet."""
    found = list(parts)
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return Waiting(*(sum(figures) / len(known) for figures in zip(*known, strict=True)))


class Quality:
    """Remembers how large what was added last was, by group.

    Args:
        groups: how many there are.
    """

    def __init__(self, groups: int) -> None:
        self._added = [(0.0, 0.0)] * groups

    def note(self, number: int, added: Tensor, scale: float) -> None:
        """Is told what was added to a residual.

        Args:
            number: of the group.
            added: shape (m,); one that is not finite is left out.
            scale: that it is multiplied by.
        """
        sizes = _sizes(added, scale)
        if all(0 < size < math.inf for size in sizes):
            self._added[number] = sizes

    def waiting(self, memories: Sequence[Tensor], scale: float) -> Waiting | None:
        """How much waits; reads all of it.

        Args:
            memories: residuals, of any shapes.
            scale: that they are multiplied by.

        Returns:
            ``None`` as long as nothing was added.
        """
        norm, magnitudes = _together(self._added)
        if not norm:
            return None
        kept = _together([_sizes(memory, scale) for memory in memories])
        return Waiting(kept[0] / norm, kept[1] / magnitudes)


def _sizes(vector: Tensor, scale: float) -> tuple[float, float]:
    """2-norm, and sum of magnitudes."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    norm, magnitudes = (float(torch.linalg.vector_norm(vector, order, dtype=wide)) / scale for order in (2, 1))
    return (norm, magnitudes) if math.isfinite(norm + magnitudes) else (0.0, 0.0)


def _together(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.hypot(*(norm for norm, _ in sizes)), sum(magnitudes for _, magnitudes in sizes)


# Which parameters some worker used in a step.
#
# A parameter that nobody used has no gradient, and the optimizer must leave it alone; zeros would still be decayed, or
# moved by their momentum. To find out costs a message, so it is done in the first step, and again only where some
# worker did not use all of them then.


class Usage:
    """Keeps count for some local ranks.

    Args:
        local: how many they are.
        parameters: of the model.
        always: whether it is asked in every step.
    """

    def __init__(self, local: int, parameters: int, *, always: bool = False) -> None:
        self._used = [bytearray(parameters) for _ in range(local)]
        self._watching, self._always = True, always

    def clear(self) -> None:
        """A step ends."""
        for used in self._used:
            used[:] = bytes(len(used))

    def note(self, local: int, number: int) -> None:
        """A local rank used a parameter."""
        self._used[local][number] = 1

    def left_out(self, local: int) -> list[int]:
        """The parameters that a local rank did not use."""
        return [number for number, used in enumerate(self._used[local]) if not used]

    def rows(self) -> list[Tensor]:
        """What all workers must exchange now: a row of shape (parameters,) per local rank; or nothing."""
        return [torch.tensor(used, dtype=torch.uint8) for used in self._used] if self._watching else []

    def unused(self, gathered: Sequence[Tensor]) -> list[int]:
        """The parameters that no worker used.

        Args:
            gathered: the rows of all ranks, shape (parameters,) each, if ``rows`` gave any.

        Returns:
            Their numbers.
        """
        if not gathered:
            return []
        table = torch.stack(list(gathered)).cpu()
        self._watching = self._always or not bool(table.all())
        return (table.amax(0) == 0).nonzero().squeeze(1).tolist()

    def state_dict(self) -> bool:
        """Whether rows are exchanged."""
        return self._watching

    def load_state_dict(self, value: bool) -> None:
        """Continues from what ``state_dict`` gave, of one that asks in every step or not."""
        self._watching = self._always or value


@dataclass(frozen=True)
class Group:
    """Neighbouring layers that are synchronized together.

    Attributes:
        layers: numbers of the first one and of the one after the last.
        tensors: likewise.
        entries: first position in flat order, and the position after the last.
        states: of the method, one per local rank; residual and moments are parts of those of the whole model.
    """

    layers: Range
    tensors: tuple[int, int]
    entries: tuple[int, int]
    states: list[MethodState]


class Carried:
    """Residuals and moments of the whole model, and the states of its groups.

    Residuals and moments belong to the parameters: where groups change, they stay.

    Args:
        method: whose states these are.
        gradient: of the model.
        ranks: how many local ranks there are.
        partition: layers that are synchronized together; groups end where type or place of the gradients change.

    Attributes:
        groups: in flat order.
        remembers: whether there are residuals.
        shares: whether a gradient is averaged where it is.
    """

    def __init__(self, method: Method, gradient: Storage, ranks: int, partition: Sequence[Range]) -> None:
        self._method, self._gradient = method, gradient
        self.remembers = method.residual.remembers
        # A copied gradient is nobody else's.
        self.shares = isinstance(gradient, CopiedGradient) and ranks == 1 and method.in_place
        memory = gradient.vectors if self.shares else None
        self._memories = [memory or [torch.zeros_like(each) for each in gradient.vectors] for _ in range(ranks)]
        made = [[method.momentum.init_moments(vector) for vector in gradient.vectors] for _ in range(ranks)]
        self._velocities = [[each.velocity for each in own] for own in made]
        self._variances = [[each.variance for each in own] for own in made]
        self.groups: list[Group] = []
        self.regroup(partition)

    # --- groups

    @property
    def partition(self) -> list[Range]:
        """Layers that are synchronized together."""
        return [group.layers for group in self.groups]

    @property
    def states(self) -> list[list[MethodState]]:
        """Of the method, by group and local rank."""
        return [group.states for group in self.groups]

    def regroup(self, partition: Sequence[Range]) -> None:
        """Cuts the gradient anew, into the groups of ``partition``."""
        before = self.groups
        found = list(within(self._gradient.runs, partition))
        if isinstance(self._gradient, CopiedGradient):
            self._gradient.split([self._entries(layers) for layers in found], self._all[self.shares :])
        self.groups = [self._group(layers) for layers in found]
        for local, first in enumerate(self.groups[0].states if before else ()):
            first.refused, first.refused_last = Refused.of(group.states[local] for group in before)
            spread = Spread.pooled(group.states[local].moments.spread for group in before)
            for group in self.groups:
                group.states[local].moments.spread = spread
                group.states[local].step = before[0].states[local].step
                group.states[local].moments.updates = before[0].states[local].moments.updates

    @property
    def _all(self) -> list[list[Tensor]]:
        return [*self._memories, *self._velocities, *self._variances]

    def _tensors(self, layers: Range) -> tuple[int, int]:
        return self._gradient.layers[layers[0]].tensors[0], self._gradient.layers[layers[1] - 1].tensors[1]

    def _entries(self, layers: Range) -> tuple[int, int]:
        first, stop = self._tensors(layers)
        return self._gradient.layout.tensors[first][0], self._gradient.layout.tensors[stop - 1][1]

    def _group(self, layers: Range) -> Group:
        tensors, entries = self._tensors(layers), self._entries(layers)
        layout = Layout(self._gradient.layout.shapes[slice(*tensors)])
        states = [self._state(layout, local, entries) for local in range(len(self._memories))]
        return Group(layers, tensors, entries, states)

    def _state(self, layout: Layout, local: int, entries: tuple[int, int]) -> MethodState:
        kept = (self._memories[local], self._velocities[local], self._variances[local])
        memory, velocity, variance = (self._gradient.cut(vectors, entries) for vectors in kept)
        return self._method.state_in(layout, memory, Moments(velocity, variance))

    def lend(self, number: int, vector: Tensor) -> None:
        """Lets the gradient of a group be averaged elsewhere, if ``shares``, until another place is lent.

        Args:
            number: of the group.
            vector: where, shape (m,).
        """
        self._gradient.vectors[number] = self.groups[number].states[0].memory = vector

    def succeed(self, other: Carried) -> None:
        """Goes on with the counts of ``other``, of the same parameters and of a method that carries nothing over."""
        first = self.groups[0].states[0]
        first.refused, first.refused_last = other.refusals()[0]
        for group in self.groups:
            group.states[0].step = other.groups[0].states[0].step

    # --- what is carried

    def residuals(self, local: int = 0) -> list[Tensor]:
        """The residual of the local rank ``local``, if the method has one: shape (m,) each."""
        return self._memories[local] if self.remembers else []

    def lasting(self, local: int = 0) -> list[Tensor]:
        """Residual and moments of the local rank ``local``, as far as the method has them: shape (m,) each."""
        return [*self.residuals(local), *self._velocities[local], *self._variances[local]]

    def residual_sum(self, local: int = 0) -> float:
        """The sum of all entries of the residual of the local rank ``local``."""
        return sum(float(memory.sum(dtype=torch.float64)) for memory in self._memories[local])

    def of(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Residual, velocity and variance of the first local rank for a parameter: views, shape (entries,), or empty.

        After they were changed, call ``changed``.
        """
        entries = self._gradient.layout.tensors[number]
        kept = (self._memories[0], self._velocities[0], self._variances[0])
        memory, velocity, variance = (self._gradient.cut(vectors, entries) for vectors in kept)
        return memory, velocity, variance

    @property
    def updates(self) -> int:
        """Gradients that are in the variance of the first local rank."""
        return self.groups[0].states[0].moments.updates

    def count_updates(self, number: int) -> None:
        """Is told that variances hold another ``number`` of gradients."""
        for state in (each for states in self.states for each in states):
            state.moments.updates = number

    def changed(self) -> None:
        """Is told that somebody changed what is carried."""
        for state in (each for states in self.states for each in states):
            state.change()

    def forget(self) -> None:
        """Begins as in the first step."""
        for vector in (each for vectors in self._all for each in vectors):
            vector.zero_()
        partition, self.groups = self.partition, []
        self.regroup(partition)

    # --- refusals

    def refused(self) -> int:
        """Gradients (of a group, by a local rank) that were left out because they were not finite, or cut."""
        return sum(state.refused for states in self.states for state in states)

    def refusals(self) -> list[Refused]:
        """The same for each local rank, and when the last one was."""
        return [Refused.of(states) for states in zip(*self.states, strict=True)]

    # --- saved states

    def state_dicts(self, local: int = 0) -> list[dict[str, Any]]:
        """What the local rank ``local`` carries, by group; plain data whose tensors are shared."""
        return [states[local].state_dict() for states in self.states]

    def like(self, layers: Range) -> MethodState:
        """A state of the first local rank for some layers: that of their group, or a fresh one."""
        own = next((group for group in self.groups if group.layers == layers), None)
        if own is not None:
            return own.states[0]
        tensors = self._tensors(layers)
        first = self._gradient.parameters[tensors[0]]
        layout = Layout(self._gradient.layout.shapes[slice(*tensors)])
        return self._method.init_state(layout, first.dtype, first.device)

    def load_state_dicts(self, local: int, values: Sequence[Mapping[str, Any]]) -> None:
        """Continues from ``values``, which ``state_dicts`` gave for the same rank, ``local``."""
        for states, saved in zip(self.states, values, strict=True):
            states[local].load_state_dict(saved)

    def adopt(self, local: int, worker: Worker, parts: Sequence[Sequence[Mapping[str, Any]]], before: int) -> None:
        """Continues from what another number of workers saved.

        Args:
            local: which rank.
            worker: who that is.
            parts: of the ranks in ``spardl.method.elastic.sources``, in that order: what ``state_dicts`` gave.
            before: how many workers there were.
        """
        for states, *saved in zip(self.states, *parts, strict=True):
            states[local].adopt(saved, worker, before)


@dataclass(frozen=True)
class Snapshot:
    """A copy of what the first local rank carries over.

    Attributes:
        partition: of the groups.
        groups: state of each, as plain data.
        factor: scale of the gradients.
    """

    partition: list[Range]
    groups: list[Any]
    factor: float

    @classmethod
    def of(cls, carried: Carried, factor: float) -> Snapshot:
        """A copy of ``carried``; ``factor``: scale of the gradients."""
        return cls(carried.partition, copied(carried.state_dicts()), factor)

    def restore(self, carried: Carried, factor: float) -> None:
        """Puts residual, moments and states back; refused gradients stay counted.

        Args:
            carried: of the same groups, else nothing is done.
            factor: scale of the gradients now.
        """
        if self.partition != carried.partition:
            return
        for states, saved in zip(carried.states, self.groups, strict=True):
            states[0].load_state_dict({**saved, "refused": states[0].refused})
            states[0].change(factor / self.factor)
