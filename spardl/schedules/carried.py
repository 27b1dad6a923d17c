"""What workers carry from step to step, cut into the groups in which gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spardl.method.method import Method
from spardl.method.method_state import MethodState
from spardl.method.moments import Moments, Spread
from spardl.method.refusals import Refused
from spardl.protocol.programs import Worker
from spardl.protocol.state import copied
from spardl.schedules.fusion import Range
from spardl.schedules.partition import within
from spardl.vector.layout import Layout
from spardl.vector.storage import CopiedGradient, Storage

__all__ = ["Carried", "Group", "Snapshot"]


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
