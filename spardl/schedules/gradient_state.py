"""State of a worker that lasts from step to step: residuals, moments and used parameters, by group of layers.

A *group* is a range of neighboring layers that are synchronized together; a *local rank* is one of the workers that
this process runs. *Flat order* is the order of the layers in the flat gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spardl.method.method import Method, MethodState
from spardl.method.momentum import Matrix, Moments, Spread
from spardl.method.refusals import NonFiniteCounts
from spardl.protocol.programs import Worker, clone_data
from spardl.schedules.fusion import Range, within
from spardl.vector.flat import CopiedGradient, Storage
from spardl.vector.layout import Layout

__all__ = ["GradientState", "Group", "ResidualMonitor", "ResidualSize", "Snapshot", "Usage", "mean_size", "step_counts"]


# The size of residuals.


class ResidualSize(NamedTuple):
    """Size of a worker's residual, relative to the gradient (or local update) that one step adds to it.

    Attributes:
        norm: 2-norm of the residual / 2-norm of the addition (a factor).
        age: Sum of magnitudes in the residual / sum of magnitudes in the addition. By Little's law, this is the average
            number of steps before an entry is sent, if its sign does not change, and a lower bound if it does.
    """

    norm: float
    age: float


def mean_size(parts: Iterable[ResidualSize | None]) -> ResidualSize | None:
    """Returns the mean of the sizes in ``parts``; ``None`` if one of them is ``None``."""
    found = list(parts)
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return ResidualSize(*(sum(figures) / len(known) for figures in zip(*known, strict=True)))


class ResidualMonitor:
    """Stores the size of the last addition to each group's residual, and computes the relative size of the residual.

    Args:
        groups: Number of groups of the gradient.
    """

    def __init__(self, groups: int) -> None:
        self._added = [(0.0, 0.0)] * groups

    def note(self, number: int, added: Tensor, scale: float) -> None:
        """Records an addition to a residual.

        Args:
            number: Number of the group.
            added: Gradient or update that is added, shape (m,); ignored if it is non-finite.
            scale: Loss scale (factor) of the addition.
        """
        sizes = _sizes(added, scale)
        if all(0 < size < math.inf for size in sizes):
            self._added[number] = sizes

    def residual_size(self, memories: Sequence[Tensor], scale: float) -> ResidualSize | None:
        """Computes the size of the whole residual, relative to the stored additions; reads every entry.

        Args:
            memories: Residuals of all groups, of any shape.
            scale: Loss scale (factor) of the residuals.

        Returns:
            The size; ``None`` before the first addition.
        """
        norm, magnitudes = _together(self._added)
        if not norm:
            return None
        kept = _together([_sizes(memory, scale) for memory in memories])
        return ResidualSize(kept[0] / norm, kept[1] / magnitudes)


def _sizes(vector: Tensor, scale: float) -> tuple[float, float]:
    """Returns 2-norm and sum of magnitudes, both without the loss scale; zeros if ``vector`` is non-finite."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    norm, magnitudes = (float(torch.linalg.vector_norm(vector, order, dtype=wide)) / scale for order in (2, 1))
    return (norm, magnitudes) if math.isfinite(norm + magnitudes) else (0.0, 0.0)


def _together(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.hypot(*(norm for norm, _ in sizes)), sum(magnitudes for _, magnitudes in sizes)


# Usage of parameters.
#
# A parameter that no worker used has no gradient, and the optimizer must not change it: with a gradient of zeros,
# weight decay and momentum would. The exchange costs a message, so workers stop it after the first step in which every
# worker used all parameters.


class Usage:
    """Records which parameters the local ranks used in a step.

    Args:
        local: Number of local ranks.
        parameters: Number of parameters of the model.
        always: Whether workers exchange this record in every step; otherwise, they stop after the first step in which
            every worker used every parameter.
    """

    def __init__(self, local: int, parameters: int, *, always: bool = False) -> None:
        self._used = [bytearray(parameters) for _ in range(local)]
        self._watching, self._always = True, always

    def clear(self) -> None:
        """Clears the records at the end of a step."""
        for used in self._used:
            used[:] = bytes(len(used))

    def note(self, local: int, number: int) -> None:
        """Records that the local rank ``local`` used parameter ``number``."""
        self._used[local][number] = 1

    def left_out(self, local: int) -> list[int]:
        """Returns the numbers of the parameters that the local rank ``local`` did not use."""
        return [number for number, used in enumerate(self._used[local]) if not used]

    def rows(self) -> list[Tensor]:
        """Returns the record of each local rank, uint8, shape (parameters,); no records if no exchange is due."""
        return [torch.tensor(used, dtype=torch.uint8) for used in self._used] if self._watching else []

    def unused(self, gathered: Sequence[Tensor]) -> list[int]:
        """Returns the numbers of the parameters that no worker used.

        Args:
            gathered: Exchanged records of all ranks, shape (parameters,) each; empty if ``rows`` was empty.

        Returns:
            Numbers of the parameters; empty if no exchange was due.
        """
        if not gathered:
            return []
        table = torch.stack(list(gathered)).cpu()
        self._watching = self._always or not bool(table.all())
        return (table.amax(0) == 0).nonzero().squeeze(1).tolist()

    def state_dict(self) -> bool:
        """Returns whether the workers still exchange their records."""
        return self._watching

    def load_state_dict(self, value: bool) -> None:
        """Loads a ``value`` that ``state_dict`` returned; the setting ``always`` may have changed."""
        self._watching = self._always or value


@dataclass(frozen=True)
class Group:
    """Neighboring layers that are synchronized together.

    Attributes:
        layers: Numbers of its layers, as a range (first, stop).
        tensors: Numbers of its parameters, as a range (first, stop).
        entries: Positions of its entries in the flat gradient, as a range (first, stop).
        states: States of the method, one per local rank; residual and moments are views of those of the whole model.
    """

    layers: Range
    tensors: tuple[int, int]
    entries: tuple[int, int]
    states: list[MethodState]


class GradientState:
    """Residuals and moments of the whole model, and the states of its groups.

    Residuals and moments belong to the parameters: they stay when the groups change.

    Args:
        method: Method that owns the states.
        gradient: Storage of the model's gradients.
        ranks: Number of local ranks.
        partition: Ranges of layers that are synchronized together; a group also ends where the dtype or device of the
            gradients changes.
        matrices: Parameters of shape (a, b) that Muon updates.
        weights: Weights that the averages change, one tensor of each parameter's shape; empty if they change none.
        step_size: Function that returns, for a parameter, the learning rate with which averages are subtracted from the
            weights; ``None`` if they are subtracted as they are.

    Attributes:
        groups: Groups of layers in flat order.
        remembers: Whether the method keeps residuals.
        shares: Whether averages overwrite the gradients in place, because the method needs no residual.
        matrices: Parameters of shape (a, b) that Muon updates.
    """

    def __init__(
        self,
        method: Method,
        gradient: Storage,
        ranks: int,
        partition: Sequence[Range],
        matrices: Collection[nn.Parameter] = (),
        weights: Sequence[Tensor] = (),
        step_size: Callable[[nn.Parameter], float] | None = None,
    ) -> None:
        self._method, self._gradient, self.matrices, self._weights = method, gradient, matrices, weights
        self._step_size = step_size
        self.remembers = method.residual.remembers
        # Only the engine reads a copied gradient, and one rank needs only one copy.
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
        """Ranges of layers that are synchronized together."""
        return [group.layers for group in self.groups]

    @property
    def states(self) -> list[list[MethodState]]:
        """States of the method: a list per group, with one state per local rank."""
        return [group.states for group in self.groups]

    def regroup(self, partition: Sequence[Range]) -> None:
        """Divides the gradient into the groups of ``partition``; keeps residuals and moments."""
        before = self.groups
        found = list(within(self._gradient.runs, partition))
        if isinstance(self._gradient, CopiedGradient):
            self._gradient.split([self._entries(layers) for layers in found], self._all[self.shares :])
        self.groups = [self._group(layers) for layers in found]
        # Counts belong to the model, not to a group: collect them in the first group, which always exists.
        for local, first in enumerate(self.groups[0].states if before else ()):
            first.refused, first.refused_last = NonFiniteCounts.of(group.states[local] for group in before)
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
        for state in states:
            state.moments.matrices = _matrices_in(self._gradient, tensors, self.matrices)
            state.weights = self._weights[slice(*tensors)]
            if self._step_size is not None:
                state.step_sizes = partial(_step_sizes, self._step_size, self._gradient.parameters[slice(*tensors)])
        return Group(layers, tensors, entries, states)

    def _state(self, layout: Layout, local: int, entries: tuple[int, int]) -> MethodState:
        kept = (self._memories[local], self._velocities[local], self._variances[local])
        memory, velocity, variance = (self._gradient.cut(vectors, entries) for vectors in kept)
        return self._method.state_in(layout, memory, Moments(velocity, variance))

    def lend(self, number: int, vector: Tensor) -> None:
        """Sets the tensor in which the gradient of a group is averaged in place; call this only if ``shares``.

        Args:
            number: Number of the group.
            vector: Tensor to use until the next call, shape (m,).
        """
        self._gradient.vectors[number] = self.groups[number].states[0].memory = vector

    def continue_from(self, other: GradientState) -> None:
        """Copies the counts of steps and of skipped gradients from ``other``, whose method keeps no other state."""
        first = self.groups[0].states[0]
        first.refused, first.refused_last = other.refusals()[0]
        for group in self.groups:
            group.states[0].step = other.groups[0].states[0].step

    # --- residuals and moments

    def residuals(self, local: int = 0) -> list[Tensor]:
        """Returns the residuals of the local rank ``local``, shape (m,) each; empty if the method keeps none."""
        return self._memories[local] if self.remembers else []

    def local_tensors(self, local: int = 0) -> list[Tensor]:
        """Returns the residuals and moments of the local rank ``local``, shape (m,) each, if the method keeps them."""
        return [*self.residuals(local), *self._velocities[local], *self._variances[local]]

    def residual_sum(self, local: int = 0) -> float:
        """Returns the sum of all entries in the residual of the local rank ``local``."""
        return sum(float(memory.sum(dtype=torch.float64)) for memory in self._memories[local])

    def of(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns residual, velocity and variance of parameter ``number`` on the first local rank.

        Call ``changed`` after writing to them.

        Returns:
            Views of shape (entries,); empty for a vector that the method does not keep.
        """
        entries = self._gradient.layout.tensors[number]
        kept = (self._memories[0], self._velocities[0], self._variances[0])
        memory, velocity, variance = (self._gradient.cut(vectors, entries) for vectors in kept)
        return memory, velocity, variance

    @property
    def updates(self) -> int:
        """Number of gradients that the variance of the first local rank has averaged."""
        return self.groups[0].states[0].moments.updates

    def count_updates(self, number: int) -> None:
        """Sets the ``number`` of gradients that the variances have averaged."""
        for state in (each for states in self.states for each in states):
            state.moments.updates = number

    def changed(self) -> None:
        """Updates values that are derived from residuals and moments; call this after writing to one of them."""
        for state in (each for states in self.states for each in states):
            state.change()

    def reset(self) -> None:
        """Resets all states to their values before the first step."""
        for vector in (each for vectors in self._all for each in vectors):
            vector.zero_()
        # Without previous groups, ``regroup`` creates new states instead of transferring the counts.
        partition, self.groups = self.partition, []
        self.regroup(partition)

    # --- non-finite gradients

    def refused(self) -> int:
        """Returns the number of gradients (per group and local rank) that were skipped or clipped as non-finite."""
        return sum(state.refused for states in self.states for state in states)

    def refusals(self) -> list[NonFiniteCounts]:
        """Returns, for each local rank, the number of skipped or clipped gradients and the step of the last one."""
        return [NonFiniteCounts.of(states) for states in zip(*self.states, strict=True)]

    # --- saved states

    def state_dicts(self, local: int = 0) -> list[dict[str, Any]]:
        """Returns the states of the local rank ``local``, one per group, as plain data; tensors are not copied."""
        return [states[local].state_dict() for states in self.states]

    def like(self, layers: Range) -> MethodState:
        """Returns the first local rank's state of the group with these ``layers``.

        If no such group exists, returns a new state for it.
        """
        own = next((group for group in self.groups if group.layers == layers), None)
        if own is not None:
            return own.states[0]
        tensors = self._tensors(layers)
        first = self._gradient.parameters[tensors[0]]
        layout = Layout(self._gradient.layout.shapes[slice(*tensors)])
        made = self._method.init_state(layout, first.dtype, first.device)
        made.moments.matrices = _matrices_in(self._gradient, tensors, self.matrices)
        return made

    def load_state_dicts(self, local: int, values: Sequence[Mapping[str, Any]]) -> None:
        """Loads ``values`` that ``state_dicts`` returned for the same rank, into the local rank ``local``."""
        for states, saved in zip(self.states, values, strict=True):
            states[local].load_state_dict(saved)

    def adopt(self, local: int, worker: Worker, parts: Sequence[Sequence[Mapping[str, Any]]], before: int) -> None:
        """Loads states that another number of workers saved.

        Args:
            local: Local rank that loads the states.
            worker: Worker of the local rank.
            parts: Results of ``state_dicts`` on the old ranks ``spardl.method.elastic.sources(...)``, in that order.
            before: Number of workers that saved the states.
        """
        for states, *saved in zip(self.states, *parts, strict=True):
            states[local].adopt(saved, worker, before)


def step_counts(carried: GradientState) -> str:
    """Returns the numbers of finished synchronizations of the groups, as text: one number if all are equal."""
    return ", ".join(dict.fromkeys(str(states[0].step) for states in carried.states))


def _step_sizes(step_size: Callable[[nn.Parameter], float], parameters: Sequence[nn.Parameter]) -> list[float]:
    return [step_size(each) for each in parameters]


def _matrices_in(gradient: Storage, tensors: tuple[int, int], matrices: Collection[nn.Parameter]) -> tuple[Matrix, ...]:
    """Returns the positions of the ``matrices`` in the group with the parameters numbered ``tensors``."""
    # Schedules never split a parameter, so each group has all entries of its matrices.
    first = gradient.layout.tensors[tensors[0]][0]
    pairs = ((gradient.layout.tensors[number][0], gradient.parameters[number]) for number in range(*tensors))
    return tuple(Matrix(start - first, *each.shape) for start, each in pairs if each in matrices)


@dataclass(frozen=True)
class Snapshot:
    """Copy of the first local rank's residual, moments and states.

    Attributes:
        partition: Groups that the states belong to, as ranges of layers.
        groups: State of each group as plain data.
        factor: Loss scale (factor) of the gradients at the time of the copy.
    """

    partition: list[Range]
    groups: list[Any]
    factor: float

    @classmethod
    def of(cls, carried: GradientState, factor: float) -> Snapshot:
        """Copies ``carried``, whose gradients have the loss scale ``factor``."""
        return cls(carried.partition, clone_data(carried.state_dicts()), factor)

    def restore(self, carried: GradientState, factor: float) -> None:
        """Restores residual, moments and states, but keeps the count of skipped gradients.

        Args:
            carried: State to restore; nothing happens if its groups differ.
            factor: Current loss scale of the gradients.
        """
        if self.partition != carried.partition:
            return
        for states, saved in zip(carried.states, self.groups, strict=True):
            states[0].load_state_dict({**saved, "refused": states[0].refused})
            states[0].change(factor / self.factor)
