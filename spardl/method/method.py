"""A method is a compressor, a communicator and a residual that fit together.

gradient -> (momentum) -> accumulate -> compress -> communicate -> feed back
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spardl.basics.checks import check_kind
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor, DenseCompressor, Mass, SparseCompressor
from spardl.method import registry
from spardl.method.elastic import deal, owners, sources
from spardl.method.momentum import Moments, Momentum, OptimizerMomentum, Spread
from spardl.method.registry import why_not
from spardl.method.residuals import Residual
from spardl.method.warmup import Warmup
from spardl.protocol.programs import Boundary, Context, Cost, Phase, Program, State, Step, Worker, described
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Layout
from spardl.vector.norms import Bound, clip_overflow, divide, largest
from spardl.vector.packing import NIBBLE, Slot, message_words
from spardl.vector.sparse import SparseVector, Sum, within
from spardl.vector.wire import EXACT, Wire

__all__ = ["Method", "MethodState"]


# What one worker carries from one synchronization to the next.


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


_KINDS: Mapping[str, type] = MappingProxyType(
    {
        "compressor": Compressor,
        "communicator": Communicator,
        "residual": Residual,
        "momentum": Momentum,
        "warmup": Warmup,
        "wire": Wire,
    }
)


@dataclass(frozen=True)
class Method:
    """One way to turn P gradients into their average.

    Args:
        compressor: what one worker sends.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed: gradients, or their momentum.
        warmup: how many steps are dense at first.
        wire: how the values of sparse messages travel.

    Raises:
        ConfigError: if a part is something else, or they do not fit; the message names those that do.

    Example:
        >>> from spardl.communicators import SparDL
        >>> from spardl.compressors import TopK
        >>> from spardl.method import GlobalResidual
        >>> from spardl.protocol.programs import Context, Worker
        >>> from spardl.vector.layout import Layout
        >>> sparse = spardl.Method(TopK(density=0.01), SparDL(teams=2), GlobalResidual())
        >>> for method in (sparse, spardl.make_method("none")):
        ...     rounds, words = method.cost(Context(Worker(rank=0, size=8), Layout.flat(1_000_000), step=0))
        ...     print(f"{rounds.high} rounds, at most {words.high} words")
        5 rounds, at most 35000 words
        14 rounds, at most 1750000 words
    """

    compressor: Compressor
    communicator: Communicator[Any]
    residual: Residual
    momentum: Momentum = OptimizerMomentum()  # noqa: RUF009 - immutable
    warmup: Warmup = Warmup()  # noqa: RUF009 - immutable
    wire: Wire = EXACT

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            check_kind(name, getattr(self, name), kind)
        reason = why_not(type(self.compressor), type(self.communicator), type(self.residual), type(self.momentum))
        if reason:
            raise ConfigError(reason)
        if self.wire != EXACT and not isinstance(self.compressor, SparseCompressor):
            raise ConfigError(
                f"wire.values={self.wire.values} is for messages of single entries, and compressor="
                f"{self.compressor.name} makes {self.compressor.output.value}; use wire.values={EXACT.values}"
            )
        if self.wire.coarse and not self.communicator.sends_whole:
            raise ConfigError(
                f"wire.values={self.wire.values} is for communicators that send whole what they round, and "
                f"communicator={self.communicator.name} cuts it up; use wire.values=bfloat16, or communicator=spardl"
            )

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu") -> MethodState:
        """A fresh state of one worker, zeros, for gradients of this ``layout``, ``dtype`` and ``device``."""
        memory = torch.zeros(layout.length, dtype=dtype, device=device)
        state = self.state_in(layout, memory, self.momentum.init_moments(memory))
        state.bound.value = state.moments.bound.value = 0.0
        return state

    def state_in(self, layout: Layout, memory: Tensor, moments: Moments) -> MethodState:
        """A fresh state whose residual and moments are given: parts of longer vectors, that outlive it.

        Args:
            layout: of the gradients.
            memory: residual, shape (n,).
            moments: of the worker's gradients, as ``momentum.init_moments`` makes them.

        Returns:
            The state; it shares their memory.
        """
        return MethodState(
            layout=layout,
            memory=memory,
            moments=moments,
            compression=self.compressor.init_state(layout, memory.dtype, memory.device),
            communication=self.communicator.init_state(),
        )

    def cost(self, context: Context) -> Cost:
        """Rounds and words of one synchronization, ``context``, after the dense warm-up: the limits for any worker."""
        cost = self.communicator.cost(context, self.compressor)
        step = context.step + self.warmup.steps
        more = self.momentum.measure_cost(context.worker, context.layout.length, step)
        return cost if more is None else Cost.total([cost, more])

    def published_cost(self, context: Context) -> Cost:
        """The same of ``context`` by the published formula, which may hold for the mean over all workers only."""
        return self.communicator.published_cost(context, self.compressor)

    def word_bytes(self, context: Context, dtype: torch.dtype = torch.float32) -> float:
        """Bytes of a word on the wire in ``context``, of gradients of type ``dtype``.

        Indices are coded, and take less than values.
        """
        if isinstance(self.compressor, DenseCompressor):
            return float(self.compressor.summed_as(dtype).itemsize)
        if not isinstance(self.compressor, SparseCompressor):
            return float(dtype.itemsize)
        length, count = context.layout.length, self.compressor.count(context)
        form = self.wire.form(dtype, self.compressor.index_step)
        return form.size(Slot(count, length)) / message_words(Slot(count, length))

    def half_costs(self, context: Context) -> tuple[Cost, Cost]:
        """The published cost of ``context`` up to the boundary in the middle of a synchronization, and after it.

        Raises:
            ConfigError: if there is none.
        """
        self.check_split()
        return self.communicator.half_costs(context, self.compressor)

    def check_split(self) -> None:
        """Accepts methods that may rest in the middle of a synchronization.

        Raises:
            ConfigError: if this one may not; the message names what would.
        """
        several = isinstance(self.compressor, DenseCompressor) and not self.compressor.one_sum
        if several and self.communicator.splits:
            raise ConfigError(
                f"compressor={self.compressor.name} makes several sums in turn, which cannot be cut into a "
                "reduce-scatter and an all-gather; use another compressor, or another schedule such as wfbp"
            )
        if not self.communicator.splits or several:
            raise ConfigError(
                f"compressor={self.compressor.name} with communicator={self.communicator.name} cannot be cut into a "
                f"reduce-scatter and an all-gather; use {_splitting()}, or another schedule"
            )
        if self.warmup.steps and not self.warmup.communicator.splits:
            raise ConfigError(
                f"warmup.communicator={self.warmup.communicator.name} cannot be cut into a reduce-scatter and an "
                "all-gather; use warmup.communicator=dense, or another schedule"
            )

    def check_shards(self) -> None:
        """Accepts methods whose sum at the boundary is the result.

        Raises:
            ConfigError: if it is changed later.
        """
        if self.residual.rescales:
            raise ConfigError(
                f"residual={self.residual.name} changes sums after the all-gather, so their norm is not known before "
                "it: use training.clip_norm=null, or another schedule"
            )

    def shard(self, boundary: Boundary, worker: Worker, state: MethodState) -> Tensor:
        """What a worker knows of the average at the boundary; all workers' shards are all of it.

        Args:
            boundary: that its program yielded.
            worker: who.
            state: the worker's.

        Returns:
            Entries of the average in any order, shape (m,).
        """
        shard = boundary.shard
        if isinstance(shard, SparseVector):
            shard = shard.values
        elif state.step >= self.warmup.steps and isinstance(self.compressor, DenseCompressor):
            context = Context(worker, state.layout, state.step - self.warmup.steps)
            shard = self.compressor.entries(shard, context, state.memory.dtype)
        cuts = self.carries or isinstance(boundary.shard, SparseVector)
        return (clip_overflow(shard.clone()) if cuts and not math.isfinite(largest([shard])) else shard) / worker.size

    def accumulate(self, gradient: Tensor, state: MethodState, *, clear: bool = False) -> None:
        """Adds a worker's gradient to what it carried over.

        One with a NaN or an infinity is left out where it could do lasting harm or be lost in a selection: in a
        residual or a velocity it would come back at every step. Dense sums pass it on, as torch does. Where a finite
        gradient and what was carried over add up to more than their type can hold, the entry becomes the largest
        number that it can.

        Args:
            gradient: shape (n,).
            state: the worker's.
            clear: whether the gradient becomes zero, or stays as it is.

        Raises:
            ValueError: if the gradient has another length than the state is for.
        """
        if gradient.shape != state.memory.shape:
            raise ValueError(f"a gradient of {gradient.numel()} entries, expected {state.memory.numel()}")
        peak = 0.0 if self._passes_on else largest([gradient])
        if math.isfinite(peak):
            clear = self._apply(gradient, peak, state, clear=clear) and clear
        else:
            self.residual.accumulate(state.memory, None, state.candidates)
            state.refuse()
        if clear:
            gradient.zero_()

    def _apply(self, gradient: Tensor, peak: float, state: MethodState, *, clear: bool) -> bool:
        """Adds a gradient whose magnitudes are at most ``peak``; returns whether it is still there."""
        state.moments.step = state.step
        applied = self.momentum.apply(gradient, state.moments)
        peak, found = self.momentum.bound(applied, peak, state.moments)
        moved = clear and applied is gradient
        self.residual.accumulate(state.memory, applied, state.candidates, clear=moved)
        if not self.residual.remembers:
            state.bound.value = peak
        elif state.bound.grow(state.memory, peak):
            state.candidates = Candidates()
            found = True
        if found:
            state.refuse()
        return not moved

    @property
    def _passes_on(self) -> bool:
        return self.compressor.mass in (Mass.KEPT, Mass.ROUNDED) and not self.momentum.remembers

    @property
    def in_place(self) -> bool:
        """Whether all it does to a gradient is a sum, of which nothing lasts, entry by entry: wherever that is made."""
        dense = isinstance(self.compressor, DenseCompressor) and self.compressor.one_sum
        return dense and self._passes_on and not self.carries

    @property
    def carries(self) -> bool:
        """Whether a residual or moments last from step to step."""
        return self.residual.remembers or self.momentum.remembers

    def average(self, worker: Worker, state: MethodState, into: Tensor | None = None) -> Program[Sum]:
        """The program of one worker: from accumulated gradients to their average over all workers.

        Args:
            worker: who runs it.
            state: the worker's.
            into: where a dense average may be written, shape (n,), of the type of the residual: the gradient itself, if
                nobody needs it any more.

        Returns:
            The average, sparse or dense as the method has it, bit-identical on every worker. A dense one may share
            the memory of ``state``, or be ``into``: use it before the next step. A sum that overflows becomes the
            largest number of its type, before it is divided; where nothing is carried over, a dense one is infinite,
            as in plain training.
        """
        yield Step(state.step + 1)
        if self.momentum.measures:
            state.moments.step = state.step
            yield from self.momentum.measure(worker, state.moments)
        yield Phase.SELECT
        state.overflowed = False
        warm = state.step < self.warmup.steps
        average = yield from (self._run_dense(worker, state) if warm else self._run(worker, state, into))
        state.step += 1
        return average

    def _run_dense(self, worker: Worker, state: MethodState) -> Program[Sum]:
        total = yield from self.warmup.communicator.total(worker, state.memory.clone())
        state.memory.zero_()
        state.bound.value = 0.0
        return self._divided(total, worker.size, state)

    def _run(self, worker: Worker, state: MethodState, into: Tensor | None) -> Program[Sum]:
        context = Context(worker, state.layout, state.step - self.warmup.steps)
        step = self.compressor.index_step if isinstance(self.compressor, SparseCompressor) else NIBBLE
        accumulated = Accumulator(state.memory, state.candidates, self.wire, state.bound, into, step)
        total = yield from self.communicator.reduce(
            context, accumulated, self.compressor, state.compression, state.communication
        )
        yield Phase.MERGE
        if not isinstance(total, SparseVector):
            if self.residual.remembers:
                accumulated.forget_overflows()
            return self._divided(total, worker.size, state)
        if self.momentum.masks:
            taken = accumulated.taken()
            self.momentum.mask(state.moments.velocity, taken[within(taken, total.indices)])
        if accumulated.overflowed:
            state.refuse()
        self.residual.keep(accumulated, total.indices)
        scaled = self.residual.scale(total, self.compressor.parts(context))
        return SparseVector(scaled.indices, self._limited(scaled.values, state), scaled.length).divided(worker.size)

    def _divided(self, total: Tensor, workers: int, state: MethodState) -> Tensor:
        """The average of a dense sum over all workers, in its place, cut as ``_limited`` does."""
        if not self.carries:
            return total.div_(workers)
        peak = divide(total, workers)
        if self._overflowed(peak, total.dtype, state):
            most = torch.finfo(total.dtype).max / workers
            total.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
        return total

    def _limited(self, total: Tensor, state: MethodState) -> Tensor:
        """A sum over all workers that overflowed, here or on its way, is cut, and counted."""
        # A copy: simulated workers may share what arrived.
        return clip_overflow(total.clone()) if self._overflowed(largest([total]), total.dtype, state) else total

    def _overflowed(self, peak: float, dtype: torch.dtype, state: MethodState) -> bool:
        """Counts a sum whose largest magnitude shows that it was cut, or has to be; the latter is answered."""
        if peak < torch.finfo(dtype).max:
            return False
        state.overflowed = True
        state.refuse()
        return not math.isfinite(peak)


def _splitting() -> str:
    ways = [name for name, kind in registry.communicators().items() if kind().splits]
    dense = [kind for kind in registry.compressors().values() if issubclass(kind, DenseCompressor)]
    whole = [kind.name for kind in dense if not kind.one_sum]
    return f"communicator={' or '.join(ways)}, with any compressor that fits but {' and '.join(whole)}"
