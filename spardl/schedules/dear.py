"""DeAR: reduce-scatter during the backward pass, all-gather during the next forward pass.

Source: Zhang et al., DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining, ICDCS 2023
(arXiv 2302.12445). The result equals synchronous training: every group of parameters is updated before it is used.
Splitting the all-reduce costs nothing extra: each half of a group takes (P-1) alpha + n(P-1)/P beta.

With a sparse communicator, the halves are its own: SparDL's Spar-Reduce-Scatter (with the gather between teams)
overlaps with the backward pass, and the all-gather inside the teams overlaps with the next forward pass. No paper
describes this. The residual receives the dropped entries when the all-gather ends, which is before the next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError, TrainingError
from spardl.basics.weak import Uncopied
from spardl.clusters.base import Cluster, Flight, gather_rows
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import Range, by_count, by_megabytes, flat_order
from spardl.schedules.tuning import Trials
from spardl.schedules.wfbp import InBackward, check_megabytes
from spardl.vector.flat import Storage
from spardl.vector.norms import largest, norm_of, sum_of_squares
from spardl.vector.sparse import Sum

__all__ = ["Dear", "FirstUses", "InHalves"]


# First use of each parameter in a forward pass.
#
# A hook runs before a module's forward, not before the use of a parameter, and a module may use parameters of another
# module: attention uses the weights of its output projection without calling it, a tied decoder those of the embedding.
# So the first forward pass is traced, and each first use is assigned to the module whose hook ran last before it. From
# the second step on, that hook is the last chance to wait for the parameter. Parameters that the first pass did not use
# are waited for when a module that owns them is called.


class FirstUses:
    """Announces, before each module's forward, which groups of parameters the module is about to use.

    Args:
        model: Model whose forward passes are traced.
        layer_of: Layer number of each parameter.
        need: Called with the numbers of the layers; it may be called more often than necessary.
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
        self._hooks = [module.register_forward_pre_hook(Uncopied(self._before)) for module in self._of]

    def begin(self) -> None:
        """Starts tracing, because a forward pass may follow."""
        self._last = None
        self._need(self._at_begin)
        if self._watch is not None and not self._entered:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._entered = True

    def end(self) -> None:
        """Ends the forward pass; after the first one, the uses of all parameters are known."""
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
        layers: Number of neighboring layers per group; ``None`` for groups by size.
        trials: Number of group sizes to try in the first steps of training, starting with ``threshold_mb``; the fastest
            one is kept (Bayesian optimization, section 4 of the paper). 0 for none.
        low_mb: Smallest group size to try, in megabytes.
        high_mb: Largest group size to try, in megabytes.
        seed: Seed of the choice of group sizes.

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
            if not (is_a(int, value) and value >= least) and not (name == "layers" and value is None):
                raise ConfigError(f"schedule.{name} must be a whole number, at least {least}, got {value!r}")
        if self.trials and self.layers is not None:
            raise ConfigError("schedule.trials tunes the group size; use schedule.layers=null with it")
        if self.trials:
            self._tuner()

    def _tuner(self) -> Trials:
        return Trials(self.low_mb, self.high_mb, self.threshold_mb, self.trials, self.seed)

    def check(self, method: Method, *, clips: bool) -> None:
        """Accepts methods that can pause between their two halves."""
        method.check_split()
        if clips:
            method.check_shards()

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine with groups by size or by number of layers."""
        cut = partial(self._partition, training.gradient)
        return InHalves(method, cluster, training, cut, self.threshold_mb, self._tuner() if self.trials else None)

    def _partition(self, gradient: Storage, megabytes: float) -> list[Range]:
        if self.layers is not None:
            count = self.layers
            return flat_order(gradient, lambda order: by_count(len(order), count))
        return by_megabytes(gradient, megabytes)


class InHalves(InBackward):
    """Pauses each synchronization between its halves until ``finish``; layers wait when they are used.

    Args:
        method: Method that averages the gradients.
        cluster: Cluster that runs the workers.
        training: Training with a model and an optimizer.
        cut: Returns the partition for a group size in megabytes.
        megabytes: Initial group size in megabytes.
        trials: Trials of other group sizes; ``None`` for none.
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
        self._landing: list[Flight[Sum]] = []
        self._landed: list[set[int]] = []
        self._pending: set[int] = set()
        self._late: set[int] = set()
        self._skipped: set[nn.Parameter] = set()
        self._multiple: float | None = None
        self._computing = False
        self._used = True
        self._landing_from: list[list[Tensor]] = []
        super().__init__(method, cluster, training, cut(megabytes))
        assert training.model and training.optimizer
        self._uses = FirstUses(training.model, training.gradient.layer_of(), self._need)
        model, optimizer, flush = training.model, training.optimizer, Uncopied(lambda *_: self.flush())
        self._hooks += [
            model.register_state_dict_pre_hook(flush),
            optimizer.register_state_dict_pre_hook(flush),
            # Pending updates belong to the current weights, not to the loaded ones.
            model.register_load_state_dict_pre_hook(flush),
            optimizer.register_load_state_dict_pre_hook(flush),
        ]

    def begin(self, local: int = 0) -> None:
        """Starts the forward passes of a local rank, which wait for the parameters they use."""
        if local == 0:
            # A new scale rescales the residuals, which no synchronization in flight may use meanwhile.
            if self._scaling.changes_residuals:
                self.flush()
            self._tune()
        super().begin(local)
        self._computing = True
        self._uses.begin()

    def _tune(self) -> None:
        megabytes = self._trials.next(self._cluster) if self._trials else None
        if megabytes is not None:
            self.flush()
            self._regroup(self._cut(megabytes))

    def _begin_groups(self) -> None:
        self._landing, self._landed = [], []
        super()._begin_groups()

    def before_backward(self, *, last: bool) -> None:
        """Updates, before new gradients appear, the groups that the forward passes did not use."""
        self._uses.end()
        super().before_backward(last=last)
        # A parameter used although its group is late was read before its update; ``note`` reports that.
        self._late = set(range(len(self._groups))) - self._landed[self._local] if self._landed else set()
        self._land_all(self._local)

    @property
    def updates(self) -> bool:
        """Whether the optimizer step that is running was started by the engine."""
        return self._updater is not None and self._updater.applying

    def forward_ended(self) -> None:
        """Ends a forward pass; parameters that only the loss uses are waited for at once."""
        self._uses.end()

    def forward_again(self) -> None:
        """Starts another forward pass of the step, for which all parameters are up to date."""
        self._late = set()

    def note(self, number: int) -> None:
        """Checks that the forward pass waited for the parameter."""
        group = self._group_of[number]
        if group in self._late:
            raise TrainingError(
                f"the forward pass used {self._gradient.names[number]} earlier than in the first step, before its "
                "update; use schedule=wfbp for models whose control flow changes"
            )
        super().note(number)

    def collect(self) -> None:
        """Starts the remaining reduce-scatters."""
        self._computing = False
        super().collect()

    def agree(self) -> bool:
        """Whether the averages can be used; waits until all workers know it.

        Only with a loss scale can a gradient overflow without being an error.
        """
        # Without a loss scale, non-finite gradients were left out before they were sent.
        if self._scaling:
            for flight in self._flights:
                for local in range(len(self._cluster.local_ranks)):
                    flight.boundary(local)
        return not self.overflowed

    def finish(self) -> None:
        """Schedules the update and starts the all-gathers in the order of the forward pass."""
        self._skipped = {self._gradient.parameters[number] for number in self.unused()}
        self._used = self.agree()
        self._multiple = self._factor(self._norm) if self._used else None
        if self._updater:
            self._updater.hold()
        self._go_on()

    def drop(self) -> None:
        """Ends a step without using its averages."""
        self._used = False
        self._usage.clear()
        self._go_on()

    def _go_on(self) -> None:
        self._landing, self._flights, self._landing_from = self._flights, [], self._whole
        self._landed = [set() for _ in self._cluster.local_ranks]
        self._pending = set(range(len(self._groups)))
        self._averages = [{} for _ in self._cluster.local_ranks]
        # The next forward pass uses the first layers first.
        for number in reversed(self._order()):
            self._landing[number].resume()

    def _norm(self) -> float:
        """Norm of the average, computed from the shard of each worker."""
        shards = [self._shards(local) for local in range(len(self._cluster.local_ranks))]
        length = self._gradient.layout.length
        # Fixed-point sums relative to the common peak: the norm then has the same bits for any number of workers.
        rows = [torch.tensor([largest(parts)], dtype=torch.float64) for parts in shards]
        peak = largest(gather_rows(self._cluster, rows, counted=True))
        rows = [torch.tensor([sum_of_squares(parts, peak, length)]) for parts in shards]
        totals = gather_rows(self._cluster, rows, counted=True)
        return norm_of(sum(int(total) for total in totals), peak, length)

    def _shards(self, local: int) -> list[Tensor]:
        worker = self._cluster.local_workers[local]
        return [
            self._method.shard(flight.boundary(local), worker, group.states[local])
            for flight, group in zip(self._flights, self._groups, strict=True)
        ]

    def _need(self, layers: Collection[int]) -> None:
        if not self._landed or len(self._landed[self._local]) == len(self._groups):
            return
        # Outside the forward pass (state_dict, flush), no simulated compute time has passed.
        if self._computing:
            self._cluster.reach(self._local, layers, backward=False)
        for layer in sorted(layers):
            group = next(number for number, group in enumerate(self._groups) if layer < group.layers[1])
            self._land(group, self._local)

    def _land_all(self, local: int) -> None:
        for number in range(len(self._groups) if self._landed else 0):
            self._land(number, local)

    def _land(self, number: int, local: int) -> None:
        if number in self._landed[local]:
            return
        average = self._landing[number].wait(local)
        self._averages[local][number] = average
        self._landed[local].add(number)
        # Local ranks share the model: the first one that has the average updates it.
        if number in self._pending:
            self._pending.remove(number)
            with self._everybody(Phase.UPDATE):
                self._update(number, average)
            if self._scaling and not self._pending:
                self._end()

    def _end(self) -> None:
        if self._used:
            # The other groups are already updated, so only the group that overflowed in the second half is skipped,
            # not the whole step.
            self._scaling.overflowed.clear()
        else:
            self._scaling.keep_unused([gradients[0] for gradients in self._landing_from])

    def _update(self, number: int, average: Sum) -> None:
        group = self._groups[number]
        self._take_over(group, average)
        gradient = self._part(group)
        if self._multiple is not None:
            gradient.mul_(self._multiple)
        if self._updater and self._used and number not in self._scaling.overflowed:
            members = self._gradient.parameters[slice(*group.tensors)]
            with self._gradient.exposed(range(*group.tensors)):
                self._updater.apply(parameter for parameter in members if parameter not in self._skipped)
        elif self.carried.remembers and not self._used and not self._scaling.overflowed:
            # No update used the average: each worker returns its share to its residual.
            group.states[0].change(more=gradient)
        gradient.zero_()

    @property
    def fixed(self) -> bool:
        """Whether the groups never change: true unless sizes are tried."""
        return self._trials is None

    def flush(self) -> None:
        """Waits for all synchronizations in flight and applies their updates."""
        if self._trials:
            self._trials.skip_step()
        for local in range(len(self._landed)):
            self._land_all(local)

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """State of the engine, including the trials."""
        return {**super().state_dict(local), "trials": self._trials.state_dict() if self._trials else None}

    def _follow(self, values: Mapping[str, Any]) -> None:
        super()._follow(values)
        if self._trials and values.get("trials") is not None:
            self._trials.load_state_dict(values["trials"])

    def close(self) -> None:
        """Flushes and removes the hooks, even if a synchronization fails."""
        try:
            self.flush()
        finally:
            self._uses.close()
            super().close()
