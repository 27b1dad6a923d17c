"""Synchronization after the backward pass, and wait-free backpropagation (WFBP) with buckets of a fixed size.

Sources: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters,
USENIX ATC 2017; Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020 (buckets;
section 3.2 describes the naive solution, ``AfterBackward``).

A *group* is a range of neighboring layers that are synchronized together; a *local rank* is one of the workers that
this process runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters.base import Cluster
from spardl.method.method import Method
from spardl.schedules.engine import Engine, Schedule, Training, check_saved
from spardl.schedules.fusion import by_megabytes
from spardl.schedules.step import StepPhase

__all__ = ["AfterBackward", "InBackward", "Wfbp", "check_megabytes"]


# One synchronization after the backward pass.


@dataclass(frozen=True)
class AfterBackward(Schedule):
    """Synchronizes the whole gradient as one flat vector after the backward pass."""

    name = "after_backward"

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine, with one group that contains all layers."""
        return _AtTheEnd(method, cluster, training, [(0, len(training.gradient.layers))])


class _AtTheEnd(Engine):
    def collect(self) -> None:
        """Adds the gradient of the local rank to its residual."""
        super().collect()
        self._averaging.clip_own(self._step.local)
        for number in range(len(self.gradient_state.groups)):
            self._averaging.hand_over(number, self._step.local)

    def finish(self) -> None:
        """Averages the gradient of all workers, and runs the optimizer."""
        for number, group in enumerate(self.gradient_state.groups):
            averages = self._cluster.run(self._averaging.programs(number))
            for own, average in zip(self._step.averages, averages, strict=True):
                own[number] = average
            self.kept += self._update.store(group, averages[0])
        self._update.step(self._averaging.gradients)
        self._step.end()


# Wait-free backpropagation.


class InBackward(Engine):
    """Engine that starts the synchronization of each group as soon as its gradients are complete, in a fixed order.

    The order is that of the backward pass. It is equal on all ranks, even if their gradients become complete in
    different orders. If each worker's own gradient is clipped, all groups wait for the last gradient, because the norm
    is unknown before.

    Attributes:
        pauses: Whether each synchronization pauses between its two halves.
    """

    pauses: ClassVar[bool] = False

    # --- steps

    def begin(self, local: int = 0) -> None:
        """Starts the passes of the local rank ``local``; the first one also creates the synchronizations."""
        super().begin(local)
        if local == 0:
            programs = [self._averaging.programs(number) for number in range(len(self.gradient_state.groups))]
            self._step.works = [self._cluster.enqueue(each, pauses=self.pauses) for each in programs]

    def awaits(self, number: int) -> bool:
        """Returns whether the gradient of parameter ``number`` is still missing in this step."""
        return self._step.awaits(number)

    def complete(self, number: int) -> None:
        """Records that the gradient of parameter ``number`` is complete, and starts all groups that waited for it.

        Raises:
            TrainingError: If the gradient was complete before in the same backward pass.
        """
        step = self._step
        if step.phase is not StepPhase.BACKWARD:
            return
        if not step.awaits(number):
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} was computed twice in one backward pass (as reentrant "
                "checkpointing does) and may already have been sent; use schedule=after_backward"
            )
        step.arrive(number)
        # The clipping factor of each part depends on the norm of the worker's whole gradient.
        if self.limit.before is not None:
            if not step.complete:
                return
            self._cluster.reach(step.local, range(len(self._gradient.layers)), backward=True)
            self._averaging.clip_own(step.local)
        while (ready := step.next_ready) is not None:
            self._cluster.reach(step.local, range(*self.gradient_state.groups[ready].layers), backward=True)
            self._send()

    def _send(self) -> None:
        number = self._step.unsent.pop()
        self._averaging.hand_over(number, self._step.local)
        self._step.works[number].release(self._step.local)

    def collect(self) -> None:
        """Starts the synchronizations of the remaining groups, in which some parameters have no gradient."""
        super().collect()
        # Nothing is clipped yet if a gradient is missing: ``complete`` waits for the last one.
        if self._step.unsent:
            self._averaging.clip_own(self._step.local)
        while self._step.unsent:
            self._send()

    def unused(self) -> list[int]:
        """Returns the numbers of the parameters without a gradient on any worker; the optimizer skips them, as in DDP.

        All workers must call this once in each step.
        """
        return self._update.unused()

    def finish(self) -> None:
        """Waits for the averages of all groups, and runs the optimizer."""
        step = self._step
        step.forget_averages()
        for number in step.order:
            for local, own in enumerate(step.averages):
                own[number] = step.works[number].wait(local)
            self.kept += self._update.store(self.gradient_state.groups[number], step.averages[0][number])
        self._update.step(self._averaging.gradients)
        step.end()

    def give_up(self) -> None:
        """Ends a step whose backward pass failed: waits for synchronizations in flight and discards the others."""
        for work in self._step.give_up():
            # Other workers may already run the second half, and need the messages of this one.
            if self.pauses:
                work.resume()
            work.wait(0)

    # --- state, as handles change it

    def return_unused(self) -> None:
        """Adds averages that the optimizer did not use, because of an overflow, to the residuals."""
        self._scaling.return_unused(self.gradient_state.states, remembers=self.gradient_state.remembers)

    def reset(self) -> None:
        """Resets the engine to its state before the first step."""
        self._scaling.reset()
        self.gradient_state.reset()
        self._use_groups()

    def continue_from(self, other: InBackward) -> None:
        """Takes over the counts and the loss scale of ``other``, an engine of the same model with other groups.

        Call this between two steps, and only if the method keeps no residual and no moments.
        """
        self.steps, self.kept = other.steps, other.kept
        self._usage.load_state_dict(other._usage.state_dict())
        self._scaling.load_state_dict(other._scaling.state_dict())
        self.gradient_state.continue_from(other.gradient_state)

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Checks that ``load_state_dict`` can load ``values``, without changing anything.

        Raises:
            ValueError: If a value has a wrong type or shape.
        """
        check_saved(values, self._gradient, self.gradient_state, self._scaling, self._trials, self.fixed)


def check_megabytes(name: str, value: object) -> None:
    """Checks that a setting is a size in megabytes (2^20 bytes); infinity is allowed.

    Args:
        name: Name of the setting, for the error message.
        value: Value of the setting, in megabytes.

    Raises:
        ConfigError: If the value is not a number that is at least 0.
    """
    if not is_number(float, value) or not (isinstance(value, int | float) and value >= 0) or math.isnan(value):
        raise ConfigError(f"{name} must be a number of megabytes, at least 0 (0: one group per layer), got {value!r}")


@dataclass(frozen=True)
class Wfbp(Schedule):
    """Sends gradients in buckets during the backward pass, from the last layer to the first.

    Args:
        bucket_mb: Largest size of a bucket in megabytes of gradients; layers are never split. 0 forms one bucket per
            layer.

    Raises:
        ConfigError: If the size is not a number that is at least 0.
    """

    bucket_mb: float = 25.0

    name = "wfbp"

    def __post_init__(self) -> None:
        check_megabytes("schedule.bucket_mb", self.bucket_mb)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine, with buckets that are filled from the last layer to the first."""
        return InBackward(method, cluster, training, by_megabytes(training.gradient, self.bucket_mb))
