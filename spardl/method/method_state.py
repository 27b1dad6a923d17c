"""What one worker carries from one synchronization to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spardl.method.elastic import deal, owners, sources
from spardl.method.moments import Moments, Spread
from spardl.protocol.programs import Worker
from spardl.protocol.state import State, described
from spardl.vector.bounds import Bound
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Layout

__all__ = ["MethodState"]


@dataclass
class MethodState:
    """What one worker carries from step to step.

    Attributes:
        layout: the tensors in its gradient; not saved.
        memory: shape (n,): the residual between steps, the accumulated vector within one.
        moments: of its gradients, if the momentum is the worker's; of shape (n,) each.
        compression: the compressor's state.
        communication: the communicator's state.
        step: synchronizations so far, dense warm-up included.
        refused: steps so far in which a gradient was left out because it held a NaN or an infinity, or in which a sum
            of finite numbers was cut because it overflowed.
        refused_last: the last of these steps, counted from 1; 0 if there was none since the state was made. Not saved.
        overflowed: whether the last average was cut; the same on all workers.
        candidates: of the memory's largest entries; not saved, since no result depends on it.
        bound: of the memory's magnitudes; not saved.
    """

    layout: Layout
    memory: Tensor
    moments: Moments
    compression: State
    communication: State
    step: int = 0
    refused: int = 0
    refused_last: int = 0
    overflowed: bool = False
    candidates: Candidates = field(default_factory=Candidates)
    bound: Bound = field(default_factory=Bound)

    def refuse(self) -> None:
        """Counts this step, once, as one whose gradient was left out, or cut."""
        if self.refused_last != self.step + 1:
            self.refused += 1
            self.refused_last = self.step + 1

    def change(self, factor: float = 1.0, more: Tensor | None = None) -> None:
        """Changes what is carried over, between two steps.

        Args:
            factor: the factor that all that is in the units of gradients is multiplied by.
            more: what is added to the residual, shape (n,), finite.
        """
        if more is not None:
            self.memory.add_(more)
        if factor != 1:
            self.memory.mul_(factor)
            self.moments.velocity.mul_(factor)
            self.compression.rescale(factor)
            self.communication.rescale(factor)
        found = [self.bound.look(self.memory), self.moments.bound.look(self.moments.velocity)]
        if any(found):
            self.refuse()
        self.candidates = Candidates()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; residual and moments are shared, not copied."""
        more = {"variance": self.moments.variance, "updates": self.moments.updates}
        return {
            "memory": self.memory,
            "velocity": self.moments.velocity,
            **(more if self.moments.variance.numel() else {}),
            **({"spread": self.moments.spread.state_dict()} if self.moments.spread.common else {}),
            "compression": self.compression.state_dict(),
            "communication": self.communication.state_dict(),
            "step": self.step,
            "refused": self.refused,
        }

    def _vectors(self, values: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        """Residual and moments with what was saved of each, by name."""
        mine = {"residual": self.memory, "velocity": self.moments.velocity, "variance": self.moments.variance}
        return {
            name: (own, values.get("memory" if name == "residual" else name, own[:0])) for name, own in mine.items()
        }

    def check(self, values: Mapping[str, Any], *, finite: bool = False) -> None:
        """Accepts values that ``load_state_dict`` can continue from; changes nothing.

        Args:
            values: as saved.
            finite: whether the residual must be finite.

        Raises:
            KeyError: if something is missing.
            ValueError: if a value is of another kind, or a tensor has another length.
        """
        for name, (mine, saved) in self._vectors(values).items():
            if not isinstance(saved, Tensor) or not saved.is_floating_point() or saved.layout is not torch.strided:
                raise ValueError(f"{name} is {described(saved)}, expected {described(mine)}")
            if saved.shape != mine.shape:
                raise ValueError(f"{name} of {saved.numel()} entries, expected {mine.numel()}")
        if finite and not values["memory"].isfinite().all():
            raise ValueError("residual has a NaN or an infinity")
        counts = {"step": values["step"], "refused": values["refused"], "updates": values.get("updates", 0)}
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} is {described(count)}, expected a whole number, at least 0")
        spread = values.get("spread", {})
        if not isinstance(spread, Mapping) or not spread.keys() <= Spread().state_dict().keys():
            raise ValueError(f"spread is {described(spread)}, expected a dict of {', '.join(Spread().state_dict())}")
        for name, number in spread.items():
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                raise ValueError(f"spread.{name} is {described(number)}, expected a number, at least 0")
        for name, state in (("compression", self.compression), ("communication", self.communication)):
            state.check(values[name] if isinstance(values[name], Mapping) else {"": values[name]})

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from ``values``, as saved; residual and moments are copied in place.

        Raises:
            KeyError: as ``check``; nothing is changed then.
            ValueError: likewise.
        """
        self.check(values)
        for mine, saved in self._vectors(values).values():
            mine.copy_(saved)
        self.moments.updates = values.get("updates", 0)
        self.moments.spread, self.moments.sample = Spread(**values.get("spread", {})), None
        self.compression.load_state_dict(values["compression"])
        self.communication.load_state_dict(values["communication"])
        self.step = values["step"]
        self.refused = values["refused"]
        self._look_anew()

    def _look_anew(self) -> None:
        self.bound, self.moments.bound, self.refused_last = Bound(), Bound(), 0

    def adopt(self, parts: Sequence[Mapping[str, Any]], worker: Worker, before: int) -> None:
        """Continues from what another number of workers saved; compressor and communicator begin anew.

        Residuals keep their sum over all workers (see ``spardl.method.elastic``), velocities their mean. A variance, by
        which updates are divided, must not have the gaps that this leaves: it is that of one of the old workers.

        Args:
            parts: ``state_dict`` of those who have something for this worker, in the order of ``sources``.
            worker: whose state this is.
            before: how many workers there were.

        Raises:
            ValueError: if a residual or a velocity has another length.
        """
        deal([part["memory"] for part in parts], worker, before, self.memory)
        deal([part["velocity"] for part in parts], worker, before, self.moments.velocity)
        self.moments.velocity.mul_(worker.size / before)
        if self.moments.variance.numel():
            own = parts[sources(worker, before).index(worker.rank % before)]
            self.moments.variance.copy_(own["variance"])
            self.moments.updates = own["updates"]
        self.moments.spread, self.moments.sample = Spread(**parts[0].get("spread", {})).resized(worker.size), None
        self.step = parts[0]["step"]
        self._look_anew()
        self.refused = sum(
            part["refused"]
            for rank, part in zip(sources(worker, before), parts, strict=True)
            if owners(rank, before, worker.size)[0] == worker.rank
        )
