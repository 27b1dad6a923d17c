"""DeAR: reduce-scatter during the backward pass, all-gather during the next forward pass.

Source: Zhang et al., DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining, ICDCS 2023
(arXiv 2302.12445). The result equals synchronous training: every group of parameters is updated before it is used.
Splitting the all-reduce costs no additional time: each half takes (P-1) alpha + n(P-1)/P beta for a group of n entries,
where alpha is the latency and beta the time per entry.

A sparse communicator defines its own halves: SparDL's Spar-Reduce-Scatter (with the gather between teams) overlaps with
the backward pass, and the all-gather inside the teams overlaps with the next forward pass. No paper describes this. The
residual receives the dropped entries at the end of the all-gather, before the next gradient is added to it.

A *group* is a range of neighboring layers that are synchronized together; a *local rank* is one of the workers that
this process runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError, TrainingError
from spardl.basics.weakrefs import TransientHook
from spardl.clusters.base import Cluster, Work, gather_rows
from spardl.method.method import Method
from spardl.schedules.averaging import gradient_of
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import Range, by_count, by_megabytes, flat_order
from spardl.schedules.step import StepPhase
from spardl.schedules.tuning import Trials
from spardl.schedules.wfbp import InBackward, check_megabytes
from spardl.vector.flat import Storage
from spardl.vector.norms import largest_magnitude, norm_of, sum_of_squares
from spardl.vector.sparse import Sum

__all__ = ["Dear", "FirstUses", "InHalves"]


# First use of each parameter in a forward pass.
#
# A hook runs before a module's forward, not before the use of a parameter, and a module may use parameters of another
# module: attention uses the weights of its output projection without calling it, a tied decoder those of the embedding.
# So the first forward pass is traced, and each first use is assigned to the module whose hook ran last before it. From
# the second step on, this hook waits for the parameter. If the first pass did not use a parameter, the hook of the
# module that owns it waits.


class FirstUses:
    """Reports, before the forward pass of each module, which layers the module is about to use.

    Args:
        model: Model whose forward passes are traced.
        layer_of: Layer number of each parameter.
        need: Callback that receives the numbers of the layers; it may be called more often than necessary.
    """

    def __init__(
        self, model: nn.Module, layer_of: Mapping[nn.Parameter, int], need: Callable[[set[int]], None]
    ) -> None:
        self._layer_of, self._need = layer_of, need
        self._seen: set[nn.Parameter] = set()
        self._at_begin: set[int] = set()
        self._of: dict[nn.Module, set[int]] = {module: set() for module in model.modules()}
        self._last: nn.Module | None = None
        self._watch: _Watch | None = _Watch(self._note)
        self._entered = False
        self._hooks = [module.register_forward_pre_hook(TransientHook(self._before)) for module in self._of]

    def begin(self) -> None:
        """Must be called before each forward pass; starts to trace the first one."""
        self._last = None
        self._need(self._at_begin)
        if self._watch is not None and not self._entered:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._entered = True

    def end(self) -> None:
        """Ends the forward pass; the first one has shown which module uses each parameter first."""
        # Tracing every torch function is slow, so only the first forward pass is traced.
        if self._watch is not None and self._entered:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch = None
            for module, needed in self._of.items():
                unseen = set(module.parameters(recurse=False)) - self._seen
                needed |= {self._layer_of[parameter] for parameter in unseen if parameter in self._layer_of}

    def close(self) -> None:
        """Removes the hooks."""
        self.end()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, arguments: Any) -> None:
        self._last = module
        self._need(self._of[module])

    def _note(self, parameter: nn.Parameter) -> None:
        layer = self._layer_of.get(parameter)
        if layer is not None and parameter not in self._seen:
            self._seen.add(parameter)
            (self._at_begin if self._last is None else self._of[self._last]).add(layer)


class _Watch(TorchFunctionMode):
    """Passes every parameter among the arguments of torch functions to ``note``."""

    def __init__(self, note: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self._note(leaf)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Dear(Schedule):
    """Overlaps communication with the backward pass and with the next forward pass.

    Args:
        threshold_mb: Largest size of a fusion group in megabytes of gradients; 0 for one group per layer.
        layers: Number of neighboring layers per group; ``None`` forms groups by size.
        trials: Number of group sizes to try in the first steps of training, starting with ``threshold_mb``; the fastest
            one is kept (Bayesian optimization, section 4 of the paper). 0 for none.
        low_mb: Smallest group size to try, in megabytes.
        high_mb: Largest group size to try, in megabytes.
        seed: Seed of the random choice of group sizes.

    Raises:
        ConfigError: If a value is out of range, or two values contradict each other.
    """

    threshold_mb: float = 25.0
    layers: int | None = None
    trials: int = 0
    low_mb: float = 1.0
    high_mb: float = 256.0
    seed: int = 0

    name = "dear"

    def __post_init__(self) -> None:
        for name in ("threshold_mb", "low_mb", "high_mb"):
            check_megabytes(f"schedule.{name}", getattr(self, name))
        for name, least in (("layers", 1), ("trials", 0), ("seed", 0)):
            value = getattr(self, name)
            if not (is_number(int, value) and value >= least) and not (name == "layers" and value is None):
                raise ConfigError(f"schedule.{name} must be an integer, at least {least}, got {value!r}")
        if self.trials and self.layers is not None:
            raise ConfigError(
                "schedule.trials and schedule.layers exclude each other: one tunes the group size, the other fixes it; "
                "use schedule.layers=null, or schedule.trials=0"
            )
        if self.trials:
            self._tuner()

    def _tuner(self) -> Trials:
        return Trials(self.low_mb, self.high_mb, self.threshold_mb, self.trials, self.seed)

    def check(self, method: Method, *, clips: bool) -> None:
        """Checks that the method can pause between its two halves (reduce-scatter and all-gather)."""
        super().check(method, clips=clips)
        method.check_split()
        if clips:
            method.check_shards()

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine, with groups of ``layers`` layers if that is set, otherwise of ``threshold_mb``."""
        cut = partial(self._partition, training.gradient)
        return InHalves(method, cluster, training, cut, self.threshold_mb, self._tuner() if self.trials else None)

    def _partition(self, gradient: Storage, megabytes: float) -> list[Range]:
        if self.layers is not None:
            count = self.layers
            return flat_order(gradient, lambda order: by_count(len(order), count))
        return by_megabytes(gradient, megabytes)


class _SecondHalf:
    """The all-gathers of a step, which run during the next step until their averages are applied.

    Args:
        works: Synchronization of each group.
        ranks: Number of local ranks.
        gradients: Gradients that are averaged, by group and local rank, shape (m,) each.
        skipped: Parameters without a gradient on any worker.
        usable: Whether the optimizer may use the averages: no gradient overflowed.
        factor: Factor that clips the averages; ``None`` if they are not clipped.

    Attributes:
        averages: Completed averages, by local rank and group.
        unapplied: Numbers of the groups whose averages are not applied to the model yet.
    """

    def __init__(
        self,
        works: Sequence[Work[Sum]],
        ranks: int,
        gradients: Sequence[Sequence[Tensor]],
        *,
        skipped: Collection[nn.Parameter] = (),
        usable: bool,
        factor: float | None = None,
    ) -> None:
        self._works = works
        self.gradients, self.skipped, self.usable, self.factor = gradients, skipped, usable, factor
        self.averages: list[dict[int, Sum]] = [{} for _ in range(ranks)]
        self.unapplied = set(range(len(works)))

    def resume(self, order: Sequence[int]) -> None:
        """Starts the all-gathers of the groups in ``order``."""
        for number in order:
            self._works[number].resume()

    def arrived(self, local: int) -> bool:
        """Returns whether the averages of all groups are complete on the local rank ``local``."""
        return len(self.averages[local]) == len(self._works)

    def missing(self, local: int) -> list[int]:
        """Returns the numbers of the groups whose averages are not complete on the local rank ``local``."""
        return [number for number in range(len(self._works)) if number not in self.averages[local]]

    def wait(self, number: int, local: int) -> Sum:
        """Waits for the average of group ``number`` on the local rank ``local``."""
        average = self.averages[local][number] = self._works[number].wait(local)
        return average


class InHalves(InBackward):
    """Engine of DeAR: pauses each synchronization after its reduce-scatter; ``finish`` starts the all-gathers.

    Args:
        method: Method that averages the gradients.
        cluster: Cluster that runs the workers.
        training: Training with a model and an optimizer.
        cut: Function that returns the partition (ranges of layers) for a maximum group size in megabytes.
        megabytes: Initial group size in megabytes.
        trials: Measurement of other group sizes in the first steps; ``None`` to keep the initial size.
    """

    pauses = True

    def __init__(
        self,
        method: Method,
        cluster: Cluster,
        training: Training,
        cut: Callable[[float], list[Range]],
        megabytes: float,
        trials: Trials | None,
    ) -> None:
        self._cut, self._trials = cut, trials
        self.fixed = trials is None
        self._second: _SecondHalf | None = None
        self._late: set[int] = set()
        super().__init__(method, cluster, training, cut(megabytes))
        assert training.model and training.optimizer
        self._uses = FirstUses(training.model, training.gradient.layer_of(), self._need)
        model, optimizer, flush = training.model, training.optimizer, TransientHook(lambda *_: self.flush())
        self._hooks += [
            model.register_state_dict_pre_hook(flush),
            optimizer.register_state_dict_pre_hook(flush),
            # Pending updates belong to the current weights, so apply them before others are loaded.
            model.register_load_state_dict_pre_hook(flush),
            optimizer.register_load_state_dict_pre_hook(flush),
        ]

    # --- the first half

    def begin(self, local: int = 0) -> None:
        """Starts the forward passes of the local rank ``local``; each module waits until its parameters are updated."""
        if local == 0:
            # A new scale rescales the residuals, so no synchronization in flight may use them.
            if self._scaling.changes_residuals:
                self.flush()
            self._try_size()
        super().begin(local)
        self._uses.begin()

    def _try_size(self) -> None:
        megabytes = self._trials.next(self._cluster) if self._trials else None
        if megabytes is not None:
            self.flush()
            self._regroup(self._cut(megabytes))

    def _use_groups(self) -> None:
        self._second = None
        super()._use_groups()

    def before_backward(self, *, last: bool) -> None:
        """Completes the updates of groups that the forward passes did not use, before new gradients replace them."""
        self._uses.end()
        super().before_backward(last=last)
        # A parameter used although its group is late was read before its update; ``note`` reports that.
        self._late = set(self._second.missing(self._step.local)) if self._second else set()
        self._apply_all(self._step.local)

    def forward_ended(self) -> None:
        """Ends a forward pass, and completes the updates of parameters that only the loss uses."""
        self._uses.end()

    def forward_again(self) -> None:
        """Starts another forward pass of the same step, which need not wait because all parameters are up to date."""
        self._late = set()

    def note(self, number: int) -> None:
        """Records that parameter ``number`` has a gradient; checks that the forward pass waited for its update.

        Raises:
            TrainingError: If the forward pass used the parameter before its update.
        """
        if self._late and self._step.group_of(number) in self._late:
            raise TrainingError(
                f"the forward pass used {self._gradient.names[number]} earlier than in the first step, before its "
                "update; use schedule=wfbp for models whose control flow changes"
            )
        super().note(number)

    def agree(self) -> bool:
        """Returns whether the optimizer may use the averages: ``False`` if a gradient overflowed on any worker.

        With a loss scale, this waits for the reduce-scatters of all groups.
        """
        # Without a loss scale, non-finite gradients were skipped before sending.
        if self._scaling:
            for work in self._step.works:
                for local in range(len(self._cluster.local_ranks)):
                    work.boundary(local)
        return not self.overflowed

    # --- the second half

    def finish(self) -> None:
        """Saves the optimizer settings for the update, and starts the all-gathers in the order of the forward pass."""
        skipped = {self._gradient.parameters[number] for number in self.unused()}
        usable = self.agree()
        factor = self._update.factor(self._norm) if usable else None
        if self._update.updater:
            self._update.updater.hold()
        self._start_second_half(skipped=skipped, usable=usable, factor=factor)

    def drop(self) -> None:
        """Ends a step whose averages the optimizer does not use; they return to the residuals after the all-gathers."""
        self._usage.clear()
        self._start_second_half(usable=False)

    def _start_second_half(self, **options: Any) -> None:
        step = self._step
        ranks = len(self._cluster.local_ranks)
        self._second = _SecondHalf(step.works, ranks, self._averaging.gradients, **options)
        step.averages, step.works = self._second.averages, []
        step.end()
        # The next forward pass uses the first layers first.
        self._second.resume(step.order[::-1])

    def _norm(self) -> float:
        """Returns the norm of the average, computed from the shard of each worker."""
        shards = [self._shards(local) for local in range(len(self._cluster.local_ranks))]
        length = self._gradient.layout.length
        # Fixed-point sums relative to the common peak: the norm then has the same bits for any number of workers.
        rows = [torch.tensor([largest_magnitude(parts)], dtype=torch.float64) for parts in shards]
        peak = largest_magnitude(gather_rows(self._cluster, rows, counted=True))
        rows = [torch.tensor([sum_of_squares(parts, peak, length)]) for parts in shards]
        totals = gather_rows(self._cluster, rows, counted=True)
        return norm_of(sum(int(total) for total in totals), peak, length)

    def _shards(self, local: int) -> list[Tensor]:
        worker = self._cluster.local_workers[local]
        return [
            self._method.shard(work.boundary(local), worker, group.states[local])
            for work, group in zip(self._step.works, self.gradient_state.groups, strict=True)
        ]

    @property
    def updates(self) -> bool:
        """Whether a running ``optimizer.step()`` was called by this engine to apply averages, not by the user."""
        return self._update.updater is not None and self._update.updater.applying

    def _need(self, layers: Collection[int]) -> None:
        local = self._step.local
        if self._second is None or self._second.arrived(local):
            return
        # Calls outside the passes (state_dict, flush) take no simulated compute time.
        if self._step.phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
            self._cluster.reach(local, layers, backward=False)
        for layer in sorted(layers):
            group = next(number for number, group in enumerate(self.gradient_state.groups) if layer < group.layers[1])
            self._apply(group, local)

    def _apply_all(self, local: int) -> None:
        for number in self._second.missing(local) if self._second else ():
            self._apply(number, local)

    def _apply(self, number: int, local: int) -> None:
        """Waits for the average of a group on a local rank, and applies it unless another local rank already has."""
        second = self._second
        if second is None or number in second.averages[local]:
            return
        average = second.wait(number, local)
        if number not in second.unapplied:
            return
        second.unapplied.remove(number)
        with self._update.timed():
            self._apply_group(second, number, average)
        if self._scaling and not second.unapplied:
            if second.usable:
                # The other groups are already updated, so only the groups that overflowed in the second half are
                # skipped, not the whole step.
                self._scaling.overflowed.clear()
            else:
                self._scaling.keep_unused([own[0] for own in second.gradients])

    def _apply_group(self, second: _SecondHalf, number: int, average: Sum) -> None:
        group = self.gradient_state.groups[number]
        self.kept += self._update.store(group, average)
        gradient = gradient_of(self._gradient, group)
        if second.factor is not None:
            gradient.mul_(second.factor)
        if self._update.updater and second.usable and number not in self._scaling.overflowed:
            self._update.step_group(group, second.skipped)
        elif self.gradient_state.remembers and not second.usable and not self._scaling.overflowed:
            # No update used the average: each worker returns its share to its residual.
            group.states[0].change(more=gradient)
        gradient.zero_()

    def flush(self) -> None:
        """Waits for all synchronizations in flight and applies their updates."""
        if self._trials:
            self._trials.skip_step()
        for local in range(len(self._cluster.local_ranks)):
            self._apply_all(local)

    # --- saved states

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """Returns the state of the local rank ``local``, including the tuning of the group size."""
        return {**super().state_dict(local), "trials": self._trials.state_dict() if self._trials else None}

    def _load_common(self, values: Mapping[str, Any]) -> None:
        super()._load_common(values)
        if self._trials and values.get("trials") is not None:
            self._trials.load_state_dict(values["trials"])

    def close(self) -> None:
        """Applies pending updates and removes the hooks, even if a synchronization fails."""
        try:
            self.flush()
        finally:
            self._uses.close()
            super().close()
