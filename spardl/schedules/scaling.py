"""Gradient clipping, and GradScaler support: rescales residuals with the loss scale and skips non-finite steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from spardl.communicators.steps.transfer import all_gather
from spardl.method.method import MethodState
from spardl.protocol.programs import Program, Worker, describe, whole_team
from spardl.vector.norms import clip_factor, largest_magnitude, norm_of, sum_of_squares

__all__ = ["Limit", "Scale", "Scaling", "any_overflowed", "norm_in", "scale_of"]


# Gradient clipping.


class Limit:
    """Gradient clipping: limits the 2-norm of the average, or of each worker's own gradient before compression.

    Args:
        norm: Largest 2-norm, without the loss scale (a factor); ``None`` for no limit.
        first: Whether the limit applies to each worker's own gradient instead of the average.

    Attributes:
        measured: Norm of this worker's last gradient before clipping; ``None`` if none was measured.
        joined: Function that returns the norm of a worker's gradient from the norm of this process's part, if several
            processes (of FSDP) share a worker; ``None`` if the worker is a single process.
    """

    def __init__(self, norm: float | None, *, first: bool) -> None:
        self.before = norm if first else None
        self.after = None if first else norm
        self.measured: float | None = None
        self.joined: Callable[[float], float] | None = None

    def clip(self, vectors: Sequence[Tensor], length: int, scale: float) -> None:
        """Clips a worker's own gradient in place.

        Args:
            vectors: Gradients of the groups, shape (m,) each. Non-finite ones stay unchanged and do not count.
            length: Number of entries of all groups.
            scale: Loss scale (factor) of the gradient.
        """
        if self.before is None:
            return
        # A non-finite part is skipped later; its infinite norm must not scale the finite parts to zero here.
        finite = vectors
        if not math.isfinite(norm := norm_in(vectors, length) / scale):
            finite = [vector for vector in vectors if math.isfinite(largest_magnitude([vector]))]
            norm = norm_in(finite, length) / scale
        if self.joined is not None:
            norm = self.joined(norm)
        self.measured = norm
        if math.isfinite(norm) and (factor := clip_factor(norm, self.before)) != 1:
            for vector in finite:
                vector.mul_(factor)

    def factor(self, norm: Callable[[], float], scale: float) -> float | None:
        """Returns the factor that clips the average and removes its loss scale; ``None`` if neither is needed.

        Args:
            norm: Function that computes the norm of the average; called only if this norm is limited.
            scale: Loss scale (factor) of the average.
        """
        if self.after is None:
            return 1 / scale if scale != 1 else None
        return clip_factor(norm() / scale, self.after) / scale


def norm_in(vectors: Sequence[Tensor], length: int) -> float:
    """Returns the 2-norm of ``vectors``, of any shapes, with ``length`` entries in total.

    The result has the same bits for every division into vectors.
    """
    peak = largest_magnitude(vectors)
    return norm_of(sum_of_squares(vectors, peak, length), peak, length)


# Function that returns the current loss scale, the factor of losses and gradients.
Scale = Callable[[], float]


def scale_of(scaler: GradScaler | None) -> Scale | None:
    """Returns a function that reads the current loss scale of a GradScaler.

    Args:
        scaler: GradScaler of the training, if it has one.

    Returns:
        The function; ``None`` if there is no scaler, or it is disabled.
    """
    return scaler.get_scale if scaler and scaler.is_enabled() else None


def any_overflowed(worker: Worker, gradient: Tensor) -> Program[bool]:
    """Returns, on all workers, whether any worker's gradient is non-finite.

    This is a generator that requests the messages of one worker: one byte to every other worker.

    Args:
        worker: Worker that runs this generator.
        gradient: Gradient of this worker, shape (n,).
    """
    # Gather flags: compressors may remove a NaN, so the average cannot report it.
    fine = math.isfinite(largest_magnitude([gradient]))
    flag = torch.tensor([not fine], dtype=torch.uint8, device=gradient.device)
    ones = [1] * worker.size
    flags = yield from all_gather(whole_team(worker), flag, ones, ones)
    return any(bool(each) for each in flags)


class Scaling:
    """Adapts residuals to the loss scale of a GradScaler, and keeps the averages of steps that the optimizer skips.

    The optimizer skips a step if a gradient overflowed. In the next step, the kept averages return to the residuals.

    Args:
        scale: Function that returns the current loss scale; ``None`` if gradients are not scaled.

    Attributes:
        factor: Loss scale of the current step.
        overflowed: Numbers of the groups in which a worker's gradient or the sum overflowed; equal on all workers.
    """

    def __init__(self, scale: Scale | None) -> None:
        self._scale = scale
        self.factor = 1.0
        self.overflowed: set[int] = set()
        self._unused: list[Tensor | None] = []
        self.reset()

    def __bool__(self) -> bool:
        return self._scale is not None

    @property
    def changes_residuals(self) -> bool:
        """Whether ``settle`` is going to change the residuals, because of kept averages or a new loss scale."""
        return bool(self.overflowed) or self._current() != self.factor

    def reset(self) -> None:
        """Resets the object to its state before the first step."""
        self.factor = self._current()
        self.overflowed, self._unused = set(), []

    def _current(self) -> float:
        return self._scale() if self._scale else 1.0

    def keep_unused(self, averages: Sequence[Tensor]) -> None:
        """Ends a step; if a group overflowed, keeps the averages of all other groups, because the step is skipped.

        Args:
            averages: Averages by group, shape (m,) each.
        """
        # The residuals no longer contain these averages. A group that overflowed was never averaged.
        if self.overflowed:
            self._unused = [None if number in self.overflowed else each.clone() for number, each in enumerate(averages)]

    def settle(self, states: Sequence[Sequence[MethodState]], *, remembers: bool) -> None:
        """Begins a step: adds the kept averages to the residuals, and rescales the residuals to the current loss scale.

        Args:
            states: States of the method, by group and local rank.
            remembers: Whether the method has a residual.
        """
        self.return_unused(states, remembers=remembers)
        factor = self._current()
        if factor != self.factor:
            for state in (each for group in states for each in group):
                state.change(factor / self.factor)
        self.factor = factor
        # Even if the scale is unchanged: states that were just loaded or created do not have it.
        for state in (each for group in states for each in group):
            state.moments.scale = factor

    def return_unused(self, states: Sequence[Sequence[MethodState]], *, remembers: bool) -> None:
        """Adds the kept averages, which the optimizer did not use, to the residuals.

        Args:
            states: States of the method, by group and local rank.
            remembers: Whether the method has a residual.
        """
        # Each worker adds the average, so the residuals of all workers together regain the sum.
        if remembers:
            for group, average in zip(states, self._unused, strict=False):
                for state in group if average is not None else ():
                    state.change(more=average)
        self.overflowed, self._unused = set(), []

    def rescale_unused(self, factor: float) -> None:
        """Multiplies the kept averages by ``factor`` when a state of another number of workers is loaded."""
        self._unused = [None if each is None else each * factor for each in self._unused]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain data that shares no memory with the object."""
        return {"factor": self.factor, "skipped": [None if each is None else each.clone() for each in self._unused]}

    def check(self, values: Mapping[str, Any], lengths: Sequence[int]) -> None:
        """Checks that ``load_state_dict`` can load ``values``, without changing anything.

        Args:
            values: Saved state.
            lengths: Number of entries of each group.

        Raises:
            ValueError: If a value has another type or shape.
        """
        factor, skipped = values.get("factor", 1.0), values.get("skipped", ())
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(f"'factor' must be a finite number above 0, got {describe(factor)}")
        if not isinstance(skipped, list | tuple) or len(skipped) not in (0, len(lengths)):
            raise ValueError(f"'skipped' must be a list with one entry per group of layers, got {describe(skipped)}")
        for each, length in zip(skipped, lengths, strict=False):
            fits = isinstance(each, Tensor) and each.is_floating_point() and each.shape == (length,)
            if each is not None and not fits:
                raise ValueError(f"'skipped' must contain None or a tensor of {length} entries, got {describe(each)}")

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Loads ``values`` that ``state_dict`` returned; missing ones mean a loss scale of 1 and no kept averages."""
        self.factor = values.get("factor", 1.0)
        self._unused = [None if each is None else each.clone() for each in values.get("skipped", ())]
        # Groups without a saved average are those that overflowed.
        self.overflowed = {number for number, each in enumerate(self._unused) if each is None}
