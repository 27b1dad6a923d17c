"""DeAR: the reduce-scatter during the backward pass, the all-gather during the next forward pass.

Source: Zhang et al., DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining, ICDCS 2023
(arXiv 2302.12445). The mathematics is that of synchronous training: every group of parameters is updated before it is
used. Per group, all-reduce costs as much as in one piece: (P-1) alpha + n(P-1)/P beta for each half.

With a sparse communicator the halves are those of its own: SparDL's Spar-Reduce-Scatter (and the gather between teams)
goes beside the backward pass, the all-gather inside the teams beside the next forward pass. No paper has this. What a
worker dropped is put back when its all-gather has ended, which is before its next gradient.
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


# Where a forward pass uses which parameters for the first time.
#
# Hooks run before a module's forward, not before the use of a parameter, and a module may use parameters of another:
# attention uses the weights of its output projection without calling it, a tied decoder those of the embedding. So the
# first forward pass is watched, and each first use is booked on the module whose hook ran last before it: from the
# second step on, that hook is the last chance to wait for the parameter. What was not used then is waited for when a
# module that has it is called.


class FirstUses:
    """Tells, before each module's forward, which groups of parameters are about to be used.

    Args:
        model: whose forward passes are watched.
        layer_of: the number of each parameter's layer.
        need: called with the numbers of layers; more often than necessary.
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
        """A forward pass may begin."""
        self._last = None
        self._need(self._at_begin)
        if self._watch is not None and not self._entered:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._entered = True

    def end(self) -> None:
        """The forward pass is over; from now on it is known what it needs."""
        if self._watch is not None and self._entered:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch = None
            for module, needed in self._of.items():
                unseen = set(module.parameters(recurse=False)) - self._seen
                needed |= {self._layer_of[parameter] for parameter in unseen if parameter in self._layer_of}

    def close(self) -> None:
        """Takes the hooks off."""
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
    """Sees the arguments of every function of torch."""

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
    """Overlaps communication with the backward pass and with the forward pass after it.

    Args:
        threshold_mb: most megabytes of gradients in a fusion group; 0: every layer alone.
        layers: so many neighbouring layers in a group instead; ``None`` for groups by size.
        trials: sizes to try in the first steps of training, the first being ``threshold_mb``, of which the fastest is
            kept (Bayesian optimization, section 4 of the paper); 0 for none.
        low_mb: least size to try, in megabytes.
        high_mb: greatest size to try, in megabytes.
        seed: of the choice of sizes.

    Raises:
        ConfigError: if a value is out of range, or two contradict each other.
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
            raise ConfigError("schedule.trials tunes the size of groups; use schedule.layers=null with it")
        if self.trials:
            self._tuner()

    def _tuner(self) -> Trials:
        return Trials(self.low_mb, self.high_mb, self.threshold_mb, self.trials, self.seed)

    def check(self, method: Method, *, clips: bool) -> None:
        """Accepts methods that may rest between their halves."""
        method.check_split()
        if clips:
            method.check_shards()

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With groups by size or by number."""
        cut = partial(self._partition, training.gradient)
        return InHalves(method, cluster, training, cut, self.threshold_mb, self._tuner() if self.trials else None)

    def _partition(self, gradient: Storage, megabytes: float) -> list[Range]:
        if self.layers is not None:
            count = self.layers
            return flat_order(gradient, lambda order: by_count(len(order), count))
        return by_megabytes(gradient, megabytes)


class InHalves(InBackward):
    """Synchronizations rest between their halves, until the update is ordered; layers wait where they are used.

    Args:
        method: how to average.
        cluster: the workers.
        training: what is trained: with a model and an optimizer.
        cut: the partition for groups of so many megabytes.
        megabytes: in a group, at first.
        trials: other sizes to try.
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
            # What was ordered before is for the weights that are there, not for those that take their place.
            model.register_load_state_dict_pre_hook(flush),
            optimizer.register_load_state_dict_pre_hook(flush),
        ]

    def begin(self, local: int = 0) -> None:
        """Forward passes of a local rank come next, and wait for what they use."""
        if local == 0:
            if self._scaling.moves:  # residuals follow, and must not be on their way
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
        """What the forward passes did not use is updated now at the latest, before there are new gradients."""
        self._uses.end()
        super().before_backward(last=last)
        self._late = set(range(len(self._groups))) - self._landed[self._local] if self._landed else set()
        self._land_all(self._local)

    @property
    def updates(self) -> bool:
        """Whether the optimizer's step that is running is one of ours."""
        return self._updater is not None and self._updater.applying

    def forward_ended(self) -> None:
        """A forward pass has ended; what a loss uses beyond it is not waited for as late as could be."""
        self._uses.end()

    def forward_again(self) -> None:
        """Another forward pass of the step begins, when all parameters are up to date."""
        self._late = set()

    def note(self, number: int) -> None:
        """Checks that the forward pass waited for the parameter."""
        group = self._group_of[number]
        if group in self._late:
            raise TrainingError(
                f"the forward pass used {self._gradient.names[number]} where it did not in the first step, before the "
                "parameter was up to date; use schedule=wfbp for models that change their way"
            )
        super().note(number)

    def collect(self) -> None:
        """The rest of the reduce-scatters begin."""
        self._computing = False
        super().collect()

    def agree(self) -> bool:
        """Waits until it is known whether the averages can be used: no gradient overflowed where there is a scale."""
        if self._scaling:
            for flight in self._flights:
                for local in range(len(self._cluster.local_ranks)):
                    flight.boundary(local)
        return not self.overflowed

    def finish(self) -> None:
        """Orders the update; the all-gathers begin, in the order of the forward pass."""
        self._skipped = {self._gradient.parameters[number] for number in self.unused()}
        self._used = self.agree()
        self._multiple = self._factor(self._norm) if self._used else None
        if self._updater:
            self._updater.hold()
        self._go_on()

    def drop(self) -> None:
        """Ends a step whose averages nobody wants."""
        self._used = False
        self._usage.clear()
        self._go_on()

    def _go_on(self) -> None:
        self._landing, self._flights, self._landing_from = self._flights, [], self._whole
        self._landed = [set() for _ in self._cluster.local_ranks]
        self._pending = set(range(len(self._groups)))
        self._averages = [{} for _ in self._cluster.local_ranks]
        for number in reversed(self._order()):
            self._landing[number].resume()

    def _norm(self) -> float:
        """Of the average, from the shards that each worker has."""
        shards = [self._shards(local) for local in range(len(self._cluster.local_ranks))]
        length = self._gradient.layout.length
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
        """A forward pass of the local rank is about to use some layers."""
        if not self._landed or len(self._landed[self._local]) == len(self._groups):
            return
        if self._computing:
            self._cluster.reach(self._local, layers, backward=False)
        for layer in sorted(layers):
            group = next(number for number, group in enumerate(self._groups) if layer < group.layers[1])
            self._land(group, self._local)

    def _land_all(self, local: int) -> None:
        for number in range(len(self._groups) if self._landed else 0):
            self._land(number, local)

    def _land(self, number: int, local: int) -> None:
        """Lets a local rank wait for a group, which is updated when the first of them has it."""
        if number in self._landed[local]:
            return
        average = self._landing[number].wait(local)
        self._averages[local][number] = average
        self._landed[local].add(number)
        if number in self._pending:
            self._pending.remove(number)
            with self._everybody(Phase.UPDATE):
                self._update(number, average)
            if self._scaling and not self._pending:
                self._end()

    def _end(self) -> None:
        """All groups of a step with a scale have landed."""
        if self._used:
            # A sum that overflowed in the second half is left out alone, as the others have been used by now.
            self._scaling.refused.clear()
        else:
            self._scaling.keep([gradients[0] for gradients in self._landing_from])

    def _update(self, number: int, average: Sum) -> None:
        group = self._groups[number]
        self._take_over(group, average)
        gradient = self._part(group)
        if self._multiple is not None:
            gradient.mul_(self._multiple)
        if self._updater and self._used and number not in self._scaling.refused:
            members = self._gradient.parameters[slice(*group.tensors)]
            with self._gradient.exposed(range(*group.tensors)):
                self._updater.apply(parameter for parameter in members if parameter not in self._skipped)
        elif self.carried.remembers and not self._used and not self._scaling.refused:
            group.states[0].change(more=gradient)  # nobody used it: each worker takes its share back
        gradient.zero_()

    @property
    def fixed(self) -> bool:
        """Unless sizes are tried."""
        return self._trials is None

    def flush(self) -> None:
        """Waits for all that is on its way, and updates."""
        if self._trials:
            self._trials.disturb()
        for local in range(len(self._landed)):
            self._land_all(local)

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """That of every schedule, and the trials."""
        return {**super().state_dict(local), "trials": self._trials.state_dict() if self._trials else None}

    def _follow(self, values: Mapping[str, Any]) -> None:
        super()._follow(values)
        if self._trials and values.get("trials") is not None:
            self._trials.load_state_dict(values["trials"])

    def close(self) -> None:
        """Flushes, and takes the hooks off, even if what is on its way is lost."""
        try:
            self.flush()
        finally:
            self._uses.close()
            super().close()
