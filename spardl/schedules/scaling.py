"""Gradients that a GradScaler multiplies: residuals follow its scale, and a step with an overflow is nobody's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from spardl.communicators.steps.transfer import all_gather
from spardl.method.method import MethodState
from spardl.protocol.programs import Program, Worker, described, whole_team
from spardl.vector.norms import clip_factor, largest, norm_of, sum_of_squares

__all__ = ["Limit", "Scale", "Scaling", "norm_in", "scale_of", "somebody_overflowed"]


# The limit on a gradient's norm: of the average, or of each worker's own before anything remembers it.


class Limit:
    """What gradients are multiplied by, so that their norm is at most so much.

    Args:
        norm: the largest 2-norm; ``None`` for any.
        first: whether it is that of each worker's own gradient, rather than of the average.

    Attributes:
        measured: norm of this worker's last gradient before it was limited; ``None`` if none was measured.
    """

    def __init__(self, norm: float | None, *, first: bool) -> None:
        self.before = norm if first else None
        self.after = None if first else norm
        self.measured: float | None = None

    def shorten(self, vectors: Sequence[Tensor], length: int, scale: float) -> None:
        """Limits a worker's own gradient, in place.

        Args:
            vectors: that hold it, shape (m,) each; one with a NaN or an infinity stays as it is, and does not count.
            length: of all of them.
            scale: that it is multiplied by.
        """
        if self.before is None:
            return
        finite = vectors
        if not math.isfinite(norm := norm_in(vectors, length) / scale):
            finite = [vector for vector in vectors if math.isfinite(largest([vector]))]
            norm = norm_in(finite, length) / scale
        self.measured = norm
        if math.isfinite(norm) and (factor := clip_factor(norm, self.before)) != 1:
            for vector in finite:
                vector.mul_(factor)

    def factor(self, norm: Callable[[], float], scale: float) -> float | None:
        """What the average is multiplied by before it is used, if by anything.

        Args:
            norm: tells that of the average.
            scale: that it is multiplied by.
        """
        if self.after is None:
            return 1 / scale if scale != 1 else None
        return clip_factor(norm() / scale, self.after) / scale


def norm_in(vectors: Sequence[Tensor], length: int) -> float:
    """The 2-norm of what some ``vectors`` of any shapes hold together: ``length`` entries; the same for any cut."""
    peak = largest(vectors)
    return norm_of(sum_of_squares(vectors, peak, length), peak, length)


# The factor by which losses, and so gradients, are multiplied now.
Scale = Callable[[], float]


def scale_of(scaler: GradScaler | None) -> Scale | None:
    """What tells the scale of gradients.

    Args:
        scaler: that scales the loss, if there is one.

    Returns:
        Its scale at the time of the call; ``None`` if there is none, or it does nothing.
    """
    return scaler.get_scale if scaler and scaler.is_enabled() else None


def somebody_overflowed(worker: Worker, gradient: Tensor) -> Program[bool]:
    """The program by which all workers learn whether one of their gradients is not finite: a byte from each to each.

    Args:
        worker: who runs it.
        gradient: its own, shape (n,).
    """
    fine = math.isfinite(largest([gradient]))
    flag = torch.tensor([not fine], dtype=torch.uint8, device=gradient.device)
    ones = [1] * worker.size
    flags = yield from all_gather(whole_team(worker), flag, ones, ones)
    return any(bool(each) for each in flags)


class Scaling:
    """Follows a scale from step to step.

    Args:
        scale: of the gradients, if it changes.

    Attributes:
        factor: the scale of the step at hand.
        refused: numbers of the groups in which some worker's gradient overflowed, or the sum; the same on all workers.
    """

    def __init__(self, scale: Scale | None) -> None:
        self._scale = scale
        self.factor = 1.0
        self.refused: set[int] = set()
        self._unused: list[Tensor | None] = []
        self.begin_anew()

    def __bool__(self) -> bool:
        return self._scale is not None

    @property
    def moves(self) -> bool:
        """Whether the next step will change what is carried over."""
        return bool(self.refused) or self._now() != self.factor

    def begin_anew(self) -> None:
        """As in the first step."""
        self.factor = self._now()
        self.refused, self._unused = set(), []

    def _now(self) -> float:
        return self._scale() if self._scale else 1.0

    def keep(self, averages: Sequence[Tensor]) -> None:
        """Ends a step. If it overflowed, the optimizer skips it, and what was averaged was made in vain.

        Args:
            averages: by group, shape (m,) each.
        """
        if self.refused:
            self._unused = [None if number in self.refused else each.clone() for number, each in enumerate(averages)]

    def settle(self, states: Sequence[Sequence[MethodState]], *, remembers: bool) -> None:
        """Begins a step: residuals get back what the last one made in vain, and follow the scale.

        Args:
            states: of the method, by group and local rank.
            remembers: whether the method has a residual.
        """
        self.give_back(states, remembers=remembers)
        factor = self._now()
        if factor != self.factor:
            for state in (each for group in states for each in group):
                state.change(factor / self.factor)
        self.factor = factor
        for state in (each for group in states for each in group):
            state.moments.scale = factor

    def give_back(self, states: Sequence[Sequence[MethodState]], *, remembers: bool) -> None:
        """Each worker takes one share of what nobody used, so all together take everything; see ``settle``."""
        if remembers:
            for group, average in zip(states, self._unused, strict=False):
                for state in group if average is not None else ():
                    state.change(more=average)
        self.refused, self._unused = set(), []

    def share(self, factor: float) -> None:
        """The shares of what was made in vain become so many times as large: there are other workers to take them."""
        self._unused = [None if each is None else each * factor for each in self._unused]

    def state_dict(self) -> dict[str, Any]:
        """Plain data that shares no memory with it."""
        return {"factor": self.factor, "skipped": [None if each is None else each.clone() for each in self._unused]}

    def check(self, values: Mapping[str, Any], lengths: Sequence[int]) -> None:
        """Accepts values that ``load_state_dict`` can continue from; changes nothing.

        Args:
            values: as saved.
            lengths: entries of each group.

        Raises:
            ValueError: if a value is of another kind or shape.
        """
        factor, skipped = values.get("factor", 1.0), values.get("skipped", ())
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(f"factor is {described(factor)}, expected a number above 0")
        if not isinstance(skipped, list | tuple) or len(skipped) not in (0, len(lengths)):
            raise ValueError(f"skipped is {described(skipped)}, expected a list with an entry for each group")
        for each, length in zip(skipped, lengths, strict=False):
            fits = isinstance(each, Tensor) and each.is_floating_point() and each.shape == (length,)
            if each is not None and not fits:
                raise ValueError(f"skipped has {described(each)}, expected None or a tensor of {length} entries")

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave; or from what had no scale, and does not speak of one."""
        self.factor = values.get("factor", 1.0)
        self._unused = [None if each is None else each.clone() for each in values.get("skipped", ())]
        self.refused = {number for number, each in enumerate(self._unused) if each is None}
