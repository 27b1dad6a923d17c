"""Averages gradients in the background, in groups of parameters that never change: what the hooks have in common.

The groups are the library's own: neighbouring parameters, from the last to the first, as the backward pass completes
them. They do not follow the buckets of DDP, which change after the first step and with each new process; so a residual
belongs to its parameters, and a continued training is bit for bit the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from spardl.basics.errors import ConfigError, SpardlError
from spardl.clusters.process_group import ProcessGroupCluster
from spardl.communicators.steps.bruck import all_gather
from spardl.method.agreement import compare, facts_of, shapes_of
from spardl.method.method import Method
from spardl.method.provenance import check_owner, check_whole, owner_of
from spardl.method.refusals import Refusals, Refused, is_due
from spardl.protocol.programs import Program, whole_team
from spardl.protocol.state import copied
from spardl.schedules.parameter_groups import Group, Named, cut
from spardl.vector.candidates import Candidates
from spardl.vector.flat import write
from spardl.vector.norms import largest

__all__ = ["SAVED", "Averager", "Scale", "scale_of"]

# How many steps there are to one in which gradients are measured: so rarely that it costs nothing.
_MEASURED = 16
# What every saved state has, besides its owner.
SAVED: Mapping[str, Any] = MappingProxyType({"names": [], "groups": [], "skipped": [], "factor": 1.0})

T = TypeVar("T")
# The factor by which losses, and so gradients, are multiplied now.
Scale = Callable[[], float]


class Averager:
    """The gradients of some parameters and their averages over all workers.

    In each step, ``put`` every gradient once, in any order; ``wait``, or be told by ``done``; ``take`` the averages. In
    the first one, workers compare what they were given.

    Args:
        method: how to average.
        named: the parameters, those of the last layer last.
        cluster: the workers.
        bucket_mb: most megabytes (2^20 bytes) of gradients that are averaged together; a parameter is never cut.
        scale: of the gradients, where a GradScaler changes it. All workers then agree in each step whether somebody's
            gradient overflowed, at the price of one byte from each to each.
        done: told a group's number once it is averaged, in another thread.
        failed: told what went wrong, in any thread.
        given: what else all workers must be given the same, by name.

    Raises:
        ConfigError: if there are no parameters, or the method does not run on so many workers.
    """

    def __init__(
        self,
        method: Method,
        named: Sequence[Named],
        cluster: ProcessGroupCluster,
        bucket_mb: float = 25.0,
        scale: Scale | None = None,
        done: Callable[[int], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if not named:
            raise ConfigError("there are no parameters to average the gradients of")
        method.communicator.check_workers(cluster.size)
        self.method, self.names = method, [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._cluster, self._scale, self._done, self._failed = cluster, scale, done, failed
        self._worker = cluster.local_workers[0]
        self._owner = owner_of(method, self._worker.rank, self._worker.size)
        self._given = {**given, "bucket_mb": bucket_mb, "scaler": scale is not None}
        self._agreed = False
        self._refusals = Refusals(self._worker.size)
        self._groups = [Group(members, self.parameters, method) for members in cut(self.parameters, bucket_mb)]
        self._group_of = {number: place for place, group in enumerate(self._groups) for number in group.members}
        self._next = 0
        self._factor = scale() if scale else 1.0
        self._arrived = 0
        self.steps = 0

    def group_of(self, number: int) -> int:
        """The number of the group that a parameter is in."""
        return self._group_of[number]

    def members(self, place: int) -> Sequence[int]:
        """The parameters in a group."""
        return self._groups[place].members

    # --- a step

    def put(self, number: int, gradient: Tensor | None) -> None:
        """Takes over a parameter's gradient.

        Args:
            number: of the parameter.
            gradient: of its shape; ``None`` is one of zeros.

        Raises:
            SpardlError: if it was there already in this step.
            ConfigError: if it is a sparse tensor; on all workers, if they were not given the same.
            PeerError: if another worker is lost in the first step, or does not come to it in time.
        """
        group = self._groups[self._group_of[number]]
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(f"the gradient of {self.names[number]} is sparse; use sparse=False where it is made")
        if number not in group.awaited:
            raise SpardlError(
                f"a second gradient of {self.names[number]} came before the first was averaged; leave all backward "
                "passes of a step but the last to no_sync(), or, after one that failed, let all workers call wait()"
            )
        if self._arrived == 0:
            self._begin()
        self._arrived += 1
        part = group.part(number)
        if gradient is None:
            part.zero_()
        else:
            part.view(gradient.shape).copy_(gradient)
        group.awaited.discard(number)
        self._release()

    def missing(self) -> list[int]:
        """The parameters whose gradients are not there yet."""
        return [number for group in self._groups for number in group.members if number in group.awaited]

    def wait(self) -> None:
        """Waits until all groups are averaged; then the next step may begin.

        Raises:
            PeerError: if another worker is lost, or does not answer in time.
        """
        for group in self._groups:
            if group.flight is not None:
                group.flight.wait(0)
                group.flight = None
            group.awaited = set(group.members)
        self._next = self._arrived = 0
        self.steps += 1
        self._tell_refusals()

    def _tell_refusals(self) -> None:
        """The user at once, the other workers now and then."""
        own = Refused.of(group.state for group in self._groups)
        line = self._refusals.notice({self._worker.rank: own})
        if line:
            advice = "" if self._scale else ". A GradScaler learns of it only if it is given (scaler=scaler)"
            warnings.warn(f"spardl: {line}{advice}.", stacklevel=3)
        if is_due(self.steps) and self._worker.size > 1:
            row = torch.tensor([own.number], device=self._cluster.device)
            self._refusals.learn(self._housekeeping(self._gather_counts(row)))

    def _housekeeping(self, program: Program[T]) -> T:
        """Runs what is no part of training beside the groups, and waits for it."""
        flight = self._cluster.flight([program], counted=False)
        flight.release(0)
        return flight.wait(0)

    def _gather_counts(self, row: Tensor) -> Program[list[int]]:
        ones = [1] * self._worker.size
        gathered = yield from all_gather(whole_team(self._worker), row, ones, ones)
        return [int(each) for each in gathered]

    @property
    def begun(self) -> bool:
        """Whether gradients of a step have come that was not waited for."""
        return self._arrived > 0

    def take(self, number: int, into: Tensor) -> None:
        """Copies a parameter's average.

        Args:
            number: of the parameter.
            into: where to, a tensor of its shape.
        """
        into.copy_(self._groups[self._group_of[number]].part(number).view(into.shape))

    def _begin(self) -> None:
        """What must be done between steps, when nothing is under way."""
        if not self._agreed:
            self._housekeeping(compare(self._worker, self._facts(), self._cluster.device))
            self._agreed = True
        self._settle(self._scale() if self._scale else 1.0)

    def _settle(self, factor: float) -> None:
        """Gives back what a skipped step averaged, and lets residuals follow the scale, now ``factor``."""
        skipped = any(group.refused for group in self._groups)
        for group in self._groups:
            if skipped and not group.refused and self.method.residual.remembers:
                # Nobody used what was averaged. Each worker takes one share back, so all together everything.
                group.state.change(more=group.vector)
            if factor != self._factor:
                group.state.change(factor / self._factor)
            group.refused = False
        self._factor = factor

    def _facts(self) -> dict[str, str]:
        """What decides on the number and the sizes of messages."""
        steps = dict.fromkeys(str(group.state.step) for group in self._groups)
        facts = {**facts_of(self.method), **{name: str(value) for name, value in self._given.items()}}
        facts["step"] = ", ".join(steps)
        return {**facts, **shapes_of(self.names, self.parameters)}

    def _release(self) -> None:
        """Lets groups go in one order, which all workers share."""
        while self._next < len(self._groups) and not self._groups[self._next].awaited:
            place = self._next
            self._next += 1
            flight = self._cluster.flight([self._program(place)])
            self._groups[place].flight = flight
            flight.release(0)
            if self._failed:
                flight.failing(self._failed)

    def _program(self, place: int) -> Program[None]:
        group = self._groups[place]
        if self._scale and (yield from self._somebody_overflowed(group.vector)):
            group.refused = True
            group.vector.fill_(torch.inf)
        else:
            if self.steps % _MEASURED == 0:
                group.norm = self._norm(group.vector) or group.norm
            self.method.accumulate(group.vector, group.state)
            average = yield from self.method.average(self._worker, group.state)
            write(average, group.vector)
            if self._scale and group.state.overflowed:
                # What a scaler must see; the worker's share of the average comes back, at a lower scale.
                if self.method.residual.remembers:
                    group.state.change(more=group.vector)
                group.refused = True
                group.vector.fill_(torch.inf)
        if self._done:
            self._done(place)

    def _norm(self, vector: Tensor) -> float:
        """Without the scale; 0 if it is not finite."""
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.promote_types(vector.dtype, torch.float32)))
        return norm / self._factor if math.isfinite(norm) else 0.0

    def _somebody_overflowed(self, vector: Tensor) -> Program[bool]:
        fine = math.isfinite(largest([vector]))
        flag = torch.tensor([not fine], dtype=torch.uint8, device=vector.device)
        ones = [1] * self._cluster.size
        flags = yield from all_gather(whole_team(self._worker), flag, ones, ones)
        return any(bool(each) for each in flags)

    # --- what lasts

    @property
    def refused(self) -> int:
        """Gradients (of a group) that all workers left out, as they were not finite, or cut; see ``Refusals``."""
        return self._refusals.total

    def residual_ratio(self) -> float | None:
        """Norm of what is carried over, as a multiple of that of the gradient, if one was measured; reads it all."""
        gradient = math.hypot(*(group.norm for group in self._groups))
        if not gradient:
            return None
        remembers = self.method.residual.remembers
        return math.hypot(*(self._norm(group.state.memory) for group in self._groups if remembers)) / gradient

    def inherit(self, other: Averager) -> None:
        """Goes on with what another method carried over, where this one carries the same kind of thing.

        Args:
            other: of the same parameters, in other groups or not; nothing of it may be under way.
        """
        other._settle(other._factor)
        velocities = type(self.method.momentum) is type(other.method.momentum) and self.method.momentum.remembers
        both = self.method.residual.remembers and other.method.residual.remembers
        for number, name in enumerate(self.names):
            mine = self._groups[self._group_of[number]]
            place = other.names.index(name)
            theirs = other._groups[other._group_of[place]]
            here, there = slice(*mine.ranges[number]), slice(*theirs.ranges[place])
            if both:
                mine.state.memory[here] = theirs.state.memory[there] * (self._factor / other._factor)
            if velocities:
                mine.state.velocity[here] = theirs.state.velocity[there] * (self._factor / other._factor)
        for group in self._groups:
            group.state.change()

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step, as plain data that shares no memory with it."""
        return {
            "owner": dict(self._owner),
            "names": list(self.names),
            "groups": [copied(group.state.state_dict()) for group in self._groups],
            "skipped": self._skipped(),
            "factor": self._factor,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                other groups, or lacks something; nothing is changed then.
        """
        check_owner(values, self._owner, "groups")
        check_whole(values, SAVED)
        mine = [group.state.state_dict() for group in self._groups]
        check_whole(values["groups"], mine, "groups")
        if values["names"] != self.names or _sizes(values["groups"]) != _sizes(mine):
            raise ConfigError("this state is of other parameters, or of another bucket_mb; load it where it was saved")
        for place, (group, saved) in enumerate(zip(self._groups, values["groups"], strict=True)):
            group.state.load_state_dict(copied(saved))
            group.state.candidates = Candidates()
            group.refused = False
            if values["skipped"]:
                vector = values["skipped"][place]
                group.refused = vector is None
                if vector is not None:
                    group.vector.copy_(vector)
        self._factor = values["factor"]

    def forget(self) -> None:
        """Begins as in the first step."""
        for group in self._groups:
            group.forget(self.method)
        self._factor = self._scale() if self._scale else 1.0

    def _skipped(self) -> list[Tensor | None]:
        """After a step in which somebody's gradient overflowed: what was averaged nevertheless."""
        if not any(group.refused for group in self._groups):
            return []
        return [None if group.refused else group.vector.clone() for group in self._groups]


def scale_of(scaler: GradScaler | None) -> Scale | None:
    """What tells the scale of gradients.

    Args:
        scaler: that scales the loss, if there is one.

    Returns:
        Its scale at the time of the call; ``None`` if there is none, or it does nothing.
    """
    return scaler.get_scale if scaler and scaler.is_enabled() else None


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [getattr(group[name], "shape", None) for group in groups for name in ("memory", "velocity")]
