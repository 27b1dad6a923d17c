"""The :class:`Method` (a compatible compressor, communicator, residual and momentum), and the state of one worker.

A synchronization computes: gradient -> (momentum) -> accumulate -> compress -> communicate -> feed back. Its messages
are requested by a program: a generator that a cluster runs for one worker (see ``spardl.protocol.programs``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spardl.basics.checks import check_type
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator, Synchronization
from spardl.compressors.base import Compressor, DenseCompressor, Mass, SparseCompressor
from spardl.method import registry
from spardl.method.elastic import owners, redistribute, sources
from spardl.method.momentum import Moments, Momentum, OptimizerMomentum, Spread
from spardl.method.registry import incompatibility
from spardl.method.residuals import ErrorFeedback, Residual
from spardl.method.warmup import Warmup
from spardl.protocol.programs import Boundary, Context, Cost, Phase, Program, State, Step, Worker, describe
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.flat import local_part
from spardl.vector.kernels import runs_triton
from spardl.vector.late import LateConditions
from spardl.vector.layout import Layout
from spardl.vector.norms import Bound, clip_overflow, divide, host_reads, largest_magnitude, peak_of
from spardl.vector.packing import NIBBLE, Slot, message_words
from spardl.vector.sparse import SparseVector, Sum, within
from spardl.vector.wire import EXACT, Wire

__all__ = ["Method", "MethodState"]

# Number of steps whose conditions may have been sent from a GPU but not read.
_MOST_LATE = 64


# State of one worker between synchronizations.


@dataclass
class MethodState:
    """State of one worker between synchronizations.

    Attributes:
        layout: Shapes and positions of the tensors in the gradient; not saved.
        memory: Residual between steps; residual plus gradient within a step, shape (n,).
        moments: Running means of the worker's gradients, shape (n,) each; empty unless momentum is applied before
            compression.
        compression: State of the compressor.
        communication: State of the communicator.
        step: Number of finished synchronizations, dense warm-up included.
        refused: Number of steps in which a gradient was skipped because of a NaN or an infinity, or in which a sum of
            finite numbers overflowed and was clipped.
        refused_last: Number of the last such step, counted from 1; 0 if there was none since the state was created. Not
            saved.
        overflowed: Whether the last average was clipped; equal on all workers.
        candidates: Positions among which the largest entries of the memory are searched; not saved, since no result
            depends on them.
        bound: Upper bound of the magnitudes in the memory; not used on a GPU, not saved.
        conditions: Bool tensors of shape () on a GPU; each states whether certain values of this step were finite.
            Not saved.
        late: Earlier ``conditions`` that the host has not read yet; not saved.
        weights: Weights of any shape that the averages change, equal on all workers, one tensor for each of ``layout``;
            empty if averages are not changes of weights. Not saved.
        step_sizes: Function that returns, for each tensor of ``layout``, the learning rate with which the optimizer
            subtracts averages from ``weights``; ``None`` if averages are subtracted as they are. Not saved.
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
    conditions: list[Tensor] = field(default_factory=list)
    late: LateConditions = field(default_factory=LateConditions)
    weights: Sequence[Tensor] = ()
    step_sizes: Callable[[], Sequence[float]] | None = None

    def refuse(self) -> None:
        """Counts the current step in ``refused``; further calls in the same step change nothing."""
        self._refuse_in(self.step + 1)

    def _refuse_in(self, step: int) -> None:
        if self.refused_last != step:
            self.refused += 1
            self.refused_last = step

    def send_conditions(self, total: Tensor | None) -> None:
        """Ends a step on a GPU: starts the copy of all ``conditions`` to the host, which ``catch_up`` reads later.

        Args:
            total: Scalar bool tensor on the GPU: whether the average is finite without clipping; ``None`` if it is
                never clipped.
        """
        found = [*self.conditions, *([] if total is None else [total])]
        if found:
            # The last value always describes the average: true if the average is never clipped.
            self.late.send(self.step + 1, [*found, found[-1] if total is not None else torch.ones_like(found[-1])])
        self.conditions = []
        # Handles read the conditions in every step. Other callers may not, so their number is limited here.
        if self.late.waiting > _MOST_LATE:
            self.catch_up(wait=False)

    def catch_up(self, *, wait: bool = True) -> None:
        """Updates ``refused``, ``refused_last`` and ``overflowed`` with the conditions that a GPU has computed.

        Args:
            wait: Whether to wait for the most recent steps; otherwise they may be counted in a later call.
        """
        for step, values in self.late.read(wait=wait):
            if not all(values):
                self._refuse_in(step)
            if step == self.step:
                self.overflowed = not values[-1]

    def change(self, factor: float = 1.0, more: Tensor | None = None) -> None:
        """Adds a vector to the residual, then rescales the state for gradients that are multiplied by a factor.

        Call this between two steps.

        Args:
            factor: Factor for the residual, the velocity, and the states of compressor and communicator.
            more: Finite vector to add to the residual before it is rescaled, shape (n,); ``None`` for none.
        """
        self.catch_up()
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
        """Returns the state as a dict of plain data, whose residual and moments share memory with this state."""
        self.catch_up()
        more = {"variance": self.moments.variance, "updates": self.moments.updates}
        return {
            "memory": self.memory,
            "velocity": self.moments.velocity,
            **(more if self.moments.variance.numel() else {}),
            **({"spread": self.moments.spread.state_dict()} if self.moments.spread.common else {}),
            **({"matrices": list(map(list, self.moments.matrices))} if self.moments.matrices else {}),
            "compression": self.compression.state_dict(),
            "communication": self.communication.state_dict(),
            "step": self.step,
            "refused": self.refused,
        }

    def _vectors(self, values: Mapping[str, Any]) -> dict[str, tuple[Tensor, Any]]:
        """Pairs residual and moments with the saved values, by name."""
        mine = {"residual": self.memory, "velocity": self.moments.velocity, "variance": self.moments.variance}
        return {
            name: (own, values.get("memory" if name == "residual" else name, own[:0])) for name, own in mine.items()
        }

    def check(self, values: Mapping[str, Any], *, finite: bool = False) -> None:
        """Checks that ``load_state_dict`` accepts saved values, without changing this state.

        Args:
            values: Result of ``state_dict``, as saved.
            finite: Whether a residual with NaN or infinity is an error.

        Raises:
            KeyError: If a value is missing.
            ValueError: If a value has another type, or a tensor has another length.
        """
        for name, (mine, saved) in self._vectors(values).items():
            if not isinstance(saved, Tensor) or not saved.is_floating_point() or saved.layout is not torch.strided:
                raise ValueError(f"{name} must be {describe(mine)}, got {describe(saved)}")
            if saved.shape != mine.shape:
                raise ValueError(f"{name} must have {mine.numel()} entries, got {saved.numel()}")
        if finite and not values["memory"].isfinite().all():
            raise ValueError("residual contains a NaN or an infinity")
        if values.get("matrices", []) != list(map(list, self.moments.matrices)):
            raise ValueError("Muon updated other parameters before; give each parameter the same optimizer as before")
        counts = {"step": values["step"], "refused": values["refused"], "updates": values.get("updates", 0)}
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} must be an integer, at least 0, got {describe(count)}")
        spread = values.get("spread", {})
        if not isinstance(spread, Mapping) or not spread.keys() <= Spread().state_dict().keys():
            keys = ", ".join(Spread().state_dict())
            raise ValueError(f"spread must be a dict with keys {keys}, got {describe(spread)}")
        for name, number in spread.items():
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                raise ValueError(f"spread.{name} must be a number, at least 0, got {describe(number)}")
        for name, state in (("compression", self.compression), ("communication", self.communication)):
            state.check(values[name] if isinstance(values[name], Mapping) else {"": values[name]})

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores saved ``values``; residual and moments are copied into the existing tensors.

        Raises:
            KeyError: If a value is missing; nothing is changed.
            ValueError: If a value has another type or length; nothing is changed.
        """
        self.check(values)
        self.catch_up()
        for mine, saved in self._vectors(values).values():
            mine.copy_(saved)
        self.moments.updates = values.get("updates", 0)
        self.moments.spread, self.moments.sample = Spread(**values.get("spread", {})), None
        self.compression.load_state_dict(values["compression"])
        self.communication.load_state_dict(values["communication"])
        self.step = values["step"]
        self.refused = values["refused"]
        self._reset_bounds()

    def _reset_bounds(self) -> None:
        self.bound, self.moments.bound, self.refused_last = Bound(), Bound(), 0

    def adopt(self, parts: Sequence[Mapping[str, Any]], worker: Worker, before: int) -> None:
        """Loads states that a run with another number of workers saved, except those of compressor and communicator.

        Args:
            parts: Results of ``state_dict`` on the old ranks ``spardl.method.elastic.sources(worker, before)``, in that
                order.
            worker: Worker that owns this state.
            before: Number of workers that saved the states.

        Raises:
            ValueError: If a residual or a velocity has another length.
        """
        # Residuals keep their sum over all workers, velocities their mean.
        redistribute([part["memory"] for part in parts], worker, before, self.memory)
        redistribute([part["velocity"] for part in parts], worker, before, self.moments.velocity)
        self.moments.velocity.mul_(worker.size / before)
        if self.moments.variance.numel():
            # Updates are divided by the variance, so it must not have the gaps of a redistributed vector.
            own = parts[sources(worker, before).index(worker.rank % before)]
            self.moments.variance.copy_(own["variance"])
            self.moments.updates = own["updates"]
        self.moments.spread, self.moments.sample = Spread(**parts[0].get("spread", {})).resized(worker.size), None
        self.step = parts[0]["step"]
        self._reset_bounds()
        self.refused = sum(
            # An old worker that is shared by several new ones is counted once.
            part["refused"]
            for rank, part in zip(sources(worker, before), parts, strict=True)
            if owners(rank, before, worker.size)[0] == worker.rank
        )


_PART_TYPES: Mapping[str, type] = MappingProxyType(
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
    """An algorithm that turns the gradients of P workers into their average.

    Args:
        compressor: Compressor of each worker's gradient.
        communicator: Algorithm that sums the compressed gradients.
        residual: Rule for the entries that are not sent: which of them are added to the next gradient.
        momentum: Rule for the vector to compress: the gradient itself, or a momentum of the worker's gradients.
        warmup: Number of uncompressed (dense) steps at the beginning of a run, and their communicator.
        wire: Number format of the values in sparse messages.

    Raises:
        ConfigError: If a part has a wrong type, or parts are incompatible; the message names compatible ones.

    Example:
        >>> from spardl.protocol.programs import Context, Worker
        >>> from spardl.vector.layout import Layout
        >>> for method in (spardl.make_method("spardl", density=0.01, teams=2), spardl.make_method("none")):
        ...     rounds, words = method.cost(Context(Worker(rank=0, size=8), Layout.flat(1_000_000), step=0))
        ...     print(f"{rounds.high} rounds, at most {words.high} words")
        5 rounds, at most 35000 words
        14 rounds, at most 1750000 words
    """

    compressor: Compressor
    communicator: Communicator[Any, Any]
    residual: Residual
    momentum: Momentum = OptimizerMomentum()  # noqa: RUF009 - immutable
    warmup: Warmup = Warmup()  # noqa: RUF009 - immutable
    wire: Wire = EXACT

    def __post_init__(self) -> None:
        for name, kind in _PART_TYPES.items():
            check_type(name, getattr(self, name), kind)
        parts = (self.compressor, self.communicator, self.residual, self.momentum)
        reason = incompatibility(*map(type, parts))
        if reason:
            raise ConfigError(reason)
        if self.wire != EXACT and not isinstance(self.compressor, SparseCompressor):
            raise ConfigError(
                f"wire.values={self.wire.values} needs a sparse compressor, but compressor="
                f"{self.compressor.name} sends {self.compressor.output.value}; use wire.values={EXACT.values}"
            )
        if self.wire.coarse and not self.communicator.sends_whole:
            raise ConfigError(
                f"wire.values={self.wire.values} needs a communicator that sends rounded entries whole, but "
                f"communicator={self.communicator.name} splits them; use wire.values=bfloat16 or communicator=spardl"
            )

    def init_state(self, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu") -> MethodState:
        """Returns the initial state of one worker, for gradients of this ``layout``, ``dtype`` and ``device``."""
        memory = torch.zeros(layout.length, dtype=dtype, device=device)
        state = self.state_in(layout, memory, self.momentum.init_moments(memory))
        state.bound.value = state.moments.bound.value = 0.0
        return state

    def state_in(self, layout: Layout, memory: Tensor, moments: Moments) -> MethodState:
        """Returns an initial state that uses given tensors, for example views of parts of longer vectors.

        Args:
            layout: Shapes and positions of the tensors in the gradient.
            memory: Tensor for the residual, shape (n,).
            moments: Moments of the worker's gradients, as made by ``momentum.init_moments``.

        Returns:
            A state that uses these tensors without copying them.
        """
        return MethodState(
            layout=layout,
            memory=memory,
            moments=moments,
            compression=self.compressor.init_state(layout, memory.dtype, memory.device),
            communication=self.communicator.init_state(),
        )

    def cost(self, context: Context) -> Cost:
        """Returns the cost of one compressed synchronization in ``context``, as bounds that hold for every worker."""
        cost = self.communicator.cost(context, self.compressor)
        step = context.step + self.warmup.steps
        more = self.momentum.measure_cost(context.worker, context.layout.length, step)
        return cost if more is None else Cost.total([cost, more])

    def published_cost(self, context: Context) -> Cost:
        """Returns the cost of one synchronization in ``context`` by the paper's formula.

        For some communicators, this is the mean over all workers.
        """
        return self.communicator.published_cost(context, self.compressor)

    def word_bytes(self, context: Context, dtype: torch.dtype = torch.float32) -> float:
        """Returns the average number of bytes per word in messages, for ``context`` and gradients of type ``dtype``."""
        if isinstance(self.compressor, DenseCompressor):
            return float(self.compressor.summed_as(dtype).itemsize)
        if not isinstance(self.compressor, SparseCompressor):
            return float(dtype.itemsize)
        # Coded indices take fewer bytes than values, so average over a message.
        length, count = context.layout.length, self.compressor.count(context)
        form = self.wire.form(dtype, self.compressor.index_step)
        return form.size(Slot(count, length)) / message_words(Slot(count, length))

    def half_costs(self, context: Context) -> tuple[Cost, Cost]:
        """Returns the published costs of the reduce-scatter and of the all-gather of a synchronization in ``context``.

        Raises:
            ConfigError: If a synchronization of this method cannot pause in the middle.
        """
        self.check_split()
        return self.communicator.half_costs(context, self.compressor)

    def check_split(self) -> None:
        """Checks that a synchronization can pause at its boundary, between reduce-scatter and all-gather.

        Raises:
            ConfigError: If it cannot; the message names methods that can.
        """
        several = isinstance(self.compressor, DenseCompressor) and not self.compressor.one_sum
        if several and self.communicator.splits:
            raise ConfigError(
                f"compressor={self.compressor.name} runs several sums in sequence, which cannot be split into a "
                "reduce-scatter and an all-gather; use another compressor, or another schedule such as wfbp"
            )
        if not self.communicator.splits or several:
            raise ConfigError(
                f"compressor={self.compressor.name} with communicator={self.communicator.name} cannot be split into a "
                f"reduce-scatter and an all-gather; use {_splittable()}, or another schedule"
            )
        if self.warmup.steps and not self.warmup.communicator.splits:
            raise ConfigError(
                f"warmup.communicator={self.warmup.communicator.name} cannot be split into a reduce-scatter and an "
                "all-gather; use warmup.communicator=dense, or another schedule"
            )

    def check_shards(self) -> None:
        """Checks that sums are final after the reduce-scatter, so that their norm can be computed then.

        Raises:
            ConfigError: If the method changes the sums after the all-gather.
        """
        if self.residual.rescales:
            raise ConfigError(
                f"residual={self.residual.name} scales sums after the all-gather, so their norm is not known before; "
                "use training.clip_norm=null, or another schedule"
            )

    def shard(self, boundary: Boundary, worker: Worker, state: MethodState) -> Tensor:
        """Returns the entries of the average that a worker holds after the reduce-scatter.

        Each entry is held by exactly one worker.

        Args:
            boundary: Annotation that the worker's program yielded at the end of the reduce-scatter.
            worker: Worker that runs this program.
            state: State of that worker.

        Returns:
            Entries of the average in any order, shape (m,).
        """
        shard = boundary.shard
        if isinstance(shard, SparseVector):
            shard = shard.values
        elif state.step >= self.warmup.steps and isinstance(self.compressor, DenseCompressor):
            context = Context(worker, state.layout, state.step - self.warmup.steps)
            shard = self.compressor.entries(shard, context, state.memory.dtype)
        # Clip as ``average`` does, so that a norm computed from shards is the norm of the result.
        cuts = self.carries or isinstance(boundary.shard, SparseVector)
        overflowed = cuts and not math.isfinite(largest_magnitude([shard]))
        return (clip_overflow(shard.clone()) if overflowed else shard) / worker.size

    def accumulate(self, gradient: Tensor, state: MethodState, *, clear: bool = False) -> None:
        """Adds a worker's gradient to its residual.

        A gradient with a NaN or an infinity is skipped if the method selects entries, or keeps a residual or a
        velocity. Dense sums pass it on, as in torch. Where the sum of a finite gradient and the residual overflows, the
        entry is clipped to the largest finite number.

        Args:
            gradient: Gradient of the worker, shape (n,).
            state: State of the worker.
            clear: Whether to set the gradient to zero.

        Raises:
            ValueError: If the gradient does not have the length of the state.
        """
        if gradient.shape != state.memory.shape:
            raise ValueError(f"gradient must have {state.memory.numel()} entries, got {gradient.numel()}")
        if self._is_unread(gradient):
            _accumulate_unread(self.residual, self.momentum, gradient, state)
            if clear:
                gradient.zero_()
            return
        # In a residual or a velocity, a NaN would last for all later steps; a selection of entries could drop it.
        peak = 0.0 if self._passes_nonfinite else largest_magnitude([gradient])
        if math.isfinite(peak):
            clear = self._apply(gradient, peak, state, clear=clear) and clear
        else:
            self.residual.accumulate(state.memory, None, state.candidates)
            state.refuse()
        if clear:
            gradient.zero_()

    def _is_unread(self, gradient: Tensor) -> bool:
        """Whether a gradient is accumulated without reading a value on the host, which would wait for the GPU."""
        # A skipped gradient must not change moments either, so the host decides if the method keeps moments.
        finite_only = self.residual.remembers and not self._passes_nonfinite
        return not host_reads(gradient) and finite_only and not self.momentum.remembers

    def _apply(self, gradient: Tensor, peak: float, state: MethodState, *, clear: bool) -> bool:
        """Adds a gradient with magnitudes of at most ``peak``; returns whether it still has to be cleared."""
        state.moments.step = state.step
        applied = self.momentum.apply(gradient, state.moments)
        peak, found = self.momentum.bound(applied, peak, state.moments)
        cleared = clear and applied is gradient
        self.residual.accumulate(state.memory, applied, state.candidates, clear=cleared)
        if not self.residual.remembers:
            state.bound.value = peak
        elif state.bound.grow(state.memory, peak):
            state.candidates = Candidates()
            found = True
        if found:
            state.refuse()
        return not cleared

    @property
    def _passes_nonfinite(self) -> bool:
        return self.compressor.mass in (Mass.KEPT, Mass.ROUNDED) and not self.momentum.remembers

    @property
    def in_place(self) -> bool:
        """Whether the method only sums gradients entry by entry, so that the sum can overwrite the gradient."""
        dense = isinstance(self.compressor, DenseCompressor) and self.compressor.one_sum
        return dense and self._passes_nonfinite and not self.carries

    @property
    def carries(self) -> bool:
        """Whether the method keeps a residual or moments between steps."""
        return self.residual.remembers or self.momentum.remembers

    def average(self, worker: Worker, state: MethodState, into: Tensor | None = None) -> Program[Sum]:
        """Averages the accumulated gradients of all workers; a program (generator) that every worker runs.

        Args:
            worker: Worker that runs this generator.
            state: State of that worker, after ``accumulate``.
            into: Tensor that a dense average is written to, shape (n,), with the dtype of the residual; may be the
                gradient.

        Returns:
            The average, sparse or dense, bit-identical on every worker. A dense average may share the memory of
            ``state`` or be ``into``: use it before the next step. A sum that overflows is clipped to the largest finite
            number before it is divided. Only a dense sum of a method without residual and moments becomes infinite, as
            in plain training.
        """
        yield Step(state.step + 1)
        if self.momentum.measures:
            state.moments.step = state.step
            yield from self.momentum.measure(worker, state.moments)
        yield Phase.SELECT
        state.overflowed = False
        warm = state.step < self.warmup.steps
        average = yield from (self._run_dense(worker, state) if warm else self._run(worker, state, into))
        if state.conditions:
            state.send_conditions(None)
        state.step += 1
        return average

    def _run_dense(self, worker: Worker, state: MethodState) -> Program[Sum]:
        # Clone: the sum may be computed in place, and the memory is cleared below.
        total = yield from self.warmup.communicator.total(worker, state.memory.clone())
        state.memory.zero_()
        state.bound.value = 0.0
        return _divided(total, worker.size, state, carries=self.carries)

    def _run(self, worker: Worker, state: MethodState, into: Tensor | None) -> Program[Sum]:
        compared = _compared_weights(state) if self.compressor.needs_weights else ()
        context = Context(worker, state.layout, state.step - self.warmup.steps, *compared)
        step = self.compressor.index_step if isinstance(self.compressor, SparseCompressor) else NIBBLE
        accumulated = Accumulator(state.memory, state.candidates, self.wire, state.bound, into, step)
        total = yield from self.communicator.reduce(
            Synchronization(context, accumulated, self.compressor, state.compression, state.communication)
        )
        yield Phase.MERGE
        if not isinstance(total, SparseVector):
            if self.residual.remembers:
                accumulated.forget_overflows()
            return _divided(total, worker.size, state, carries=self.carries)
        if self.momentum.masks:
            # Entries that are missing from the result return to the residual, so they do not count as sent.
            taken = accumulated.taken()
            self.momentum.mask(state.moments.velocity, taken[within(taken, total.indices)])
        if accumulated.overflowed:
            state.refuse()
        state.conditions += accumulated.finite
        self.residual.keep(accumulated, total.indices)
        scaled = self.residual.scale(total, self.compressor.parts(context))
        return SparseVector(scaled.indices, _limited(scaled.values, worker.size, state), scaled.length)


def _compared_weights(state: MethodState) -> tuple[Tensor | None, Tensor | None]:
    """Returns the weights that averages change, and the step size of each entry, shape (n,) each, if there are any."""
    if not state.weights:
        return None, None
    # Concatenated in each synchronization: a copy that lasts between steps would need the memory of a second model.
    weights = torch.cat([local_part(each).detach().reshape(-1) for each in state.weights])
    if state.step_sizes is None:
        return weights, None
    lengths = torch.tensor([local_part(each).numel() for each in state.weights], device=weights.device)
    return weights, weights.new_tensor(state.step_sizes()).repeat_interleave(lengths, output_size=len(weights))


def _accumulate_unread(residual: Residual, momentum: Momentum, gradient: Tensor, state: MethodState) -> None:
    memory, limits = state.memory, torch.finfo(state.memory.dtype)
    # Other residual rules may also modify the memory or the gradient.
    if type(residual).accumulate is ErrorFeedback.accumulate:
        flags = state.candidates.check_next(memory, gradient)
        if flags is not None:
            applied = momentum.apply(gradient, state.moments)
            residual.accumulate(memory, applied, state.candidates)
            state.conditions += flags.unbind()
            return
    finite = peak_of(gradient) < math.inf
    # Adding -0 leaves every number as it is.
    usable = torch.where(finite, momentum.apply(gradient, state.moments), -0.0)
    residual.accumulate(memory, usable, state.candidates)
    state.conditions += [finite, peak_of(memory) < math.inf]
    # As in ``Bound``, clip below the largest finite number, which marks a clipped sum over workers.
    most = limits.max * (1 - limits.eps)
    memory.nan_to_num_(nan=0.0, posinf=most, neginf=-most)


def _divided(total: Tensor, workers: int, state: MethodState, *, carries: bool) -> Tensor:
    """Divides a dense sum in place, and clips it if it overflowed."""
    if not carries:
        # No state would keep the overflow, so it may reach the weights and become visible, as in plain training.
        return total.div_(workers)
    if _divides_on_gpu(total):
        return _divided_on_gpu(total, workers, state, total)
    if not host_reads(total):
        state.send_conditions(peak_of(total) < torch.finfo(total.dtype).max)
        most = torch.finfo(total.dtype).max / workers
        return total.div_(workers).nan_to_num_(nan=0.0, posinf=most, neginf=-most)
    peak = divide(total, workers)
    if _overflowed(peak, total.dtype, state):
        most = torch.finfo(total.dtype).max / workers
        total.nan_to_num_(nan=0.0, posinf=most, neginf=-most)
    return total


def _limited(total: Tensor, workers: int, state: MethodState) -> Tensor:
    """Divides a sum; clips and counts it if it overflowed, now or as a partial sum."""
    if _divides_on_gpu(total):
        return _divided_on_gpu(total, workers, state, None)
    if not host_reads(total):
        state.send_conditions(peak_of(total) < torch.finfo(total.dtype).max)
        return total.nan_to_num(nan=0.0) / workers
    # A copy, since simulated workers may share received tensors.
    overflowed = _overflowed(largest_magnitude([total]), total.dtype, state)
    return (clip_overflow(total.clone()) if overflowed else total) / workers


def _divides_on_gpu(total: Tensor) -> bool:
    # The kernel computes in float32.
    return runs_triton(total) and total.itemsize <= 4 and total.is_contiguous()


def _divided_on_gpu(total: Tensor, workers: int, state: MethodState, out: Tensor | None) -> Tensor:
    from spardl.vector.kernels import gpu_entries  # noqa: PLC0415 - triton is installed only with CUDA

    finite = state.candidates.flag(total)
    quotients = gpu_entries.limit_and_divide(total, workers, finite, out)
    state.send_conditions(finite)
    return quotients


def _overflowed(peak: float, dtype: torch.dtype, state: MethodState) -> bool:
    """Counts an overflow if the largest magnitude shows one; returns whether the sum still has to be clipped."""
    # A sum that has already been clipped contains exactly the largest finite number.
    if peak < torch.finfo(dtype).max:
        return False
    state.overflowed = True
    state.refuse()
    return not math.isfinite(peak)


def _splittable() -> str:
    ways = [name for name, kind in registry.communicators().items() if kind().splits]
    dense = [kind for kind in registry.compressors().values() if issubclass(kind, DenseCompressor)]
    whole = [kind.name for kind in dense if not kind.one_sum]
    return f"communicator={' or '.join(ways)} with any compatible compressor except {' and '.join(whole)}"
